"""The instructions of one device: kernels, collectives that are started early and waited for late, rings, slices, frees.

They are values that are priced, searched, simulated, drawn and executed alike; durations are not in them. The `steps` of an
instruction are the derived steps that it runs, starts or waits for. Sizes are polynomials in the dims of the model and the
degrees of the layout. A phase (forward, recompute, backward, update) is a part of a derivation, a pass (F, B, I, W) what a
pipeline schedule runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from shardwise.derive import CollectiveStep, ComputeStep, ProgramStep, Ring, ShardedTensor
from shardwise.model import Role
from shardwise.sharding import Axes, CollectiveKind
from shardwise.step.flat_arrays import WEIGHT_ROLES, ArrayExtent, FlatArrays
from shardwise.values import ZERO, Polynomial, SymbolValues

COMPUTE = "compute"  # the stream of kernels
KERNEL, START, WAIT = "kernel", "start", "wait"  # what an instruction is, for whoever watches it run


@dataclass(frozen=True, slots=True)
class KernelShape:
    """Extents that the rate of a product or of attention depends on.

    Products: `contraction` is the size summed over, `extents` the sizes of its matrices without the token dims,
    `group_rows` the rows of each expert's group. Attention: `scores`, masked ones included, and the `width` of a head.
    Functions of whole matrices: `scratch_elements` needed beside operands and result; with `owned_matrices_only` a
    device computes only the matrices of which it updates a part.
    """

    contraction: Polynomial = ZERO
    extents: tuple[Polynomial, ...] = ()
    group_rows: Polynomial = ZERO
    scores: Polynomial = ZERO
    width: Polynomial = ZERO
    scratch_elements: Polynomial = ZERO
    owned_matrices_only: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """Launch a kernel on the compute stream: one derived operation, or several that are fused.

    `flops` are those of matrix products and attention; elementwise work is bound by memory and counts no FLOPs.
    `elements` are those read and written, by role. `inputs` are the inputs of its first operation, `reads` the operands
    that it does not define itself, `outputs` all tensors that it defines. `operand_elements` has the elements of the
    operands, by role, of a product with a block's weights (derive/low_precision_products.py), and is empty for other
    kernels. `makes_weight_grads`: a product that gives a weight's gradient, for which only the optimizer waits (W in
    the papers on zero bubbles). `steps` are the derived operations.
    """

    phase: str
    kind: str
    inputs: tuple[str, ...]
    reads: tuple[str, ...]
    outputs: tuple[str, ...]
    flops: Polynomial
    elements: Mapping[Role, Polynomial]
    operand_elements: Mapping[Role, Polynomial]
    makes_weight_grads: bool
    shape: KernelShape
    steps: tuple[ComputeStep, ...] = field(compare=False, repr=False)
    stream: ClassVar[str] = COMPUTE

    @property
    def name(self) -> str:
        """Name in drawings and traces: the kind, and the first tensor that it makes."""
        return f"{self.kind} {self.outputs[0]}"


@dataclass(frozen=True, slots=True)
class StartCollective:
    """Start a collective, or one for each of its flat arrays, on the stream of the axis that it is charged to."""

    collective: UnitCollective

    @property
    def stream(self) -> str:
        return self.collective.stream

    @property
    def steps(self) -> tuple[CollectiveStep, ...]:
        return self.collective.derived


@dataclass(frozen=True, slots=True)
class WaitCollective:
    """Make later work on the compute stream wait for a collective that was started."""

    collective: UnitCollective
    stream: ClassVar[str] = COMPUTE

    @property
    def steps(self) -> tuple[CollectiveStep, ...]:
        return self.collective.derived


@dataclass(frozen=True, slots=True)
class LocalSlice:
    """Keep each device's part of a tensor that it has whole; nothing moves."""

    step: CollectiveStep
    stream: ClassVar[str] = COMPUTE

    @property
    def steps(self) -> tuple[CollectiveStep, ...]:
        return (self.step,)


@dataclass(frozen=True, slots=True)
class FreeTensors:
    """Release tensors that no later instruction reads."""

    sharded_tensors: tuple[ShardedTensor, ...]
    stream: ClassVar[str] = COMPUTE
    steps: ClassVar[tuple[ProgramStep, ...]] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors, each once."""
        return tuple(dict.fromkeys(tensor.name for tensor in self.sharded_tensors))


class InstructionId(NamedTuple):
    """Identity of the instructions of a unit that a piece of executed work stands for.

    `kind` is `KERNEL`, `START` or `WAIT`, `name` the one that simulated steps show, and `results` the tensors that a
    kernel writes.
    """

    kind: str
    name: str
    phase: str
    results: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunRing:
    """Run the computations of a ring block by block, in one call.

    `members` are the instructions that it stands for: those of the ring's collectives and kernels, and others between
    them. They are priced, simulated and listed one by one (`unroll_rings`). The results of the ring's scatters are
    waited for where they are first read, by instructions behind it.
    """

    ring: Ring
    members: tuple[SingleInstruction, ...]

    @property
    def phase(self) -> str:
        return next(member.phase for member in self.members if isinstance(member, Kernel))

    @property
    def other_members(self) -> tuple[SingleInstruction, ...]:
        """Members between those of the ring: waits for weights, starts of gradients, frees."""
        ring_steps = {id(step) for step in self.ring.steps}
        return tuple(member for member in self.members if ring_steps.isdisjoint(map(id, member.steps)))


SingleInstruction = Kernel | StartCollective | WaitCollective | LocalSlice | FreeTensors
Instruction = SingleInstruction | RunRing


def unroll_rings(instructions: Iterable[Instruction]) -> Iterator[SingleInstruction]:
    """Yield the instructions, those of rings one by one."""
    for instruction in instructions:
        yield from instruction.members if isinstance(instruction, RunRing) else (instruction,)


ACTIVATION, GATHER, GRADIENT, CONTROL = "activation", "weight", "gradient", "control"  # what a transfer is for
PURPOSE_OF_ROLE = {Role.WEIGHT: GATHER, Role.WEIGHT_GRADIENT: GRADIENT}  # ACTIVATION: all others
# The pair of ranks along `pp` that are as far from either end: first and last, second and last but one.
MIRROR_RANKS: Axes = ("pp_opposite",)
PIPELINE: Axes = ("pp",)  # over which messages between stages go


@dataclass(frozen=True, slots=True)
class UnitCollective:
    """A collective of one unit, or one for each of its flat arrays.

    `payload` counts elements (see `Collective.payload_elements`; of routed tokens the expected rows), `tensors` names
    what it carries. `chunked_with`: first results of the computations of its ring, beside which it runs in chunks.
    `for_products`: only products with a block's weights read what it brings. `reason` is the derivation's, `derived` the
    derived collectives that it stands for. `counts_rows_of`: the collective whose row counts this one announces.
    """

    unit: str
    phase: str
    kind: CollectiveKind
    axes: Axes
    role: Role
    payload: Polynomial | FlatArrays
    tensors: tuple[str, ...]
    chunked_with: tuple[str, ...] = ()
    for_products: bool = False
    reason: str = ""
    position: int = field(default=-1, compare=False)  # among the derived steps of its pass; of flat arrays none
    derived: tuple[CollectiveStep, ...] = field(default=(), compare=False, repr=False)
    counts_rows_of: UnitCollective | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """Name in drawings and traces: the kind, and the first tensor that it carries."""
        return f"{self.kind} {self.tensors[0]}"

    @property
    def ends(self) -> tuple[ShardedTensor, ShardedTensor]:
        """The moved tensor in its sharding before the first derived collective, and after the last."""
        return self.derived[0].before, self.derived[-1].after

    @property
    def scope(self) -> str:
        """The scope in which it runs once: "step" or "micro_batch"."""
        return "step" if self.phase == "update" else "micro_batch"

    @property
    def moves_weights(self) -> bool:
        """True if it carries weights, their gradients, or what an optimizer computes from these."""
        return self.role in (*WEIGHT_ROLES, Role.DIRECTION, Role.MEAN)

    @property
    def is_control(self) -> bool:
        """True if it carries the loss, the norm or routers' statistics: numbers that no operation of the pass waits for."""
        return self.role is Role.STATISTIC and self.position < 0

    @property
    def purpose(self) -> str:
        """The purpose: `ACTIVATION`, `GATHER`, `GRADIENT` or `CONTROL`."""
        return CONTROL if self.is_control else PURPOSE_OF_ROLE.get(self.role, ACTIVATION)

    @property
    def stream(self) -> str:
        """Parallel axis that it is charged to; "control" for what runs once per step and moves no weights."""
        return charged_axis(self.axes) if self.moves_weights or self.scope != "step" else "control"

    @property
    def time_term(self) -> str:
        """Time term that it counts in.

        Collectives of weights count as `fsdp`, over whichever axes, but for what replicas reduce once per step (`dp`);
        routers' statistics that move with every micro-batch count as `fsdp` too.
        """
        if self.moves_weights or self.is_control:
            return self.stream if self.scope == "step" and self.stream in ("dp", "control") else "fsdp"
        return self.stream

    @property
    def elements(self) -> Polynomial:
        """Elements of the payload, without padding."""
        return self.payload.elements if isinstance(self.payload, FlatArrays) else self.payload

    def extent(self, values: SymbolValues, max_elements: float) -> ArrayExtent:
        """Return how many collectives there are and their elements in all; a bucket holds at most `max_elements`."""
        if isinstance(self.payload, FlatArrays):
            return self.payload.evaluate(values, max_elements)
        return ArrayExtent(1, self.payload.evaluate(values))


def charged_axis(axes: Axes) -> str:
    """Return the parallel axis that a collective over these atomic axes is charged to."""
    if axes == MIRROR_RANKS:
        return "pp"
    for name in ("dp", "fsdp", "cp", "pp", "ep"):
        if name in axes:
            return name
    return "tp"


UPDATE = "update"  # beside the kinds of passes (`pipeline.actions`)
