"""The instructions of one device: kernels, collectives that are started early and waited for late, local slices, frees.

They are values that are priced, searched, simulated, drawn and executed alike; durations are not in them. Sizes are
polynomials in the dims of the model and the degrees of the layout. A phase (forward, recompute, backward, update) is a part of
a derivation, a pass (F, B, I, W) what a pipeline schedule runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from shardwise.derive.sharded_program import CollectiveStep, ComputeStep
from shardwise.model.program import Role
from shardwise.sharding.collectives import CollectiveKind
from shardwise.sharding.spec import Axes, Spec
from shardwise.step.flat_arrays import WEIGHT_ROLES, ArrayExtent, FlatArrays
from shardwise.values.symbolic import ZERO, Polynomial, SymbolValues

COMPUTE = "compute"  # the stream of kernels
KERNEL, START, WAIT = "kernel", "start", "wait"  # what an instruction is, for whoever watches it run


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """Start a kernel on the compute stream."""

    kernel: Kernel
    stream: ClassVar[str] = COMPUTE


@dataclass(frozen=True, slots=True)
class StartCollective:
    """Start a collective, or one for each of its flat arrays, on the stream of the axis that it is charged to."""

    collective: UnitCollective

    @property
    def stream(self) -> str:
        return self.collective.stream


@dataclass(frozen=True, slots=True)
class WaitCollective:
    """What follows on the compute stream waits for a collective that was started."""

    collective: UnitCollective
    stream: ClassVar[str] = COMPUTE


@dataclass(frozen=True, slots=True)
class LocalSlice:
    """Each device keeps its part of a tensor: nothing moves."""

    step: CollectiveStep
    stream: ClassVar[str] = COMPUTE


class ShardedTensor(NamedTuple):
    """A tensor in one of the shardings that a device holds it in."""

    name: str
    spec: Spec


@dataclass(frozen=True, slots=True)
class FreeTensors:
    """Nothing reads these any more."""

    held: tuple[ShardedTensor, ...]
    stream: ClassVar[str] = COMPUTE

    @property
    def tensors(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(dict.fromkeys(one.name for one in self.held))


class InstructionId(NamedTuple):
    """Which instructions of a unit something that ran stands for: `KERNEL`, `START` or `WAIT`, the name that they have where a
    step is simulated, their phase, and of kernels the results."""

    kind: str
    name: str
    phase: str
    results: tuple[str, ...] = ()


Instruction = KernelLaunch | StartCollective | WaitCollective | LocalSlice | FreeTensors


@dataclass(frozen=True, slots=True)
class KernelShape:
    """Extents that a product's or attention's rate depends on.

    Of a product: what it sums over (`contraction`), the extents of its matrices but for tokens (`extents`), and of routed tokens
    the rows of each of its groups. Of attention: its scores, masked ones included, and the width of a head. Of a function of
    whole matrices `scratch_elements` that are there beside what it reads and makes, and whether a device does it
    `owned_matrices_only`: of those alone that it updates a part of.
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
    """`flops` of matrix products and attention (elementwise ones are bound by memory); `elements` touched, by role.

    `inputs` are those of its first operation, `reads` the operands of all that none of them defines, `outputs` what all of them
    define, by name. Of a product with a
    block's weights (derive/low_precision_products.py) `operand_elements` are the elements of its operands, by role; nothing of
    other kernels.
    `makes_weight_grads`: a product that gives a weight's gradient, for which only the optimizer waits (W in the papers on zero
    bubbles). `steps` are its operations as derived.
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

    @property
    def name(self) -> str:
        """What it goes by where steps are drawn and traced: its kind, and the first tensor that it makes."""
        return f"{self.kind} {self.outputs[0]}"


# The pair of ranks along `pp` that are as far from either end: first and last, second and last but one.
MIRROR_RANKS: Axes = ("pp_opposite",)
PIPELINE: Axes = ("pp",)  # over which messages between stages go


@dataclass(frozen=True, slots=True)
class UnitCollective:
    """A collective of one unit, or one for each of its flat arrays.

    `payload` are elements (see `Collective.payload_elements`; of routed tokens those that are there), `tensors` what it carries,
    `chunked_with` the results of the computations that it runs beside, in pieces. `for_products`: nothing but products with a
    block's weights take what it brings. `reason` is the derivation's, `derived` its collectives that this one stands for;
    `counts_rows_of`: of how many rows are sent, the collective that sends them.
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
        """What it goes by where steps are drawn and traced: its kind, and the first tensor that it carries."""
        return f"{self.kind} {self.tensors[0]}"

    @property
    def scope(self) -> str:
        """How often it runs: once per optimizer step, or per micro-batch."""
        return "step" if self.phase == "update" else "micro_batch"

    @property
    def moves_weights(self) -> bool:
        """Whether it carries weights, their gradients, or what an optimizer makes of these."""
        return self.role in (*WEIGHT_ROLES, Role.DIRECTION, Role.MEAN)

    @property
    def is_control(self) -> bool:
        """Whether it carries the loss, the norm, or what routers did: numbers that no operation of the pass waits for."""
        return self.role is Role.STATISTIC and self.position < 0

    @property
    def stream(self) -> str:
        """The parallel axis that it is charged to; what runs once per step is control traffic, unless it carries weights."""
        return charged_axis(self.axes) if self.moves_weights or self.scope != "step" else "control"

    @property
    def elements(self) -> Polynomial:
        """The payload's elements without padding."""
        return self.payload.elements if isinstance(self.payload, FlatArrays) else self.payload

    def extent(self, values: SymbolValues, most_elements: float) -> ArrayExtent:
        """How many collectives there are and their elements together, where buckets hold at most so many."""
        if isinstance(self.payload, FlatArrays):
            return self.payload.evaluate(values, most_elements)
        return ArrayExtent(1, self.payload.evaluate(values))


def charged_axis(axes: Axes) -> str:
    """The parallel axis that traffic over these atomic axes belongs to."""
    if axes == MIRROR_RANKS:
        return "pp"
    for name in ("dp", "fsdp", "cp", "pp", "ep"):
        if name in axes:
            return name
    return "tp"


ACTIVATION, GATHER, GRADIENT, CONTROL = "activation", "weight", "gradient", "control"  # what a transfer is for

UPDATE = "update"  # beside the kinds of passes (`pipeline.actions`)
