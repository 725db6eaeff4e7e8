"""Shardwise: how to shard a large transformer, what it costs, what bounds it.

    import shardwise as sw

    plan = sw.plan("llama-3-70b", "h100:512", global_batch_tokens="4Mi", seq_len=8192)
    print(plan)

Plans: `plan`, `plan_clusters`, `plan_to_loss`, `sweep`, `explain`, `simulation`, `instructions`. Launches of frameworks:
`export_plan`, `read_launch`. Prices: `estimate`, `memory`, `roofline`. Notation and network: `matmul`, `reshard`, `collective`.
Pipelines: `schedule`, `schedules`. The books: `rule`, `rules`, `precision`. Measured runs: `mfu`, `calibrate`, `validate`. What
`--json` prints: `json_schemas`. Each takes names and paths, or the values that `load_model`, `load_cluster`, `Job` and
`Layout.parse` give (`shardwise.present.verbs`). Names are loaded when they are first used, so that `import shardwise` is fast and
imports no NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import lazy_loader

from shardwise.values.displayable import set_display_finder as _set_display_finder

if TYPE_CHECKING:
    from shardwise.values import Displayable
    from shardwise.values.displayable import Display

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def _find_display(value: Displayable) -> Display:
    """Return what a notebook shows of a value; `present` is loaded when the first one is shown."""
    from shardwise.present.displays import display_of

    return display_of(value)


_set_display_finder(_find_display)
