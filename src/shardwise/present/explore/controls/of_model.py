"""The sizes of a model, in the letters of the Ultra-Scale Playbook's memory widget, and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from shardwise.model import Architecture, optimizer_names
from shardwise.present.explore.asked import Asked
from shardwise.present.explore.controls.control import Control, Option, select, slider
from shardwise.present.explore.controls.sizes import doublings
from shardwise.present.explore.state import MOST_CHANGES
from shardwise.values import ShardwiseError

GROUP = "model"
TIMES = 8  # a slider goes to so many times what the model has


class Size(NamedTuple):
    """A size of a model: its label and the least that is offered."""

    label: str
    least: int


SIZES: Mapping[str, Size] = {
    "num_heads": Size("attention heads (a)", 1), "d_model": Size("hidden dimension (h)", 256),
    "d_ff": Size("feed-forward dimension (h_ff)", 256), "num_layers": Size("layers (L)", 1),
    "vocab_size": Size("vocabulary (v)", 1024),
}  # fmt: skip
ACTIVATIONS = ("relu", "gelu", "swiglu")


def model_controls(asked: Asked) -> Iterator[Control]:
    """Sizes, activation function and optimizer."""
    model = asked.model
    for name, size in SIZES.items():
        own = getattr(model, name)
        sizes = (_option(asked, {f"model.{name}": value, **_follows(model, name, value)}, value)
                 for value in doublings(own, size.least, TIMES * own))  # fmt: skip
        yield slider(name, size.label, GROUP, own, sizes)
    kinds = (_option(asked, {"model.mlp": kind}, kind) for kind in ACTIVATIONS)
    yield select("mlp", "activation function", GROUP, model.mlp, kinds)
    optimizers = (_option(asked, {"job.optimizer": kind}, kind) for kind in optimizer_names())
    yield select("optimizer", "optimizer (k)", GROUP, asked.job.optimizer, optimizers)


def _follows(model: Architecture, name: str, value: int) -> dict[str, object]:
    """What goes with a size: heads are as wide as the model is, and share keys and values as many at a time as now."""
    if name == "d_model":
        return {"model.head_dim": max(1, value // model.num_heads)}
    if name == "num_heads":
        each = model.num_heads // model.num_kv_heads
        kv_heads = value // each if value % each == 0 else value
        return {"model.head_dim": max(1, model.d_model // value), "model.num_kv_heads": kv_heads}
    return {}


def _option(asked: Asked, changes: Mapping[str, object], value: object) -> Option:
    """Values of the model or the job in place of its own, and why it cannot have them."""
    edit: dict[str, str | None] = {key: str(text) for key, text in changes.items()}
    texts = {**dict(asked.state.changes), **{key: str(text) for key, text in changes.items()}}
    state = replace(asked.state, changes=tuple(sorted(texts.items())))
    problem = f"at most {MOST_CHANGES} values are changed" if len(texts) > MOST_CHANGES else ""
    try:
        asked.known.model(state)
        asked.known.job(state)
    except ShardwiseError as error:
        problem = error.problems[0]
    return Option(value=str(value), edit=edit, problem=problem)
