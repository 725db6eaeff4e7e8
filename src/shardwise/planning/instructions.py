"""The instruction list of a plan's step with numbers: what each device of a stage does, on which stream, how long, and why.

Seconds are those of the estimate, each instruction's own: what hides behind what is not in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardwise.cost.counts import KEPT
from shardwise.cost.pricing import Pricing
from shardwise.cost.unit_parts import Parts
from shardwise.errors import InputError, chosen
from shardwise.layout.layout import Layout
from shardwise.layout.placement import cut_levels, default_placement
from shardwise.lowering.instruction import Free, Instruction, Launch, Slice, Start, Wait
from shardwise.lowering.kernels import Kernel
from shardwise.lowering.template import PASSES, unit_template
from shardwise.lowering.traffic import Traffic
from shardwise.model.decoder import LAYERS, PREDICTS
from shardwise.network.placed import Links
from shardwise.planning.plan import Plan
from shardwise.sharding.collective import Kind

SCHEMA = "shardwise.instructions/1"
CARRY = "carry"
# Why a tensor moves where the derivation has no more to say than its kind.
REASONS: Mapping[Kind, str] = {
    Kind.ALL_GATHER: "it lies in parts and is read whole",
    Kind.REDUCE_SCATTER: "it is a partial sum and lies in parts",
    Kind.ALL_REDUCE: "it is a partial sum and is read whole",
    Kind.ALL_TO_ALL: "its parts are read along another dim",
    Kind.PERMUTE: "its parts are read on other devices",
    Kind.SEND_RECV: "the next stage reads it",
}
# The order in which a stage runs its units forward; backward is the other way round.
ORDER = (*LAYERS, *(KEPT + layer for layer in LAYERS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """An instruction with numbers. `kind`: launch, start, wait, slice or free; `operation` is the kind of a kernel or collective.

    `count` collectives of `num_bytes` together (their payload), or a kernel that reads and writes so many; `flops` of products
    and attention. `over`: the axes of more than one device. `seconds` is None where nothing takes time.
    """

    kind: str
    stream: str
    operation: str = ""
    tensors: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    count: int = 1
    num_bytes: float = 0.0
    flops: float = 0.0
    seconds: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A pass of a unit: the same instructions for each of its `layers`, in each of `micro_batches`."""

    unit: str
    name: str
    layers: int
    micro_batches: int
    recompute: str
    instructions: tuple[Priced, ...]

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of a step by stream, one after the other."""
        total: dict[str, float] = {}
        for one in self.instructions:
            if one.seconds is not None:
                total[one.stream] = total.get(one.stream, 0.0) + one.seconds * self.layers * self.micro_batches
        return total


def instructions(
    plan: Plan, *, stage: int = 0, passes: Sequence[str] = tuple(PASSES), unit: str | None = None
) -> tuple[Segment, ...]:
    """The instructions of a pipeline stage, from its first unit's forward pass to the update.

    Raises `InputError` for a stage, a pass or a unit that the plan has not.
    """
    return tuple(_Lister(plan, stage).segments(passes, unit))


def instructions_payload(plan: Plan, found: Sequence[Segment], stage: int) -> dict[str, Any]:
    """The versioned payload that `--json` prints."""
    return {
        "schema": SCHEMA, "model": plan.model.name, "layout": str(plan.layout), "stage": stage,
        "segments": [{**asdict(one), "seconds_by_stream": dict(one.seconds)} for one in found],
    }  # fmt: skip


class _Lister:
    def __init__(self, plan: Plan, stage: int) -> None:
        layout = plan.layout
        if not 0 <= stage < layout.pp:
            raise InputError(f"--stage: found {stage}; a stage of 0 to {layout.pp - 1} is required")
        self.pricing = Pricing(plan.model, plan.cluster, plan.job, layout)
        self.pricer, self.values = self.pricing.pricer, self.pricing.values
        self.structure, self.counts = plan.model.structure, self.pricing.counts(stage)
        self.links = self._links(layout)
        self.single = frozenset(axis for axis, degree in self.pricing.degrees.items() if degree == 1)

    def _links(self, layout: Layout) -> Links:
        topology = self.pricing.topology
        return Links(
            topology, cut_levels(topology, layout.placement or default_placement(topology), self.pricing.degrees)
        )

    def segments(self, passes: Sequence[str], unit: str | None) -> Iterator[Segment]:
        for name in passes:
            chosen(PASSES, name, "pass")
        times = {name: count for name, count in {**self.counts.units, CARRY: self.counts.carries}.items() if count}
        order = sorted(times, key=lambda name: ("embedding", *ORDER, *PREDICTS, CARRY, "head").index(name))
        if unit is not None:
            chosen(dict.fromkeys(order), unit, "unit")
        for name in passes:
            for each in order if name == "forward" else reversed(order):
                if unit in (None, each):
                    yield from self.segment(each, name, int(times[each]))

    def segment(self, unit: str, name: str, layers: int) -> Iterator[Segment]:
        """A pass of a unit; none where nothing is done."""
        family = self.pricer.of_structure(self.pricing.family)
        family = replace(family, recompute="none") if unit.startswith(KEPT) else family
        own = unit.removeprefix(KEPT)
        listed = unit_template(self.structure, family, own, self.pricer.rates.policy, self.single).passes[name]
        parts = self.pricer.parts(family, own)
        if listed:
            yield Segment(
                unit=unit, name=name, layers=layers, recompute=family.recompute if own in LAYERS else "none",
                micro_batches=1 if name == "update" else self.pricing.num_micro_batches,
                instructions=tuple(self.priced(one, parts) for one in listed),
            )  # fmt: skip

    def priced(self, one: Instruction, parts: Parts) -> Priced:
        match one:
            case Launch():
                return self.launched(one, one.kernel, parts)
            case Start():
                return self.started(one, one.traffic, parts)
            case Wait():
                return Priced(
                    kind="wait", stream=one.stream, operation=str(one.traffic.kind), tensors=one.traffic.tensors,
                    over=self.several(one.traffic), why="what follows reads it",
                )  # fmt: skip
            case Slice():
                return Priced(
                    kind="slice", stream=one.stream, tensors=(one.step.tensor.name,), over=one.step.collective.axes,
                    why=one.step.reason or "each device keeps its part",
                )  # fmt: skip
            case Free():
                return Priced(kind="free", stream=one.stream, tensors=one.tensors, why="nothing reads it any more")

    def launched(self, one: Launch, kernel: Kernel, parts: Parts) -> Priced:
        return Priced(
            kind="launch", stream=one.stream, operation=kernel.kind, tensors=kernel.reads, results=kernel.outputs,
            num_bytes=float(self.pricer.kernel_bytes(kernel, parts, self.values)),
            flops=float(kernel.flops.evaluate(self.values)),
            seconds=float(self.pricer.kernel_s(kernel, parts, self.values)),
            why="a weight's gradient" if kernel.makes_gradients else kernel.phase,
        )  # fmt: skip

    def started(self, one: Start, traffic: Traffic, parts: Parts) -> Priced:
        count, elements = traffic.extent(self.values, self.pricer.most_elements)
        return Priced(
            kind="start", stream=one.stream, operation=str(traffic.kind), tensors=traffic.tensors, over=self.several(traffic),
            count=int(count),
            num_bytes=float(elements * self.pricer.formats.moved_width(traffic, parts.products)),
            seconds=float(self.pricer.collective_s(traffic, parts, self.values, self.links)),
            why=traffic.reason or REASONS[traffic.kind],
        )  # fmt: skip

    def several(self, traffic: Traffic) -> tuple[str, ...]:
        """The axes of more than one device that a collective goes over."""
        return tuple(axis for axis in traffic.axes if axis not in self.single)
