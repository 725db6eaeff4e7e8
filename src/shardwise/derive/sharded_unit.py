"""The sharded programs of each unit of a model: forward, backward and update, for one sharding scheme.

A unit is a part of a model that is derived and priced once, however often the model has it: embedding, block, head. Its
backward program has the recomputed slice of the forward program before it. Each is an ordinary program put through
`shard_program`. What follows from them: communication, FLOPs, bytes read and written, bytes saved. Means that an update takes
over rows, columns or all of a weight are reordered, so that their partial sums are reduced together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TypeGuard

from shardwise.derive.ring_attention_and_matmul import together
from shardwise.derive.sharded_program import Communicate, Compute, Final, ShardedProgram, Step, shard_program
from shardwise.derive.tensor_specs import (
    exchanged,
    gradient_rest,
    hidden_spec,
    optimizer_rest,
    resting,
    state_rest,
    staying,
    using,
    weight_rest,
    weight_use,
    zero_added,
)
from shardwise.layout.sharding_scheme import Family
from shardwise.model.architecture import Architecture, Structure
from shardwise.model.backward import Backward, backward, split_saved
from shardwise.model.decoder import BORROWED, LAYERS, PREDICTS, TURNING, UNITS, unit_counts
from shardwise.model.operations import Operation, Scan, ScanGradient
from shardwise.model.optimizer_program import directions, matrices, update_program, weight_of
from shardwise.model.optimizers.registry import optimizer_named
from shardwise.model.program import Program, Role, Tensor
from shardwise.model.recompute_policies import of_kind
from shardwise.sharding.spec import Spec

SCANS = (Scan, ScanGradient)  # in a ring each block of keys and values is freed after its use
MOST_UNITS = (
    32  # derived ones to hold: those of a few layouts. Of the hundreds of a search only what is read off them stays
)


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit's sharded programs. `recompute_steps` leads `backward`; `saved` are the tensors kept for it, as they lie.
    `kept` are the weights that its forward pass gathers and its backward pass still has, as gathered: those of `TURNING` units.

    `gradients` names those of its own trained weights. A borrowed weight's is left as a partial sum: its owner reduces them all.
    `tensors` are those of all three programs, by name; `nodes` as in `model.backward.Backward`.
    """

    name: str
    family: Family
    forward: ShardedProgram
    recompute_steps: tuple[Step, ...]
    backward_steps: tuple[Step, ...]
    backward: ShardedProgram
    update: ShardedProgram
    saved: Mapping[str, Spec]
    kept: Mapping[str, Spec]
    gradients: Mapping[str, str]
    tensors: Mapping[str, Tensor]
    nodes: Mapping[str, int]

    @property
    def weights(self) -> Mapping[str, tuple[str, ...]]:
        """Names and dims of the unit's own weights."""
        program, borrowed = self.forward.program, BORROWED.get(self.name, ())
        return {name: program.dims(name) for name in program.weights if name not in borrowed}

    @property
    def trained(self) -> Mapping[str, tuple[str, ...]]:
        """The same without those that are frozen: what has gradients and optimizer state."""
        return {name: self.forward.program.dims(name) for name in self.gradients}

    @property
    def kept_alone(self) -> Mapping[str, Spec]:
        """What it saves and no other unit does. The hidden state that a module of multi-token prediction reads, the head or the
        module before it saves as well."""
        shared = self.forward.program.inputs if self.name in PREDICTS else ()
        return {name: spec for name, spec in self.saved.items() if name not in shared}

    def phases(self) -> Mapping[str, tuple[Step, ...]]:
        """Steps by phase. The update phase runs once per optimizer step, the others once per micro-batch."""
        return {
            "forward": self.forward.steps,
            "recompute": self.recompute_steps,
            "backward": self.backward_steps,
            "update": self.update.steps,
        }


def derive_unit(name: str, program: Program, family: Family, *, recompute: str) -> Unit:
    """Derive backward and update of `program` and shard all three; `recompute` is the policy for its saved tensors."""
    stay = staying(family, program)
    summed = {name: Spec.of(program.dims(name)) for name in program.outputs if name not in stay}  # the loss
    forward = shard_program(program, resting(family, program), use=using(family, program), final=summed, stay=stay)
    forward = replace(forward, steps=together(forward.steps, family))
    transposed = backward(program, given=program.outputs, wanted=program.wanted)
    return _shard_backward(name, forward, transposed, family, recompute)


def _shard_backward(name: str, forward: ShardedProgram, transposed: Backward, family: Family, policy: str) -> Unit:
    program = transposed.program
    recompute = split_saved(forward.program, program.inputs, policy)
    lying = {**forward.specs, **exchanged(family, forward.program)}
    saved = {tensor: lying[tensor] for tensor in recompute.saved}
    rest = {**resting(family, forward.program), **saved, **_cotangents(forward, program)}
    weights = {w: g for w, g in transposed.gradients.items() if w in forward.program.weights}
    gradients = {w: g for w, g in weights.items() if w not in BORROWED.get(name, ())}
    final: dict[str, Final] = {g: partial(gradient_rest, family) for g in gradients.values()}
    final |= {g: hidden_spec(family) for w, g in transposed.gradients.items() if w not in weights}
    operations = (*recompute.operations, *program.operations)
    use = using(family, forward.program)
    weights_used = forward.program.weights if name in TURNING else ()
    kept = {weight: use[weight] for weight in weights_used if use[weight] != forward.specs[weight]}
    sharded = shard_program(
        program, rest, use=use, final=final, operations=operations, primal=forward.specs, kept=kept,
        stay=staying(family, forward.program), free_after_use=SCANS if family.ring else (),
    )  # fmt: skip
    update = _shard_update(forward.program, gradients, sharded, family)
    border = _end_of(recompute.operations, sharded.steps)
    again, steps = together(sharded.steps[:border], family), together(sharded.steps[border:], family)
    return Unit(
        name=name, family=family, forward=forward, backward=replace(sharded, steps=(*again, *steps)), recompute_steps=again,
        backward_steps=steps, update=update, saved=saved, kept=kept, gradients=gradients,
        tensors={**update.program.tensors, **sharded.program.tensors, **forward.program.tensors}, nodes=transposed.nodes,
    )  # fmt: skip


def _end_of(operations: tuple[Operation, ...], steps: tuple[Step, ...]) -> int:
    """Number of steps up to the last one that computes one of `operations`."""
    last = [index for index, step in enumerate(steps) if isinstance(step, Compute) and step.operation in operations]
    return last[-1] + 1 if last else 0


def _cotangents(forward: ShardedProgram, program: Program) -> dict[str, Spec]:
    """The gradient of an output comes in as the output lies."""
    return {f"d.{name}": forward.specs[name] for name in forward.program.outputs if f"d.{name}" in program.inputs}


def _shard_update(
    forward: Program, gradients: Mapping[str, str], backward: ShardedProgram, family: Family
) -> ShardedProgram:
    weights = {name: forward.dims(name) for name in gradients}
    of_matrices = matrices(forward, tables=optimizer_named(family.optimizer).tables)
    program = update_program(weights, gradients, family.optimizer, of_matrices)
    rest = {g: backward.specs[g] for g in gradients.values()}
    rest |= {
        name: state_rest(family, weights[weight_of(name)], program.dims(name))
        for name in program.inputs
        if name not in rest
    }
    first = {g: optimizer_rest(family, weights[name]) for name, g in gradients.items()}
    final = {f"{name}'": weight_rest(family, dims) for name, dims in weights.items()}
    # what ZeRO splits comes together first, as weights do for their uses
    stay = {name: weight_use(family, program.dims(name)) for name in directions(program)}
    owners = {name: weights[weight_of(name)] for name in program.named(Role.MEAN)}
    flat = {name: zero_added(family, dims) for name, dims in owners.items() if program.dims(name) != dims}
    sharded = shard_program(program, rest, first=first, final=final, stay=stay, flat=flat)
    return replace(sharded, steps=means_together(sharded.steps))


def derive(architecture: Architecture, family: Family) -> Mapping[str, Unit]:
    """All units of a decoder for one family. The sizes do not matter, so models of one shape share the result."""
    return {name: derived_unit(architecture.structure, family, name) for name in (*unit_counts(architecture), "carry")}


def derived_unit(structure: Structure, family: Family, name: str) -> Unit:
    """One of them."""
    return _derived(structure, own_family(structure, family, name), name)


def own_family(structure: Structure, family: Family, name: str) -> Family:
    """What of a family the derivation of a unit depends on, the same for all families that differ in nothing else.

    Recomputation and context parallelism are about layers, whole experts about units that send tokens to experts.
    """
    is_layer = name in LAYERS
    return replace(  # once, since every price of a unit asks
        family, experts=structure.experts, shares_amax=False,
        recompute=of_kind(family.recompute, name) if is_layer else "none",
        cp_variant=family.cp_variant if is_layer else "all_gather",
        whole_experts=family.whole_experts and routes(structure, name),
    )  # fmt: skip


@lru_cache(maxsize=1024)
def routes(structure: Structure, name: str) -> bool:
    """Whether a unit sends tokens to experts."""
    return bool(_program(structure, name).named(Role.ROUTED))


@lru_cache(maxsize=1024)
def _program(structure: Structure, name: str) -> Program:
    return UNITS[name](structure.sizeless())


@lru_cache(maxsize=MOST_UNITS)
def _derived(structure: Structure, family: Family, name: str) -> Unit:
    return derive_unit(name, _program(structure, name), family, recompute=family.recompute)


def moves_mean(step: Step) -> TypeGuard[Communicate]:
    """Whether a step makes a mean of its partial sums."""
    return isinstance(step, Communicate) and step.tensor.role is Role.MEAN


def means_together(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps of an update, in an order in which means stand together: each with the first ones that move once it is there."""
    others = [step for step in steps if not moves_mean(step)]
    made = {
        name: place for place, step in enumerate(others) if isinstance(step, Compute) for name in step.operation.outputs
    }
    runs: dict[int, list[Step]] = {}  # by the place of the step that they stand in front of
    passed = 0
    for step in steps:
        if not moves_mean(step):
            passed += 1
            continue
        place = next((place for place in runs if place > made[step.tensor.name]), passed)
        runs.setdefault(place, []).append(step)
    return tuple(step for place, other in enumerate(others) for step in (*runs.get(place, ()), other))
