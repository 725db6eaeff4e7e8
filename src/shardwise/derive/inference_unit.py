"""The sharded programs of inference: where tokens, weights and caches rest on the devices of one instance, and what moves.

Axes. Copies of attention split the rows of a pass (`dp`), tensor parallelism splits key-value heads (`kv`) and the query heads
of each (`rep`): where a model has fewer key-value heads than there are devices, devices along `rep` keep copies of them. Experts
are split over the same devices. So each of the three is a part that splits experts from each other (`_e`) and a part that splits
each expert's matrices (`_m`), of which engines number the latter innermost. `cp` splits the new tokens of a prefill, `ws` the
width D of all weights (2-D weight-stationary: Pope et al. 2023, "Efficiently Scaling Transformer Inference", 3.2.2).

Experts are reached in one of two ways. With `all_gather`, every device of the instance gathers the tokens of all copies of
attention, computes its own experts or parts of them, and the results are reduced and scattered; where there is one copy, this is
an AllReduce alone. With `all_to_all` each device sends the rows of its part of the tokens to the devices of their experts, and
gets the results back (DeepSeek-AI 2024, DeepEP).

With `batch_in_attention` devices along `rep` share the sequences of a cache in place of copies of it: an AllToAll takes queries
from heads to sequences, and one takes the results back (Pope et al. 2023, 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal

from shardwise.derive.sharded_program import FinalSpec, ProgramStep, ShardedProgram, ShardingTargets, shard_program
from shardwise.model import ModelStructure, Program, Role, Tensor
from shardwise.model.carried_tensors import TABLE_ROWS
from shardwise.model.decoder import MTP_BLOCK_PREFIX
from shardwise.model.decoder_block import RECEIVED, RETURNED
from shardwise.model.inference_program import EXPERT_RESULTS, EXPERT_TOKENS, ROUTER_TOKENS, inference_unit_program
from shardwise.model.operations import CACHED_ATTENTION_OPERATIONS, SLOTS
from shardwise.sharding import Axes, Spec

ATTENTION_DP_AXES: Axes = ("dp_m", "dp_e")
KEY_VALUE_AXES: Axes = ("kv_e", "kv_m")
REPLICA_AXES: Axes = ("rep_e", "rep_m")
TENSOR_AXES: Axes = KEY_VALUE_AXES + REPLICA_AXES
EXPERT_AXES: Axes = ("dp_e", "kv_e", "rep_e")
EXPERT_TENSOR_AXES: Axes = ("dp_m", "kv_m", "rep_m")
TOKEN_SLICE_AXES: Axes = (
    "kv_e",
    "rep_e",
)  # over which devices with the same tokens share these, where rows are exchanged
CONTEXT_AXES: Axes = ("cp",)
WIDTH_AXES: Axes = ("ws",)
STAGE_AXES: Axes = ("pp",)
INSTANCE_AXES: Axes = (  # outermost first
    *STAGE_AXES, *CONTEXT_AXES, "dp_e", "dp_m", *WIDTH_AXES, "kv_e", "kv_m", "rep_e", "rep_m",
)  # fmt: skip
Dispatch = Literal["all_gather", "all_to_all"]
WEIGHT_AXES: Mapping[str, Axes] = {
    "F": TENSOR_AXES, "S": TENSOR_AXES, "V": TENSOR_AXES, TABLE_ROWS: TENSOR_AXES,
    "L": TENSOR_AXES, "K": KEY_VALUE_AXES, "G": REPLICA_AXES,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceScheme:
    """All that the derivation of a pass reads: the model's structure, and choices that degrees leave open.

    `token_dim` is the dim of tokens that is split where devices with the same tokens share them: T, or B where rows have one
    token each. `absorbs_latent`: latent attention as in decode (`model.inference_program`).
    """

    structure: ModelStructure
    dispatch: Dispatch = "all_gather"
    token_dim: Literal["B", "T"] = "T"
    absorbs_latent: bool = False
    batch_in_attention: bool = False
    splits_width: bool = False

    def for_unit(self, structure: ModelStructure) -> InferenceScheme:
        """Return the scheme of a unit that is built from one structure, without what its derivation does not depend on."""
        return replace(
            self, structure=structure, dispatch=self.dispatch if structure.experts else "all_gather",
            token_dim=self.token_dim if structure.experts and self.dispatch == "all_to_all" else "T",
            absorbs_latent=self.absorbs_latent and structure.latent,
        )  # fmt: skip

    def token_spec(self, dims: tuple[str, ...]) -> Spec:
        """Return the resting spec of tokens; those of one row are on all devices of its tensor parallelism."""
        axes = {"B": ATTENTION_DP_AXES, "T": CONTEXT_AXES, "D": WIDTH_AXES if self.splits_width else ()}
        return Spec.of(dims, {dim: split for dim, split in axes.items() if dim in dims})

    def weight_spec(self, dims: tuple[str, ...]) -> Spec:
        """Return the spec of a weight. One whose first dim is E belongs to experts; a router is not split."""
        axes = {dim: WEIGHT_AXES[dim] for dim in dims if dim in WEIGHT_AXES}
        if dims[0] == "E" and len(dims) > 1:
            axes |= {"E": EXPERT_AXES, "M": EXPERT_TENSOR_AXES}
        axes |= {"D": WIDTH_AXES if self.splits_width else ()}
        return Spec.of(dims, {dim: split for dim, split in axes.items() if dim in dims})

    def cache_spec(self, dims: tuple[str, ...]) -> Spec:
        """Return the spec in which a cache or a state rests: split by sequence, and by key-value head where it has these."""
        shared_by: Axes = ()
        if self.batch_in_attention and "L" not in dims:
            shared_by = REPLICA_AXES if "K" in dims else REPLICA_AXES + KEY_VALUE_AXES
        axes = {"B": ATTENTION_DP_AXES + shared_by, "K": KEY_VALUE_AXES, "L": TENSOR_AXES}
        return Spec.of(dims, {dim: split for dim, split in axes.items() if dim in dims})

    def input_spec(self, tensor: Tensor) -> Spec:
        """Return the spec of an input of a pass."""
        match tensor.role:
            case Role.WEIGHT:
                return self.weight_spec(tensor.dims)
            case Role.CACHE | Role.RECURRENT_STATE:
                return self.cache_spec(tensor.dims)
            case Role.CARRIED if SLOTS in tensor.dims:  # the cache of another layer
                return self.cache_spec(tensor.dims)
            case _:
                return self.token_spec(tensor.dims)

    def expert_token_spec(self, dims: tuple[str, ...]) -> Spec:
        """Return the spec of tokens where experts are reached: of all copies of attention on every device, or each device with
        a part of its own copy's."""
        spec = self.token_spec(dims)
        if self.dispatch == "all_gather":
            return spec.with_axes("B", ())
        return spec.with_axes(self.token_dim, spec.axes_of(self.token_dim) + TOKEN_SLICE_AXES)

    def received_spec(self, dims: tuple[str, ...]) -> Spec:
        """Return the spec of rows at their experts."""
        return self.token_spec(dims).with_axes("B", ()).with_axes("E", EXPERT_AXES)

    def returned_spec(self, now: Spec) -> Spec:
        """Return the spec of the experts' rows, given that in which they are computed: exchanged rows return to their tokens;
        parts of sums stay so, since they are added up for each token first."""
        if self.dispatch == "all_gather":
            return now
        target = self.expert_token_spec(now.dims)
        return target.with_partial(axis for axis in now.partial if axis not in target.sharded_axes)

    def expert_result_spec(self, now: Spec) -> Spec:
        """Return the spec of the experts' results: with their tokens. Where tokens were gathered it is still a partial sum over
        tensor parallelism, so that a shared expert's result is added before the sum is reduced."""
        partial_axes = TENSOR_AXES if self.dispatch == "all_gather" else ()
        return self.token_spec(now.dims).with_partial(axis for axis in now.partial if axis in partial_axes)

    def head_spec(self, dims: tuple[str, ...]) -> Spec:
        """Return the spec of heads outside attention."""
        axes = {"B": ATTENTION_DP_AXES, "T": CONTEXT_AXES, "K": KEY_VALUE_AXES, "G": REPLICA_AXES}
        return Spec.of(dims, {dim: split for dim, split in axes.items() if dim in dims})


@dataclass(frozen=True, slots=True)
class InferenceUnit:
    """A unit's sharded program for a pass, and the scheme that it follows."""

    name: str
    scheme: InferenceScheme
    forward: ShardedProgram

    @property
    def program(self) -> Program:
        return self.forward.program

    @property
    def steps(self) -> tuple[ProgramStep, ...]:
        return self.forward.steps


def derive_inference_unit(scheme: InferenceScheme, name: str) -> InferenceUnit:
    """Return the sharded program of a unit of a model: "embedding", a kind of layer, "predict", "head" or "carry"."""
    return _derive_cached(scheme.for_unit(scheme.structure.unit_structure(name)), name)


@lru_cache(maxsize=256)
def _derive_cached(scheme: InferenceScheme, name: str) -> InferenceUnit:
    program = inference_unit_program(scheme.structure, name, absorbs_latent=scheme.absorbs_latent)
    resting = {tensor: scheme.input_spec(program.tensors[tensor]) for tensor in program.inputs}
    targets = ShardingTargets(
        use={weight: scheme.weight_spec(program.dims(weight)) for weight in program.weights},
        immediate=_immediate_specs(scheme, program), final=_final_specs(program),
    )  # fmt: skip
    return InferenceUnit(name, scheme, shard_program(program, resting, targets))


def _immediate_specs(scheme: InferenceScheme, program: Program) -> dict[str, FinalSpec]:
    """Return the specs that results take as soon as they are computed."""
    handed = (*program.names_with_role(Role.RESIDUAL), *program.names_with_role(Role.CARRIED))
    residual = (name for name in handed if name not in program.inputs)
    specs: dict[str, FinalSpec] = {name: scheme.token_spec(program.dims(name)) for name in residual}
    for prefix in ("", MTP_BLOCK_PREFIX):
        if (tokens := prefix + EXPERT_TOKENS) not in program.tensors:
            continue
        gates = scheme.expert_token_spec(program.dims(f"{prefix}gates"))
        if scheme.dispatch == "all_gather":
            gates = gates.with_axes("E", EXPERT_AXES)
        specs |= {
            tokens: scheme.expert_token_spec(program.dims(tokens)), f"{prefix}gates": gates,
            prefix + ROUTER_TOKENS: scheme.expert_token_spec(program.dims(tokens)),
            _routed_name(program, RECEIVED): scheme.received_spec(program.dims(_routed_name(program, RECEIVED))),
            _routed_name(program, RETURNED): scheme.returned_spec, prefix + EXPERT_RESULTS: scheme.expert_result_spec,
        }  # fmt: skip
    if scheme.batch_in_attention:
        attentions = (op for op in program.operations if isinstance(op, CACHED_ATTENTION_OPERATIONS))
        results = (op.outputs[0] for op in attentions)
        specs |= {name: scheme.head_spec(program.dims(name)) for name in results}
    return specs


def _routed_name(program: Program, ending: str) -> str:
    """Return the name of the rows that are handed to experts, or back."""
    return next(name for name in program.names_with_role(Role.ROUTED) if name in (ending, MTP_BLOCK_PREFIX + ending))


def _final_specs(program: Program) -> dict[str, FinalSpec]:
    """Return the specs of results at the end: every device of a copy of attention gets the logits of its tokens."""
    logits = (name for name in program.outputs if program.tensors[name].role is Role.LOGITS)
    return {name: partial(_gathered, dim="V") for name in logits}


def _gathered(spec: Spec, dim: str) -> Spec:
    return spec.with_partial(()).with_axes(dim, ())
