"""Liveness in a unit's backward pass: which recomputed, computed, moved and saved tensors are live at each node.

The nodes are those of automatic differentiation: one recomputed operation, all transposes of one operation, or the start or
the wait of a collective on activations. What a node reads and writes is live at once; what it is the last to touch is freed
after it. Source: run/engine/unit_passes.py, which frees likewise (tests/train/test_memory.py follows the storages).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import groupby
from typing import NamedTuple

from shardwise.derive import ComputeStep, Ring, ShardedTensor, ShardedUnit
from shardwise.model import MTP_UNITS, Role
from shardwise.model.operations import ScanGradient
from shardwise.sharding import Axes, CollectiveKind, Spec
from shardwise.step.instructions import (
    Instruction,
    Kernel,
    LocalSlice,
    RunRing,
    SingleInstruction,
    StartCollective,
    UnitCollective,
    WaitCollective,
    unroll_rings,
)
from shardwise.step.unit_instructions import UnitInstructions

UNCOUNTED_ROLES = (Role.WEIGHT, Role.WEIGHT_GRADIENT, Role.CONSTANT)
# Collectives that copy what they send, laid out part by part, or what has come, laid out along its dim.
COPIED_BEFORE = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)
COPIED_AFTER = (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL)


class LiveTensor(NamedTuple):
    """A live tensor. It exists only where the group of devices along `over` is more than one, and where `rows`, a spec
    of the dims before the one along which parts lie, has more than one element."""

    name: str
    spec: Spec
    over: Axes = ()
    rows: Spec | None = None


class LiveSet(NamedTuple):
    """Tensors that are live at one node of a backward pass.

    `gradients` are the shardings of weight gradients that the node makes, before they are scattered;
    `has_weight_grads`: this node or an earlier one made some. `scores`: attention's scores are live, where they
    are written to memory; `gradient_of_scores`: so is their gradient.
    """

    parts: tuple[LiveTensor, ...]
    gradients: tuple[Spec, ...]
    has_weight_grads: bool
    scores: bool
    gradient_of_scores: bool

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the live tensors, each once."""
        return tuple(dict.fromkeys(tensor.name for tensor in self.parts))


BackwardMember = ComputeStep | StartCollective | WaitCollective | LocalSlice | Ring
BackwardNode = tuple[ComputeStep, ...] | StartCollective | WaitCollective | LocalSlice | Ring


def live_sets(unit_instructions: UnitInstructions) -> Iterator[LiveSet]:
    """Yield the live set at each node of the backward pass, in execution order."""
    unit, nodes = unit_instructions.unit, tuple(_autograd_nodes(unit_instructions))
    accesses = [_reads_and_writes(node) for node in nodes]
    touched = [
        {tensor for tensor in (*reads, *writes) if unit.tensors[tensor.name].role not in UNCOUNTED_ROLES}
        for reads, writes in accesses
    ]
    last = {tensor: index for index, tensors in enumerate(touched) for tensor in tensors}
    moved_tensors = _MovedTensors(nodes)
    scans = (operation for operation in unit.forward.program.operations if operation.kind == "scan")
    scanned = {name for scan in scans for name in scan.outputs}
    live = last.keys() - {tensor for _, writes in accesses for tensor in writes}
    has_weight_grads = False
    for index, node in enumerate(nodes):
        live = live | touched[index]
        gradients = tuple(_weight_gradient_specs(unit, node))
        has_weight_grads = has_weight_grads or bool(gradients)
        yield LiveSet(
            (*moved_tensors.parts(live), *moved_tensors.copies(node), *_pending_gradients(unit)), gradients, has_weight_grads,
            not scanned.isdisjoint(tensor.name for tensor in live), _is_gradient_of_scores(node),
        )  # fmt: skip
        live = {tensor for tensor in live if last[tensor] > index}


class _MovedTensors:
    """Tensors that collectives bring and slices cut, by their sharding afterwards."""

    def __init__(self, nodes: tuple[BackwardNode, ...]) -> None:
        started = [node.collective for node in nodes if isinstance(node, StartCollective)]
        self.source = {
            after: (collective.axes, before) for collective in started for before, after in [collective.ends]
        }
        fused = (step for node in nodes if isinstance(node, Ring) for step in node.collectives)
        self.source |= {step.after: (step.collective.axes, step.before) for step in fused}
        self.sliced = {node.step.after: node.step.before for node in nodes if isinstance(node, LocalSlice)}
        self.pieces = {}
        for collective in started:
            if collective.chunked_with:
                before, after = collective.ends
                is_gather = collective.kind is CollectiveKind.ALL_GATHER
                shard, gathered = (before, after) if is_gather else (after, before)
                self.pieces[gathered] = collective.axes, shard

    def parts(self, live: Set[ShardedTensor]) -> Iterator[LiveTensor]:
        """Yield what live tensors occupy: a slice as much as its source; a tensor moved over one device is still its source."""
        for tensor in sorted(live, key=str):
            if tensor in self.sliced:
                yield from () if self.sliced[tensor] in live else (LiveTensor(*self.sliced[tensor]),)
            elif tensor in self.pieces:
                yield from self.in_pieces(tensor, live)
            else:
                axes, before = self.source.get(tensor, ((), tensor))
                yield LiveTensor(*tensor, over=axes if before in live else ())

    def in_pieces(self, gathered: ShardedTensor, live: Set[ShardedTensor]) -> Iterator[LiveTensor]:
        """Yield the two blocks of a chunked tensor that are live: the one in use and the one in transit."""
        axes, shard = self.pieces[gathered]
        yield LiveTensor(*shard, over=axes)
        yield LiveTensor(*shard, over=axes if shard in live else ())

    @staticmethod
    def copies(node: BackwardNode) -> Iterator[LiveTensor]:
        """Yield the buffers that collectives copy into.

        Parts along the first dim need no copy; rows of experts are sorted, so they do. A chunked collective has one
        buffer to send and one to receive.
        """
        if isinstance(node, Ring):
            yield from [LiveTensor(*node.block, over=node.axes)] * 2
            return
        if not isinstance(node, (StartCollective, WaitCollective)) or node.collective.chunked_with:
            return
        collective, (before, after) = node.collective, node.collective.ends
        if collective.kind not in (COPIED_BEFORE if isinstance(node, StartCollective) else COPIED_AFTER):
            return
        copied = before if isinstance(node, StartCollective) else after
        gathered, shard = (before, after) if collective.kind is CollectiveKind.REDUCE_SCATTER else (after, before)
        dim = next(
            (index for index, axes in enumerate(gathered.spec.axes) if len(shard.spec.axes[index]) > len(axes)), 0
        )
        if collective.role is Role.ROUTED:
            yield LiveTensor(*copied, over=collective.axes)
        elif dim:
            yield LiveTensor(*copied, over=collective.axes, rows=Spec(copied.spec.dims[:dim], copied.spec.axes[:dim]))


def _autograd_nodes(unit_instructions: UnitInstructions) -> Iterator[BackwardNode]:
    """Yield the backward pass by nodes of automatic differentiation, with the collectives on activations."""
    unit = unit_instructions.unit
    recomputed = {id(step) for step in unit.recompute_steps}
    members: list[BackwardMember] = []
    for instruction in _with_matmul_rings(unit_instructions.passes["backward"]):
        if isinstance(instruction, Kernel):
            members += instruction.steps
        elif isinstance(instruction, LocalSlice | Ring) or (
            isinstance(instruction, (StartCollective, WaitCollective)) and _moves_activations(instruction.collective)
        ):
            members.append(instruction)

    def node(step: BackwardMember) -> object:
        """Return the key of the forward operation that a step transposes; a sum of a gradient's parts is a node of its own."""
        if not isinstance(step, ComputeStep) or id(step) in recomputed:
            return id(step)
        return unit.forward_index.get(step.operation.outputs[0], step.operation.outputs[0])

    for _, group in groupby(members, node):
        steps = tuple(group)
        computed = tuple(step for step in steps if isinstance(step, ComputeStep))
        yield computed if isinstance(steps[0], ComputeStep) else steps[0]


def _with_matmul_rings(instructions: Iterable[Instruction]) -> Iterator[SingleInstruction | Ring]:
    """Yield the instructions with rings of products in place of theirs, and those of attentions one by one."""
    in_rings: set[int] = set()
    for instruction in instructions:
        run = instruction if isinstance(instruction, RunRing) and not instruction.ring.is_attention else None
        if run:
            in_rings |= {id(step) for step in run.ring.collectives}
        for member in run.other_members if run else unroll_rings([instruction]):
            # what a ring scatters has arrived when the ring has run
            if not isinstance(member, WaitCollective) or in_rings.isdisjoint(map(id, member.steps)):
                yield member
        if run:
            yield run.ring


def _moves_activations(collective: UnitCollective) -> bool:
    return bool(collective.derived) and not collective.moves_weights and not collective.is_control


def _reads_and_writes(node: BackwardNode) -> tuple[Sequence[ShardedTensor], Sequence[ShardedTensor]]:
    if isinstance(node, Ring):
        return node.reads, node.writes
    if isinstance(node, tuple):
        return [tensor for step in node for tensor in step.reads], [tensor for step in node for tensor in step.writes]
    before, after = (node.step.before, node.step.after) if isinstance(node, LocalSlice) else node.collective.ends
    return [before], [after]


def _weight_gradient_specs(unit: ShardedUnit, node: BackwardNode) -> Iterator[Spec]:
    """Yield the shardings of the weight gradients that a node makes; what moves one makes none."""
    written = _reads_and_writes(node)[1] if isinstance(node, tuple | Ring) else ()
    return (spec for name, spec in written if unit.tensors[name].role is Role.WEIGHT_GRADIENT)


def _is_gradient_of_scores(node: BackwardNode) -> bool:
    return isinstance(node, tuple) and any(isinstance(step.operation, ScanGradient) for step in node)


def _pending_gradients(unit: ShardedUnit) -> Iterator[LiveTensor]:
    """Yield the head's gradient of the last hidden state, to which modules of multi-token prediction add theirs."""
    residual_gradients = (name for name in unit.backward.program.outputs if unit.tensors[name].role is Role.RESIDUAL)
    yield from (LiveTensor(name, unit.backward.specs[name]) for name in residual_gradients if unit.name in MTP_UNITS)
