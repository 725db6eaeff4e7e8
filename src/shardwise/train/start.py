"""A run of all its ranks on this machine: what needs no PyTorch is checked first, then they are started."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from shardwise.measurement.folder import read_json
from shardwise.planning.codec import load_plan
from shardwise.train.admission import admit
from shardwise.train.elastic import launch_elastic
from shardwise.train.flags import settings_of, words_of
from shardwise.train.launch import launch, set_threads
from shardwise.train.lock import require_free


def start(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Train, and give the run's summary. A plan of one device runs in this process.

    Raises `ShardwiseError` for what is wrong before it starts, and `SystemExit` where the run said itself why it ended: wrong
    input that only a rank could see, or a signal.
    """
    settings = settings_of(arguments)
    settings.out.require_place(resume=settings.resume, force=settings.force)
    require_free(settings.out.path)
    plan = load_plan(settings.plan)
    admit(plan, settings)
    ranks = plan.layout.num_devices
    set_threads(ranks)
    if ranks > 1:
        words = words_of(arguments)
        code = launch_elastic(words, plan, settings.recipe.max_restarts) if settings.elastic else launch(words, ranks)
    else:
        from shardwise.train import parts
        from shardwise.train.run import run

        code = run(settings, parts.own_parts()).code
    if code:
        raise SystemExit(code)
    return read_json(settings.out.summary)
