"""The sharded programs of each unit of a model: forward, backward and update, for one sharding scheme.

A unit is a part of a model that is derived and priced once, however often the model has it: embedding, block, head. The
backward program begins with the slice of the forward program that is recomputed. Each is an ordinary program put through
`shard_program`; communication, FLOPs, bytes read and written, and bytes saved follow from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple, TypeGuard

from shardwise.derive.ring_attention_and_matmul import group_rings
from shardwise.derive.sharded_program import (
    CollectiveStep,
    ComputeStep,
    FinalSpec,
    ProgramNode,
    ProgramStep,
    ShardedProgram,
    ShardingTargets,
    shard_program,
    steps_of_nodes,
)
from shardwise.derive.tensor_specs import (
    gradient_resting_spec,
    handed_spec,
    immediate_specs,
    input_specs,
    optimizer_resting_spec,
    state_resting_spec,
    ulysses_specs,
    use_specs,
    weight_resting_spec,
    weight_use_spec,
    zero_axes_of_weight,
)
from shardwise.layout import ShardingScheme
from shardwise.model import (
    MTP_UNITS,
    Operation,
    Program,
    Role,
    Tensor,
    get_optimizer,
    owning_weight,
    weight_matrices,
    whole_matrix_inputs,
)
from shardwise.model.backward import BackwardProgram, split_saved, transpose_program
from shardwise.model.decoder import UNITS_WITH_IMMEDIATE_BACKWARD, unit_program, units_of_structure
from shardwise.model.operations import ATTENTION_OPERATIONS
from shardwise.model.optimizer_program import WeightMatrix, build_optimizer_program
from shardwise.sharding import Spec

MAX_CACHED_UNITS = 32  # those of a few layouts; a search derives hundreds and keeps only what it reads off them


@dataclass(frozen=True, slots=True)
class ShardedUnit:
    """A unit's sharded programs; `backward` is `recompute_nodes` and then `backward_nodes`.

    `scheme` is its sharding scheme. `saved` are the specs of the tensors that the forward pass keeps for the backward pass.
    `gathered_weights` are weights that the forward pass gathers and the backward pass still has, in the spec of their use:
    those of `UNITS_WITH_IMMEDIATE_BACKWARD`. `gradients` has the name of the gradient of each of the unit's own trained
    weights; that of a borrowed weight stays a partial sum, which the owner reduces with its own. `tensors` are those of all
    three programs, by name; `forward_index` is that of `model.backward.BackwardProgram`.
    """

    name: str
    scheme: ShardingScheme
    forward: ShardedProgram
    recompute_nodes: tuple[ProgramNode, ...]
    backward_nodes: tuple[ProgramNode, ...]
    backward: ShardedProgram
    update: ShardedProgram
    saved: Mapping[str, Spec]
    gathered_weights: Mapping[str, Spec]
    gradients: Mapping[str, str]
    tensors: Mapping[str, Tensor]
    forward_index: Mapping[str, int]

    @property
    def weights(self) -> Mapping[str, tuple[str, ...]]:
        """Names and dims of the unit's own weights."""
        program, borrowed = self.forward.program, self.forward.program.borrowed
        return {name: program.dims(name) for name in program.weights if name not in borrowed}

    @property
    def trained(self) -> Mapping[str, tuple[str, ...]]:
        """Names and dims of the unit's own weights that are trained: they have gradients and optimizer state."""
        return {name: self.forward.program.dims(name) for name in self.gradients}

    @property
    def saved_by_this_unit_only(self) -> Mapping[str, Spec]:
        """Specs of the tensors that this unit keeps: those that it saves, and those that it hands to later layers. What another
        unit keeps is left out: carried tensors that it reads, and the input of a module of multi-token prediction."""
        program = self.forward.program
        carried = program.names_with_role(Role.CARRIED)
        shared = program.inputs if self.name in MTP_UNITS else {*carried}.intersection(program.inputs)
        handed_on = {name: self.forward.specs[name] for name in carried if name in program.outputs}
        return {name: spec for name, spec in {**self.saved, **handed_on}.items() if name not in shared}

    @property
    def recompute_steps(self) -> tuple[ProgramStep, ...]:
        return steps_of_nodes(self.recompute_nodes)

    @property
    def backward_steps(self) -> tuple[ProgramStep, ...]:
        return steps_of_nodes(self.backward_nodes)

    def phase_nodes(self) -> Mapping[str, tuple[ProgramNode, ...]]:
        """Return the nodes by phase. The update phase runs once per optimizer step, the others once per micro-batch."""
        return {
            "forward": self.forward.nodes,
            "recompute": self.recompute_nodes,
            "backward": self.backward_nodes,
            "update": self.update.nodes,
        }

    def phases(self) -> Mapping[str, tuple[ProgramStep, ...]]:
        """Return the steps by phase, those of rings one by one."""
        return {phase: steps_of_nodes(nodes) for phase, nodes in self.phase_nodes().items()}


def derive_unit(name: str, program: Program, scheme: ShardingScheme) -> ShardedUnit:
    """Derive the backward and update programs of `program` and shard all three."""
    immediate = immediate_specs(scheme, program)
    final = {name: Spec.of(program.dims(name)) for name in program.outputs if name not in immediate}  # the loss
    forward = shard_program(
        program, input_specs(scheme, program),
        ShardingTargets(use=use_specs(scheme, program), final=final, immediate=immediate),
    )  # fmt: skip
    forward = replace(forward, nodes=group_rings(forward.steps, scheme))
    transposed = transpose_program(program, outputs=program.outputs, inputs=program.trainable_inputs)
    return _shard_backward(name, forward, transposed, scheme)


def _shard_backward(
    name: str, forward: ShardedProgram, transposed: BackwardProgram, scheme: ShardingScheme
) -> ShardedUnit:
    program = transposed.program
    recompute = split_saved(forward.program, program.inputs, scheme.recompute)
    specs = saved_specs(scheme, forward)
    saved = {tensor: specs[tensor] for tensor in recompute.saved}
    resting = {**input_specs(scheme, forward.program), **saved, **_output_gradient_specs(forward, program)}
    weight_gradients = {w: g for w, g in transposed.gradients.items() if w in forward.program.weights}
    gradients = {w: g for w, g in weight_gradients.items() if w not in forward.program.borrowed}
    final: dict[str, FinalSpec] = {g: partial(gradient_resting_spec, scheme) for g in gradients.values()}
    hidden = (name for name in transposed.gradients if name not in weight_gradients)
    final |= {transposed.gradients[name]: handed_spec(scheme, forward.program.tensors[name]) for name in hidden}
    operations = (*recompute.operations, *program.operations)
    use = use_specs(scheme, forward.program)
    weights_used = forward.program.weights if name in UNITS_WITH_IMMEDIATE_BACKWARD else ()
    gathered = {weight: use[weight] for weight in weights_used if use[weight] != forward.specs[weight]}
    targets = ShardingTargets(
        use=use, final=final, primal=forward.specs, immediate=immediate_specs(scheme, forward.program),
        free_after_use=ATTENTION_OPERATIONS if scheme.is_ring else (),
    )  # fmt: skip
    sharded = shard_program(program, resting, targets, operations=operations, already_available=gathered)
    update = _shard_update(forward.program, gradients, sharded, scheme)
    border = _steps_through(recompute.operations, sharded.steps)
    recompute_steps, backward_steps = sharded.steps[:border], sharded.steps[border:]
    recompute_nodes = group_rings(recompute_steps, scheme, backward_steps)
    backward_nodes = group_rings(backward_steps, scheme, recompute_steps)
    return ShardedUnit(
        name=name, scheme=scheme, forward=forward, recompute_nodes=recompute_nodes, backward_nodes=backward_nodes,
        backward=replace(sharded, nodes=(*recompute_nodes, *backward_nodes)), update=update, saved=saved,
        gathered_weights=gathered, gradients=gradients, forward_index=transposed.forward_index,
        tensors={**update.program.tensors, **sharded.program.tensors, **forward.program.tensors},
    )  # fmt: skip


def saved_specs(scheme: ShardingScheme, forward: ShardedProgram) -> dict[str, Spec]:
    """Return the spec in which the forward pass saves each of its tensors, if it saves it: what Ulysses attention reads is saved
    as attention reads it."""
    return {**forward.specs, **ulysses_specs(scheme, forward.program)}


def _steps_through(operations: tuple[Operation, ...], steps: tuple[ProgramStep, ...]) -> int:
    """Return the number of steps up to the last one that computes one of `operations`."""
    indices = [i for i, step in enumerate(steps) if isinstance(step, ComputeStep) and step.operation in operations]
    return indices[-1] + 1 if indices else 0


def _output_gradient_specs(forward: ShardedProgram, program: Program) -> dict[str, Spec]:
    return {f"d.{name}": forward.specs[name] for name in forward.program.outputs if f"d.{name}" in program.inputs}


def _shard_update(
    forward: Program, gradients: Mapping[str, str], backward: ShardedProgram, scheme: ShardingScheme
) -> ShardedProgram:
    matrices = weight_matrices(forward, tables=get_optimizer(scheme.optimizer).covers_vocabulary)
    weights = (
        _TrainedWeight(name, forward.dims(name), gradient, backward.specs[gradient], matrices.get(name))
        for name, gradient in gradients.items()
    )
    return _derive_update(tuple(weights), scheme.for_update())


class _TrainedWeight(NamedTuple):
    """A weight with its gradient, in the spec in which the backward pass leaves it."""

    name: str
    dims: tuple[str, ...]
    gradient: str
    gradient_spec: Spec
    matrix: WeightMatrix | None


# Schemes that leave the gradients of a unit in the same specs, whatever they recompute, share its update.
@lru_cache(maxsize=1024)
def _derive_update(trained: tuple[_TrainedWeight, ...], scheme: ShardingScheme) -> ShardedProgram:
    weights = {weight.name: weight.dims for weight in trained}
    gradients = {weight.name: weight.gradient for weight in trained}
    matrices = {weight.name: weight.matrix for weight in trained if weight.matrix is not None}
    program = build_optimizer_program(weights, gradients, scheme.optimizer, matrices)
    resting = {weight.gradient: weight.gradient_spec for weight in trained}
    resting |= {
        name: state_resting_spec(scheme, weights[owning_weight(name)], program.dims(name))
        for name in program.inputs
        if name not in resting
    }
    at_first_read = {g: optimizer_resting_spec(scheme, weights[name]) for name, g in gradients.items()}
    final = {f"{name}'": weight_resting_spec(scheme, dims) for name, dims in weights.items()}
    # what ZeRO splits comes together first, as weights do for their uses
    immediate = {name: weight_use_spec(scheme, program.dims(name)) for name in whole_matrix_inputs(program)}
    owners = {name: weights[owning_weight(name)] for name in program.names_with_role(Role.MEAN)}
    flat = {name: zero_axes_of_weight(scheme, dims) for name, dims in owners.items() if program.dims(name) != dims}
    targets = ShardingTargets(at_first_read=at_first_read, final=final, immediate=immediate, flat_reductions=flat)
    sharded = shard_program(program, resting, targets)
    return replace(sharded, nodes=group_mean_reductions(sharded.steps))


def derive_units(scheme: ShardingScheme) -> Mapping[str, ShardedUnit]:
    """Return the sharded units of a model with the scheme's structure, by name."""
    return {name: derived_unit(scheme, name) for name in (*units_of_structure(scheme.structure), "carry")}


def derived_unit(scheme: ShardingScheme, name: str) -> ShardedUnit:
    """Return the sharded programs of one unit, cached."""
    return _derive_cached(scheme.for_unit(name), name)


@lru_cache(maxsize=MAX_CACHED_UNITS)
def _derive_cached(scheme: ShardingScheme, name: str) -> ShardedUnit:
    return derive_unit(name, unit_program(scheme.structure, name), scheme)


def is_mean_reduction(step: ProgramStep) -> TypeGuard[CollectiveStep]:
    """Return whether a step reduces the partial sums of a mean."""
    return isinstance(step, CollectiveStep) and step.tensor.role is Role.MEAN


def group_mean_reductions(steps: Sequence[ProgramStep]) -> tuple[ProgramStep, ...]:
    """Return the steps of an update with the reductions of means grouped, so that engines can run each group as one
    collective."""
    computes = [step for step in steps if not is_mean_reduction(step)]
    producer_index = {
        name: index
        for index, step in enumerate(computes)
        if isinstance(step, ComputeStep)
        for name in step.operation.outputs
    }
    reductions: dict[int, list[ProgramStep]] = {}  # by the place of the step that they stand in front of
    num_passed = 0
    for step in steps:
        if not is_mean_reduction(step):
            num_passed += 1
            continue
        index = next((index for index in reductions if index > producer_index[step.tensor.name]), num_passed)
        reductions.setdefault(index, []).append(step)
    return tuple(step for index, compute in enumerate(computes) for step in (*reductions.get(index, ()), compute))
