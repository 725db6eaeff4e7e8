"""The instructions of one device: kernels, collectives that are started early and waited for late, local slices, frees.

They are values that are priced, searched, simulated, drawn and executed alike; durations are not in them. Sizes are
polynomials in the dims of the model and the degrees of the layout. A phase (forward, recompute, backward, update) is a part of
a derivation, a pass (F, B, I, W) what a pipeline schedule runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from shardwise.derive.sharded_program import Communicate, Compute
from shardwise.model.program import Role
from shardwise.sharding.collectives import Kind
from shardwise.sharding.spec import Axes, Spec
from shardwise.step.flat_arrays import WEIGHT_ROLES, Extent, FlatArrays
from shardwise.values.symbolic import ZERO, Polynomial, Values

COMPUTE = "compute"  # the stream of kernels
KERNEL, START, WAIT = "kernel", "start", "wait"  # what an instruction is, for whoever watches it run


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a kernel on the compute stream."""

    kernel: Kernel
    stream: ClassVar[str] = COMPUTE


@dataclass(frozen=True, slots=True)
class Start:
    """Start a collective, or one for each of its flat arrays, on the stream of the axis that it is charged to."""

    traffic: Traffic

    @property
    def stream(self) -> str:
        return self.traffic.group


@dataclass(frozen=True, slots=True)
class Wait:
    """What follows on the compute stream waits for a collective that was started."""

    traffic: Traffic
    stream: ClassVar[str] = COMPUTE


@dataclass(frozen=True, slots=True)
class Slice:
    """Each device keeps its part of a tensor: nothing moves."""

    step: Communicate
    stream: ClassVar[str] = COMPUTE


class Held(NamedTuple):
    """A tensor in one of the shardings that a device holds it in."""

    name: str
    spec: Spec


@dataclass(frozen=True, slots=True)
class Free:
    """Nothing reads these any more."""

    held: tuple[Held, ...]
    stream: ClassVar[str] = COMPUTE

    @property
    def tensors(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(dict.fromkeys(one.name for one in self.held))


class Identity(NamedTuple):
    """Which instructions of a unit something that ran stands for: `KERNEL`, `START` or `WAIT`, the name that they have where a
    step is simulated, their phase, and of kernels the results."""

    kind: str
    name: str
    phase: str
    results: tuple[str, ...] = ()


Instruction = Launch | Start | Wait | Slice | Free


@dataclass(frozen=True, slots=True)
class Shape:
    """Extents that a product's or attention's rate depends on.

    Of a product: what it sums over (`summed`), the extents of its matrices but for tokens (`sides`), and of routed tokens the
    rows of each of its groups. Of attention: its scores, masked ones included, and the width of a head. Of a function of whole
    matrices `passing` elements that are there beside what it reads and makes, and whether a device does it `in_part`: of those
    alone that it updates a part of.
    """

    summed: Polynomial = ZERO
    sides: tuple[Polynomial, ...] = ()
    group_rows: Polynomial = ZERO
    scores: Polynomial = ZERO
    width: Polynomial = ZERO
    passing: Polynomial = ZERO
    in_part: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """`flops` of matrix products and attention (elementwise ones are bound by memory); `elements` touched, by role.

    `inputs` are those of its first operation, `reads` the operands of all that none of them defines, `outputs` what all of them
    define, by name. Of a product with a
    block's weights (derive/low_precision_products.py) `taken` are the elements of its operands, by role; nothing of
    other kernels.
    `makes_gradients`: a product that gives a weight's gradient, for which only the optimizer waits (W in the papers on zero
    bubbles). `steps` are its operations as derived.
    """

    phase: str
    kind: str
    inputs: tuple[str, ...]
    reads: tuple[str, ...]
    outputs: tuple[str, ...]
    flops: Polynomial
    elements: Mapping[Role, Polynomial]
    taken: Mapping[Role, Polynomial]
    makes_gradients: bool
    shape: Shape
    steps: tuple[Compute, ...] = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """What it goes by where steps are drawn and traced: its kind, and the first tensor that it makes."""
        return f"{self.kind} {self.outputs[0]}"


# The pair of ranks along `pp` that are as far from either end: first and last, second and last but one.
OPPOSITE: Axes = ("pp_opposite",)
PIPELINE: Axes = ("pp",)  # over which messages between stages go


@dataclass(frozen=True, slots=True)
class Traffic:
    """A collective of one unit, or one for each of its flat arrays.

    `payload` are elements (see `Collective.payload_elements`; of routed tokens those that are there), `tensors` what it carries,
    `beside` the results of the computations that it runs beside, in pieces. `for_products`: nothing but products with a block's
    weights take what it brings. `reason` is the derivation's, `derived` its collectives that this one stands for;
    `tells`: of how many rows are sent, the collective that sends them.
    """

    unit: str
    phase: str
    kind: Kind
    axes: Axes
    role: Role
    payload: Polynomial | FlatArrays
    tensors: tuple[str, ...]
    beside: tuple[str, ...] = ()
    for_products: bool = False
    reason: str = ""
    place: int = field(default=-1, compare=False)  # among the derived steps of its pass; of flat arrays none
    derived: tuple[Communicate, ...] = field(default=(), compare=False, repr=False)
    tells: Traffic | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """What it goes by where steps are drawn and traced: its kind, and the first tensor that it carries."""
        return f"{self.kind} {self.tensors[0]}"

    @property
    def scope(self) -> str:
        """How often it runs: once per optimizer step, or per micro-batch."""
        return "step" if self.phase == "update" else "micro_batch"

    @property
    def carries_weights(self) -> bool:
        """Whether it carries weights, their gradients, or what an optimizer makes of these."""
        return self.role in (*WEIGHT_ROLES, Role.DIRECTION, Role.MEAN)

    @property
    def is_control(self) -> bool:
        """Whether it carries the loss, the norm, or what routers did: numbers that no operation of the pass waits for."""
        return self.role is Role.STATISTIC and self.place < 0

    @property
    def group(self) -> str:
        """The parallel axis that it is charged to; what runs once per step is control traffic, unless it carries weights."""
        return axis_group(self.axes) if self.carries_weights or self.scope != "step" else "control"

    @property
    def elements(self) -> Polynomial:
        """The payload's elements without padding."""
        return self.payload.elements if isinstance(self.payload, FlatArrays) else self.payload

    def extent(self, values: Values, most_elements: float) -> Extent:
        """How many collectives there are and their elements together, where buckets hold at most so many."""
        if isinstance(self.payload, FlatArrays):
            return self.payload.evaluate(values, most_elements)
        return Extent(1, self.payload.evaluate(values))


def axis_group(axes: Axes) -> str:
    """The parallel axis that traffic over these atomic axes belongs to."""
    if axes == OPPOSITE:
        return "pp"
    for name in ("dp", "fsdp", "cp", "pp", "ep"):
        if name in axes:
            return name
    return "tp"


ACTIVATION, GATHER, GRADIENT, CONTROL = "activation", "weight", "gradient", "control"  # what a transfer is for

UPDATE = "update"  # beside the kinds of passes (`pipeline.actions`)
