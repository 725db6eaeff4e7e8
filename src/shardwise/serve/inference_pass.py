"""One pass of an inference engine on the devices of one instance: kernels, collectives, resting weights and caches of each unit.

A pass computes groups of sequences that are alike: chunks of prefill, and sequences that decode. Kernels between the projections
of attention depend on the sequences that tokens belong to, and run for each group; all others run once over the tokens of all
groups (`token_kernels`, `group_kernels`). Everything is derived from the model's programs of inference; sizes are expressions
that are evaluated with numbers or arrays of them (`instance_degrees`, `InferencePass.token_values` and `group_values`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from shardwise.derive.inference_unit import (
    CONTEXT_AXES,
    INSTANCE_AXES,
    STAGE_AXES,
    WIDTH_AXES,
    Dispatch,
    InferenceScheme,
)
from shardwise.layout.sharding_scheme import shared_kv_heads
from shardwise.model import Architecture
from shardwise.model.operations import SLOTS, SPAN
from shardwise.model.program import ModelPart
from shardwise.model.structure import WindowKind
from shardwise.serve.serving_layout import CacheSplit, ServingLayout
from shardwise.sharding import Axes
from shardwise.step.inference_kernels import (
    TOUCHED,
    CacheTensor,
    InferenceKernels,
    PassKernel,
    inference_kernels,
)
from shardwise.step.instructions import UnitCollective
from shardwise.values import Polynomial, SymbolValues, Value, ceil_div, maximum, minimum, where
from shardwise.values.symbolic import gcd

GroupKind = Literal["prefill", "decode"]
VOCABULARY = ModelPart.VOCABULARY.value
PREFILL: GroupKind = "prefill"
DECODE: GroupKind = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGroup:
    """Sequences of a pass that are alike, over all copies of attention of one instance; each number may be an array.

    Each has `cached_tokens` in the cache and computes `new_tokens` more: 1 where it decodes, more with drafted tokens.
    `num_logits` of these give logits: 1, or all with drafted tokens.
    """

    kind: GroupKind
    num_seqs: Value
    new_tokens: Value = 1
    cached_tokens: Value = 0
    num_logits: Value = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PassUnit:
    """A unit of a pass. The model has `count` of them, of layers as many as have this `window` (None: all tokens before), of this
    kind: the last tokens, or those of a token's chunk.

    `token_kernels` and `token_collectives` run once over the tokens of all groups, `group_kernels` and `group_collectives` for
    each group of their kind. `weights` are elements that rest on one device, by group of weights (attention, mlp, experts,
    router, norm, vocabulary, recurrence, prediction).
    """

    name: str
    count: int
    window: int | None
    window_kind: WindowKind
    token_kernels: tuple[PassKernel, ...]
    token_collectives: tuple[UnitCollective, ...]
    group_kernels: Mapping[GroupKind, tuple[PassKernel, ...]]
    group_collectives: Mapping[GroupKind, tuple[UnitCollective, ...]]
    weights: Mapping[str, Polynomial]
    cache: tuple[CacheTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassForm:
    """Choices of a layout that its derivation depends on, beside the degrees (`ServingLayout`): how tokens reach their experts,
    where the cache rests beyond the key-value heads, and whether the width of all weights is split."""

    dispatch: Dispatch = "all_gather"
    cache_split: CacheSplit = "heads"
    splits_width: bool = False

    @classmethod
    def of(cls, layout: ServingLayout) -> PassForm:
        """Return the form of a layout."""
        return cls(dispatch=layout.dispatch, cache_split=layout.cache_split, splits_width=layout.ws > 1)


DEFAULT_FORM = PassForm()
REDUNDANT = "redundant_experts"  # a number of a layout beside the degrees of its axes


@dataclass(frozen=True)
class InferencePass:
    """The units of a model in a pass: embedding, kinds of layers, head, modules of multi-token prediction, and the hand-over
    between pipeline stages ("carry", one for each boundary).

    >>> import shardwise as sw
    >>> from shardwise.serve import SequenceGroup, ServingLayout
    >>> model, layout = sw.load_model("llama-3.1-8b"), ServingLayout(tp=2)
    >>> groups = [SequenceGroup(kind="decode", num_seqs=64, cached_tokens=4095)]
    >>> block = inference_pass(model).unit("block")
    >>> values = inference_pass(model).group_values(block, groups[0], instance_degrees(model, layout))
    >>> attention = next(k.kernel for k in block.group_kernels["decode"] if k.kernel.kind == "cached_attention")
    >>> attention.flops.evaluate(values) == 4 * 64 * 4096 * 32 * 128 / 2  # 4 BTNH of each query over its slots, by tp
    True
    """

    architecture: Architecture
    form: PassForm = DEFAULT_FORM

    def scheme(self, kind: GroupKind) -> InferenceScheme:
        """Return the scheme that the pass of one kind of group follows."""
        return InferenceScheme(
            structure=self.architecture.structure, dispatch=self.form.dispatch, absorbs_latent=kind == DECODE,
            batch_in_attention=self.form.cache_split == "heads_then_batch", splits_width=self.form.splits_width,
        )  # fmt: skip

    @cached_property
    def units(self) -> tuple[PassUnit, ...]:
        """The units, in the order of the model."""
        architecture = self.architecture
        layers = [
            self._unit(name, count, window)
            for name, total in architecture.layer_counts.items()
            for window, count in _window_counts(architecture.unit_architecture(name), total).items()
        ]
        predict = [self._unit("predict", architecture.num_predict_layers)] if architecture.num_predict_layers else []
        return (self._unit("embedding", 1), *layers, *predict, self._unit("head", 1), self._unit("carry", 0))

    def unit(self, name: str, window: int | None = None) -> PassUnit:
        """Return the unit of a name; of a kind of layer with several windows that with this one."""
        return next(unit for unit in self.units if unit.name == name and unit.window == window)

    def _unit(self, name: str, count: int, window: int | None = None) -> PassUnit:
        parts: dict[GroupKind, InferenceKernels] = {
            PREFILL: inference_kernels(self.scheme(PREFILL), name), DECODE: inference_kernels(self.scheme(DECODE), name)
        }  # fmt: skip
        shared = parts[DECODE]
        weights = dict(shared.weights)
        if name == "embedding" and self.architecture.tied_embeddings:  # the matrix rests once, with the head
            head = inference_kernels(self.scheme(DECODE), "head").weights
            weights[VOCABULARY] = weights[VOCABULARY] + head[VOCABULARY] * -1.0
        return PassUnit(
            name=name, count=count, window=window,
            window_kind=self.architecture.unit_architecture(name).window_kind,
            token_kernels=_kernels(shared, by_sequence=False), token_collectives=_collectives(shared, by_sequence=False),
            group_kernels={kind: _kernels(part, by_sequence=True) for kind, part in parts.items()},
            group_collectives={kind: _collectives(part, by_sequence=True) for kind, part in parts.items()},
            weights=weights, cache=shared.cache,
        )  # fmt: skip

    def token_values(
        self, unit: PassUnit, groups: Sequence[SequenceGroup], degrees: Mapping[str, Value]
    ) -> SymbolValues:
        """Return the values of all symbols in `token_kernels` and `token_collectives`, on the fullest device.

        Each copy of attention is a row with the tokens of its sequences. Routing is uniform: of E experts n tokens with k of
        them touch E (1 - (1 - k/E)^n).
        """
        copies = degrees["dp_m"] * degrees["dp_e"]
        per_copy = [(ceil_div(group.num_seqs, copies), group) for group in groups]
        return self._values(
            unit, degrees,
            {
                "B": copies,
                "T": sum((seqs * group.new_tokens for seqs, group in per_copy), start=0),
                "j": sum((seqs * group.num_logits for seqs, group in per_copy), start=0),
                TOUCHED: self.touched_share(unit, groups, degrees),
            },
        )  # fmt: skip

    def touched_share(self, unit: PassUnit, groups: Sequence[SequenceGroup], degrees: Mapping[str, Value]) -> Value:
        """Return the share of the experts that any token of the pass takes, if routing is uniform."""
        dims = self._dims(unit, degrees)
        tokens = sum((group.num_seqs * group.new_tokens for group in groups), start=0) / degrees["cp"]
        return 1.0 - (1.0 - dims["k"] / dims["E"]) ** tokens

    def group_values(self, unit: PassUnit, group: SequenceGroup, degrees: Mapping[str, Value]) -> SymbolValues:
        """Return the values of all symbols in the kernels and collectives of one group, on the fullest device.

        Z are the slots that are read of each sequence, which a window bounds; `span` is the share of them that a new token sees.
        """
        architecture = self.architecture.unit_architecture(unit.name)
        slots, seen = slots_of_group(group, unit.window, unit.window_kind)
        values = {"B": group.num_seqs, "T": group.new_tokens, SLOTS: slots, SPAN: seen / slots, "j": group.num_logits}
        if architecture.index_topk:
            values["s"] = num_selected(architecture, seen)
        return self._values(unit, degrees, values)

    def _dims(self, unit: PassUnit, degrees: Mapping[str, Value]) -> dict[str, Value]:
        return unit_dims(self.architecture.unit_architecture(unit.name), degrees.get(REDUNDANT, 0))

    def _values(self, unit: PassUnit, degrees: Mapping[str, Value], values: Mapping[str, Value]) -> SymbolValues:
        return SymbolValues({**self._dims(unit, degrees), **degrees, **values})


@lru_cache(maxsize=64)
def inference_pass(architecture: Architecture, form: PassForm = DEFAULT_FORM) -> InferencePass:
    """Return the units of a model in a pass. All layouts share it: degrees are symbols."""
    return InferencePass(architecture, form)


def unit_dims(layer: Architecture, redundant_experts: Value) -> dict[str, Value]:
    """Return the sizes of a unit's dims; copies of experts are counted among its experts: they take a share of the tokens, and
    the router's columns count them."""
    return {**layer.dims, "E": layer.dims["E"] + redundant_experts} if layer.num_experts else dict(layer.dims)


def num_selected(architecture: Architecture, seen: Value) -> Value:
    """Return how many slots, or blocks of slots, an indexer selects for a token that sees so many; of the blocks the token's own
    is half behind it on average."""
    if not architecture.index_block:
        return minimum(architecture.index_topk, seen)
    return minimum(architecture.index_topk - 0.5, seen / architecture.index_block)


def slots_of_group(group: SequenceGroup, window: int | None, kind: WindowKind = "sliding") -> tuple[Value, Value]:
    """Return the slots of the cache that are read of each sequence, and how many of them each new token sees on average.

    A token sees itself and those before it, at most `window` of them. Of a chunk of the sequence it sees those since the chunk
    began: behind the first chunk (w + 1) / 2 of w on average, since a group's sequences are anywhere in their chunks.

    >>> slots_of_group(SequenceGroup(kind="prefill", num_seqs=1, new_tokens=4, cached_tokens=6), None)
    (10, 8.5)
    >>> slots_of_group(SequenceGroup(kind="prefill", num_seqs=1, new_tokens=4, cached_tokens=6), 8)
    (10, 7.75)
    >>> slots_of_group(SequenceGroup(kind="decode", num_seqs=8, cached_tokens=6), 4)
    (4, 4.0)
    >>> slots_of_group(SequenceGroup(kind="decode", num_seqs=8, cached_tokens=99), 31, "chunked")
    (16.0, 16.0)
    """
    new, cached = group.new_tokens, group.cached_tokens
    if window is None:
        return cached + new, cached + (new + 1) / 2
    rising = minimum(maximum(window - cached, 0), new)  # tokens that see all before them
    limit: float = window if kind == "sliding" else (window + 1) / 2
    seen = rising * cached + rising * (rising + 1) / 2 + (new - rising) * limit
    slots = where(rising >= new, cached + new, minimum(cached + new, limit + new - 1))
    return slots, seen / new


def instance_degrees(architecture: Architecture, layout: ServingLayout) -> dict[str, Value]:
    """Return the degrees of one instance's axes (`derive.inference_unit`), outermost first as engines number devices, and its
    redundant experts."""
    degrees = axis_degrees(
        shared_kv_heads(architecture), tp=layout.tp, attention_dp=layout.attention_dp,
        expert_tp=layout.expert_tp_degree, pp=layout.pp, cp=layout.cp, ws=layout.ws,
    )  # fmt: skip
    return {**degrees, REDUNDANT: layout.redundant_experts}


def axis_degrees(
    num_kv_heads: int, *, tp: Value, attention_dp: Value, expert_tp: Value, pp: Value = 1, cp: Value = 1, ws: Value = 1
) -> dict[str, Value]:
    """Return the degrees of one instance's axes, of numbers or arrays. Each expert's matrices are split over the innermost
    devices."""
    kv = gcd(tp, num_kv_heads)
    rep = tp // kv
    rep_m = gcd(expert_tp, rep)
    kv_m = gcd(expert_tp // rep_m, kv)
    dp_m = expert_tp // (rep_m * kv_m)
    return {
        STAGE_AXES[0]: pp, CONTEXT_AXES[0]: cp, "dp_e": attention_dp // dp_m, "dp_m": dp_m, WIDTH_AXES[0]: ws,
        "kv_e": kv // kv_m, "kv_m": kv_m, "rep_e": rep // rep_m, "rep_m": rep_m,
    }  # fmt: skip


def axis_stride(axes: Axes, degrees: Mapping[str, Value]) -> Value:
    """Return the distance between neighbours of a group along `axes` in the numbering of devices: the product of the degrees
    inside the innermost axis of the group that has more than one device."""
    stride: Value = 1
    for axis in reversed(INSTANCE_AXES):
        if axis in axes and not (isinstance(degrees[axis], int) and degrees[axis] == 1):
            return stride
        stride = stride * degrees[axis]
    return stride


def _window_counts(architecture: Architecture, num_layers: int) -> dict[int | None, int]:
    """Return how many layers of a kind have each window; None: none."""
    windowed = min(architecture.num_windowed_layers, num_layers)
    counts: dict[int | None, int] = {architecture.sliding_window: windowed, None: num_layers - windowed}
    return {window: count for window, count in counts.items() if count}


def _kernels(part: InferenceKernels, *, by_sequence: bool) -> tuple[PassKernel, ...]:
    return tuple(kernel for kernel in part.kernels if kernel.by_sequence is by_sequence)


def _collectives(part: InferenceKernels, *, by_sequence: bool) -> tuple[UnitCollective, ...]:
    return tuple(moved.collective for moved in part.collectives if moved.by_sequence is by_sequence)
