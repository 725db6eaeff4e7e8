"""Layers of pipeline stages as Megatron-Core writes them: `--pipeline-model-parallel-layout "Ett|ttt|ttL"`.

Source: Megatron-Core, transformer/pipeline_parallel_layer_layout.py: E the embedding, t a decoder layer, m a module of
multi-token prediction, L the loss, | between stages, *N and (...)*N for N of what stands before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardwise.errors import InputError

MOST = 100_000  # characters of a layout, written out
_REPEATED = re.compile(r"\(([^()]*)\)\*(\d+)")
_MANY = re.compile(r"([EtmL|])\*(\d+)")


def layout_text(stages: Sequence[int], num_predict_layers: int) -> str:
    """The stages in Megatron's letters; modules of multi-token prediction and the loss are with the last."""
    parts = ["t" * layers for layers in stages]
    parts[0] = "E" + parts[0]
    parts[-1] += "m" * num_predict_layers + "L"
    return "|".join(parts)


def layout_stages(text: str) -> tuple[int, ...]:
    """Layers of each stage. Raises `InputError` for what is no such text."""
    found = re.sub(r"[\s,]", "", text)
    for pattern in (_REPEATED, _MANY, _REPEATED):
        found = pattern.sub(_written_out, found)
    if set(found) - set("EtmL|") or found.count("E") != 1 or found.count("L") != 1:
        raise InputError(
            f"pipeline-model-parallel-layout: found {text[:80]!r}; stages such as Ett|ttt|ttL are required"
        )
    return tuple(stage.count("t") for stage in found.split("|"))


def _written_out(match: re.Match[str]) -> str:
    if len(match[1]) * int(match[2][:7]) > MOST:
        raise InputError(f"pipeline-model-parallel-layout: {match[0][:40]!r} is too long")
    return match[1] * int(match[2])
