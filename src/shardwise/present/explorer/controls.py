"""Controls of the page: of the model, the job and the layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from shardwise.hardware import chip_names, get_stack, stack_names
from shardwise.layout import OFFLOADS, cp_variant_names, layout_degrees, seqs_per_replica
from shardwise.model import Architecture, model_names, optimizer_names, policy_names
from shardwise.pipeline.registry import pipeline_schedule_names
from shardwise.present.explorer.change_degrees import fill_devices, with_fields
from shardwise.present.explorer.control_values import (
    MAX_SIZE,
    Control,
    Edit,
    Option,
    checkbox,
    cluster_of_chip,
    divisors,
    doublings,
    has_shorthand,
    num_devices_of,
    option_text,
    other_sizes,
    preset_control,
    select,
    slider,
)
from shardwise.present.explorer.opened_plan import usual_job
from shardwise.present.explorer.request import ViewRequest
from shardwise.present.explorer.state import MOST_CHANGES, layout_text
from shardwise.search import smallest_full_job
from shardwise.values import PRECISIONS, ShardwiseError, format_binary, format_count

MODEL_GROUP = "model"
MAX_GROWTH = 8  # of a model's size on a slider


class Size(NamedTuple):
    """A size of a model: its label and the smallest that is offered."""

    label: str
    minimum: int


SIZES: Mapping[str, Size] = {
    "num_heads": Size("attention heads (a)", 1), "d_model": Size("hidden dimension (h)", 256),
    "d_ff": Size("feed-forward dimension (h_ff)", 256), "num_layers": Size("layers (L)", 1),
    "vocab_size": Size("vocabulary (v)", 1024),
}  # fmt: skip
ACTIVATIONS = ("relu", "gelu", "swiglu")


def model_controls(request: ViewRequest) -> Iterator[Control]:
    """Yield the choices of a model: sizes, activation function and optimizer."""
    model = request.model
    for name, size in SIZES.items():
        current = getattr(model, name)
        sizes = (_option(request, {f"model.{name}": value, **_dependent_sizes(model, name, value)}, value)
                 for value in doublings(current, size.minimum, MAX_GROWTH * current))  # fmt: skip
        yield slider(name, size.label, MODEL_GROUP, current, sizes)
    kinds = (_option(request, {"model.mlp": kind}, kind) for kind in ACTIVATIONS)
    yield select("mlp", "activation function", MODEL_GROUP, model.mlp, kinds)
    optimizers = (_option(request, {"job.optimizer": kind}, kind) for kind in optimizer_names())
    yield select("optimizer", "optimizer (k)", MODEL_GROUP, request.job.optimizer, optimizers)


def _dependent_sizes(model: Architecture, name: str, value: int) -> dict[str, object]:
    """Return the sizes that a size changes: heads fill the hidden dimension, and as many as now share keys and values."""
    if name == "d_model":
        return {"model.head_dim": max(1, value // model.num_heads)}
    if name == "num_heads":
        heads_per_kv_head = model.num_heads // model.num_kv_heads
        kv_heads = value // heads_per_kv_head if value % heads_per_kv_head == 0 else value
        return {"model.head_dim": max(1, model.d_model // value), "model.num_kv_heads": kv_heads}
    return {}


def _option(request: ViewRequest, changes: Mapping[str, object], value: object) -> Option:
    """Return the option that changes values of the model or the job."""
    edit: dict[str, str | None] = {key: str(text) for key, text in changes.items()}
    texts = {**dict(request.state.changes), **{key: str(text) for key, text in changes.items()}}
    state = replace(request.state, changes=tuple(sorted(texts.items())))
    problem = f"at most {MOST_CHANGES} values are changed" if len(texts) > MOST_CHANGES else ""
    try:
        request.resolver.model(state)
        request.resolver.job(state)
    except ShardwiseError as error:
        problem = error.problems[0]
    return Option(value=str(value), edit=edit, problem=problem)


JOB_GROUP = "job"
UNKNOWN, BOUND = "unknown", "a bound"  # where no stack is named
OPTIMAL = "20 per parameter"
RUN_TOKENS = (1e11, 3e11, 1e12, 2e12, 5e12, 15e12)
BATCHES, LENGTHS = (1 << 14, 1 << 27), (512, 1 << 20)  # tokens, from and to


def job_controls(request: ViewRequest, *, free: bool) -> Iterator[Control]:
    """Yield the choices of a job; if the cluster follows the layout (`free`), without devices and batch."""
    state, job = request.state, request.job
    yield preset_control(request, JOB_GROUP)
    yield select("model", "model", JOB_GROUP, state.model, _models(request))
    yield select("chip", "chip", JOB_GROUP, request.cluster.chip.name, _chips(request.cluster.num_devices))
    if has_shorthand(state.cluster) and not free:
        yield slider("devices", "devices", JOB_GROUP, request.cluster.num_devices, _devices(request))
    stack = state.stack or (BOUND if state.overlap else UNKNOWN)
    yield select("stack", "stack", JOB_GROUP, stack, _stacks(request.cluster.chip.platform))
    if not free:
        yield slider(
            "batch_tokens", "batch, tokens", JOB_GROUP, format_binary(job.global_batch_tokens), _batches(request)
        )
    yield slider("seq_len", "sequence, tokens", JOB_GROUP, format_binary(job.seq_len), _lengths(request))
    if not free:
        yield select("tokens", "run, tokens", JOB_GROUP, _tokens_text(state.tokens), _run_lengths(state.tokens))
    recipes = (Option(value=name, edit={"precision": name}) for name in PRECISIONS)
    yield select("precision", "precision", JOB_GROUP, job.precision, recipes)


def _models(request: ViewRequest) -> Iterator[Option]:
    """Yield every model: with its usual job if the current model has its own, without changed sizes, and no layout yet."""
    removed: Edit = {"layout": None, **{key: None for key, _ in request.state.changes if key.startswith("model.")}}
    if (request.job.global_batch_tokens, request.job.seq_len) == usual_job(request.model):
        removed = {**removed, "batch_tokens": None, "seq_len": None}
    for name in dict.fromkeys((*request.resolver.models, *model_names())):
        yield Option(value=name, edit={**removed, "model": name})


@lru_cache(maxsize=16)
def _chips(num_devices: int) -> tuple[Option, ...]:
    """Return every chip of the catalogue, with about as many devices."""
    removed: Edit = {"layout": None, "stack": None}
    return tuple(
        Option(value=name, edit={**removed, "cluster": cluster_of_chip(name, num_devices)}) for name in chip_names()
    )


def _devices(request: ViewRequest) -> Iterator[Option]:
    for cluster in other_sizes(request.state.cluster):
        size = num_devices_of(cluster)
        yield Option(
            value=str(size), edit={"cluster": cluster, "layout": layout_text(fill_devices(request.layout, size))}
        )


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


def _batches(request: ViewRequest) -> Iterator[Option]:
    current, seq_len = request.job.global_batch_tokens, request.job.seq_len
    for size in doublings(current, *BATCHES):
        if size % seq_len == 0:
            yield Option(value=format_binary(size), edit={"batch_tokens": format_binary(size)})


def _lengths(request: ViewRequest) -> Iterator[Option]:
    """Yield lengths of a sequence; the batch grows to a multiple of the length."""
    current = request.job.global_batch_tokens
    for size in doublings(request.job.seq_len, *LENGTHS):
        batch_edit = {"batch_tokens": format_binary(math.lcm(size, current))} if current % size else {}
        yield Option(value=format_binary(size), edit={"seq_len": str(size), **batch_edit})


def _tokens_text(tokens: float | None) -> str:
    return OPTIMAL if tokens is None else format_count(tokens)


def _run_lengths(current: float | None) -> Iterator[Option]:
    """Yield tokens of the whole run: the compute-optimal number, which leaves out the job's, and those of published runs."""
    yield Option(value=OPTIMAL, edit={"tokens": None}, note="compute-optimal: Hoffmann et al. 2022, table 3")
    for tokens in sorted({*RUN_TOKENS, *(() if current is None else (current,))}):
        yield Option(value=format_count(tokens), edit={"tokens": f"{tokens:.17g}"})


LAYOUT_GROUP = "layout"
AXES = {"tp": "tensor (tp)", "pp": "pipeline (pp)", "cp": "context (cp)", "ep": "expert (ep)"}
SWITCHES = {"sequence_parallel": "sequence parallelism", "async_tp": "asynchronous tensor parallelism"}
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
VIRTUAL_STAGES = (1, 2, 3, 4, 6, 8)
MAX_MICRO_BATCH = 64  # sequences of a slider


def layout_controls(request: ViewRequest, *, free: bool) -> Iterator[Control]:
    """Yield the choices of a layout; `free`: the cluster follows it."""
    layout, options = request.layout, _Options(request, free=free)

    def degree(name: str, label: str, values: Sequence[int]) -> Control:
        return slider(name, label, LAYOUT_GROUP, getattr(layout, name), options.of(name, values))

    num_devices = MAX_SIZE if free else request.cluster.num_devices
    for axis, label in AXES.items():
        if axis != "ep" or request.model.num_experts:
            limit = request.model.num_experts if axis == "ep" else MAX_SIZE
            yield degree(axis, label, divisors(num_devices, getattr(layout, axis), limit))
    if free:
        yield slider("data", "data (dp, fsdp)", LAYOUT_GROUP, layout.num_replicas, options.replicas())
    elif layout.zero_stage:
        yield degree("dp", "replicas of ZeRO (dp)", divisors(layout.num_replicas, layout.dp, MAX_SIZE))
    yield degree("micro_batch_seqs", "micro-batch, sequences", options.micro_batch_sizes())
    yield degree("zero_stage", "ZeRO stage", range(4))
    if layout.pp > 1:
        yield degree("num_virtual_stages", "virtual stages", sorted({*VIRTUAL_STAGES, layout.num_virtual_stages}))
    names: dict[str, tuple[str, Sequence[Any]]] = {
        "recompute": ("recompute", tuple(dict.fromkeys((*policy_names(), layout.recompute))))
    }
    names |= {"schedule": ("schedule", pipeline_schedule_names())} if layout.pp > 1 else {}
    names |= {"cp_variant": ("context variant", cp_variant_names())} if layout.cp > 1 else {}
    names |= {"offload": ("offload", OFFLOADS)}
    for name, (label, values) in names.items():
        yield select(name, label, LAYOUT_GROUP, getattr(layout, name), options.of(name, values))
    for name, label in SWITCHES.items():
        yield checkbox(name, label, LAYOUT_GROUP, getattr(layout, name), options.of(name, (False, True)))


class _Options:
    """Options that change the layout of a state."""

    def __init__(self, request: ViewRequest, *, free: bool) -> None:
        self.request, self.layout, self.free = request, request.layout, free

    def of(self, name: str, values: Sequence[Any]) -> Iterator[Option]:
        """Yield the options of a field."""
        for value in values:
            yield self.option(value, {name: value})

    def micro_batch_sizes(self) -> list[int]:
        """Return sizes of a micro-batch up to all sequences of a replica."""
        replica_seqs = int(seqs_per_replica(self.request.job, layout_degrees(self.layout)))
        largest = (replica_seqs,) if replica_seqs <= MAX_MICRO_BATCH else ()
        return sorted(size for size in {*MICRO_BATCHES, self.layout.micro_batch_seqs, *largest} if size)

    def replicas(self) -> Iterator[Option]:
        """Yield degrees of data parallelism, over which ZeRO shards if the layout uses it."""
        name, unused_name = ("fsdp", "dp") if self.layout.zero_stage else ("dp", "fsdp")
        for value in divisors(MAX_SIZE, self.layout.num_replicas, MAX_SIZE):
            yield self.option(value, {name: value, unused_name: 1})

    def option(self, value: Any, fields: Mapping[str, Any]) -> Option:
        """Return the option of other values of some fields, and the problem with them."""
        try:
            layout = with_fields(self.layout, fields, None if self.free else self.request.cluster.num_devices)
            edit = {"layout": layout_text(layout)}
            request = self.request
            if self.free:
                edit |= {"cluster": f"{request.cluster.chip.name}:{layout.num_devices}"}
                job = smallest_full_job(request.job, layout)
                edit |= {"batch_tokens": format_binary(job.global_batch_tokens)}
                cluster = request.resolver.cluster(replace(request.state, cluster=edit["cluster"]))
                request = replace(request, job=job, cluster=cluster)
        except ShardwiseError as error:
            return Option(value=option_text(value), edit={}, problem=error.problems[0])
        return Option(value=option_text(value), edit=edit, problem=next(iter(request.problems_of(layout)), ""))


def controls(request: ViewRequest, *, free: bool = False) -> list[dict[str, Any]]:
    """Return every choice as plain data; `free`: the cluster follows the degrees, and the sizes of the model are choices too."""
    choices = [*job_controls(request, free=free), *layout_controls(request, free=free)]
    choices += model_controls(request) if free else ()
    return [control.payload() for control in choices]
