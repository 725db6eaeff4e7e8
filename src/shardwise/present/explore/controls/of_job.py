"""What the job is: the model, the chip and how many, the stack, the batch, the sequence, the precision."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from shardwise.hardware import chip_names, get_stack, stack_names
from shardwise.model import model_names
from shardwise.present.explore.asked import Asked
from shardwise.present.explore.controls.control import Control, Edit, Option, select, slider
from shardwise.present.explore.controls.moved import refilled
from shardwise.present.explore.controls.presets import preset_control
from shardwise.present.explore.controls.sizes import doublings, has_shorthand, num_devices_of, on_chip, other_sizes
from shardwise.present.explore.state import layout_text
from shardwise.values import PRECISIONS, format_binary

GROUP = "job"
UNKNOWN, BOUND = "unknown", "a bound"  # where no stack is named
BATCHES, LENGTHS = (1 << 14, 1 << 27), (512, 1 << 20)  # tokens, from and to


def job_controls(asked: Asked, *, free: bool) -> Iterator[Control]:
    """The choices of a job; where the cluster follows the layout (`free`), neither devices nor the batch are among them."""
    state, job = asked.state, asked.job
    yield preset_control(asked, GROUP)
    yield select("model", "model", GROUP, state.model, _models(asked))
    yield select("chip", "chip", GROUP, asked.cluster.chip.name, _chips(asked.cluster.num_devices))
    if has_shorthand(state.cluster) and not free:
        yield slider("devices", "devices", GROUP, asked.cluster.num_devices, _devices(asked))
    stack = state.stack or (BOUND if state.overlap else UNKNOWN)
    yield select("stack", "stack", GROUP, stack, _stacks(asked.cluster.chip.platform))
    if not free:
        yield slider("batch_tokens", "batch, tokens", GROUP, format_binary(job.global_batch_tokens), _batches(asked))
    yield slider("seq_len", "sequence, tokens", GROUP, format_binary(job.seq_len), _lengths(asked))
    recipes = (Option(value=name, edit={"precision": name}) for name in PRECISIONS)
    yield select("precision", "precision", GROUP, job.precision, recipes)


def _models(asked: Asked) -> Iterator[Option]:
    """Every model; another one has its own sizes, and no layout yet."""
    anew: Edit = {"layout": None, **{key: None for key, _ in asked.state.changes if key.startswith("model.")}}
    for name in dict.fromkeys((*asked.known.models, *model_names())):
        yield Option(value=name, edit={**anew, "model": name})


@lru_cache(maxsize=16)
def _chips(num_devices: int) -> tuple[Option, ...]:
    """Every chip of the catalogue, with about as many devices."""
    anew: Edit = {"layout": None, "stack": None}
    return tuple(Option(value=name, edit={**anew, "cluster": on_chip(name, num_devices)}) for name in chip_names())


def _devices(asked: Asked) -> Iterator[Option]:
    for cluster in other_sizes(asked.state.cluster):
        size = num_devices_of(cluster)
        yield Option(value=str(size), edit={"cluster": cluster, "layout": layout_text(refilled(asked.layout, size))})


def _stacks(platform: str | None) -> Iterator[Option]:
    yield Option(
        value=UNKNOWN, edit={"stack": None, "overlap": None}, note="the defaults of its kind, a wider interval"
    )
    yield Option(
        value=BOUND, edit={"stack": None, "overlap": "per_axis"}, note="kernels and links at the best that was measured"
    )
    for name in stack_names():
        if platform in get_stack(name).platforms:
            yield Option(value=name, edit={"stack": name, "overlap": None})


def _batches(asked: Asked) -> Iterator[Option]:
    own, seq_len = asked.job.global_batch_tokens, asked.job.seq_len
    for size in doublings(own, *BATCHES):
        if size % seq_len == 0:
            yield Option(value=format_binary(size), edit={"batch_tokens": format_binary(size)})


def _lengths(asked: Asked) -> Iterator[Option]:
    """Lengths of a sequence; the batch grows to a whole number of them where it is none."""
    own = asked.job.global_batch_tokens
    for size in doublings(asked.job.seq_len, *LENGTHS):
        also = {"batch_tokens": format_binary(math.lcm(size, own))} if own % size else {}
        yield Option(value=format_binary(size), edit={"seq_len": str(size), **also})
