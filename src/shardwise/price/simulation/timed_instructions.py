"""The instructions of a unit with seconds, of which the unit's price consists too, and the contents of virtual stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from shardwise.derive.sharded_unit import ShardedUnit
from shardwise.model.decoder import LAYER_UNITS, MTP_UNITS
from shardwise.model.program import Role
from shardwise.pipeline.actions import BACKWARD_WEIGHT, StagePlacement
from shardwise.price.instruction_prices import InstructionPricer
from shardwise.price.layout_pricer import Pricing
from shardwise.price.simulation.streams import TimedInstruction, TimedKernel, Transfer, WaitTransfer, start_transfer
from shardwise.price.stage_contents import NO_RECOMPUTE
from shardwise.price.unit_cost import ActivationCost, StateCost, sum_over_units
from shardwise.price.unit_inputs import UnitCostInputs, time_term
from shardwise.sharding.collectives import CollectiveKind
from shardwise.step.instructions import (
    ACTIVATION,
    CONTROL,
    GATHER,
    GRADIENT,
    UPDATE,
    Instruction,
    KernelLaunch,
    StartCollective,
    UnitCollective,
    WaitCollective,
)
from shardwise.step.instructions import Kernel as Launched
from shardwise.step.pipeline_stages import SPLIT_UNITS, select_instructions, stage_units
from shardwise.step.unit_instructions import payload_tensors

TRANSFER_ROLES = {Role.WEIGHT: GATHER, Role.WEIGHT_GRADIENT: GRADIENT}


class UnitTimings:
    """The work of units in passes of each kind, in one layout."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing, self.pricer = pricing, InstructionPricer(pricing)
        self._known: dict[tuple[str, str], tuple[TimedInstruction, ...]] = {}

    @cached_property
    def costs(self) -> tuple[Mapping[str, ActivationCost], Mapping[str, StateCost]]:
        """The costs of the units, by name."""
        return self.pricing.unit_costs()

    def unit_work(self, unit: str, kind: str) -> tuple[TimedInstruction, ...]:
        """A unit's work in a pass of a kind, or in the update."""
        if (unit, kind) not in self._known:
            self._known[unit, kind] = tuple(self._time_unit(unit, kind))
        return self._known[unit, kind]

    def _time_unit(self, unit: str, kind: str) -> Iterator[TimedInstruction]:
        template, parts = self.pricer.unit_instructions(unit), self.pricer.parts(unit)
        own = unit.removeprefix(NO_RECOMPUTE)
        listed = template.passes[UPDATE] if kind == UPDATE else select_instructions(template, own, kind)
        host = _LaunchOverhead(self.pricer, parts, kind)
        pieces = _ChunkedCollectives(self.pricer, parts, own, listed)
        started = ((one, self._transfer(template.unit, one, parts)) for one in _started_collectives(listed))
        moved = {id(one): transfer for one, transfer in started if transfer is not None}
        casts = set[str]()
        for one in listed:
            if isinstance(one, KernelLaunch):
                kernel = one.kernel
                if kernel.phase not in casts:
                    casts.add(kernel.phase)
                    yield from host.casts(own, kernel.phase)
                yield from pieces.before(kernel)
                yield TimedKernel(
                    seconds=self.pricer.kernel_s(kernel, parts) + host.gap_s(kernel.phase), unit=own, phase=kernel.phase,
                    name=kernel.name, results=kernel.outputs,
                )  # fmt: skip
                yield from pieces.behind(kernel)
            elif isinstance(one, (StartCollective, WaitCollective)) and id(one.collective) in moved:
                transfer = moved[id(one.collective)]
                yield start_transfer(transfer) if isinstance(one, StartCollective) else WaitTransfer(transfer)
        yield from pieces.without_kernels()

    def _transfer(self, unit: ShardedUnit, traffic: UnitCollective, parts: UnitCostInputs) -> Transfer | None:
        """A collective; none where nothing moves, or where it runs in pieces."""
        seconds = 0.0 if traffic.chunked_with else self.pricer.collective_s(traffic, parts)
        if seconds == 0.0:
            return None
        return Transfer(
            seconds=seconds, axis=time_term(traffic), unit=unit.name, name=traffic.name,
            role=CONTROL if traffic.is_control else TRANSFER_ROLES.get(traffic.role, ACTIVATION),
            carries=payload_tensors(unit, traffic),
            waits_one_behind=traffic.kind is CollectiveKind.REDUCE_SCATTER and traffic.scope == "micro_batch",
        )  # fmt: skip

    def message_s(self) -> float:
        """Seconds of a micro-batch's hidden state, or of its gradient, to the next stage."""
        return float(self.costs[0]["carry"].forward_traffic_s["pp"])


def _started_collectives(listed: Iterable[Instruction]) -> Iterator[UnitCollective]:
    return (one.collective for one in listed if isinstance(one, StartCollective))


class _LaunchOverhead:
    """What a pass of a unit takes beside its kernels on the device: casts of what products take, and the host's launches.

    The seconds of the latter are shared out over the kernels of a phase. What is made in a weights' pass has been cast before.
    """

    def __init__(self, pricer: InstructionPricer, parts: UnitCostInputs, kind: str) -> None:
        self.pricer, self.parts, self.kind = pricer, parts, kind
        self.known: dict[str, float] = {}

    def casts(self, unit: str, phase: str) -> Iterator[TimedKernel]:
        seconds = self.pricer.casts_s(self.parts, phase)
        if seconds and self.kind != BACKWARD_WEIGHT:
            yield TimedKernel(seconds=seconds, unit=unit, phase=phase, name="cast")

    def gap_s(self, phase: str) -> float:
        if phase not in self.known:
            self.known[phase] = 0.0 if self.kind == UPDATE else self.pricer.gap_s(self.parts, phase)
        return self.known[phase]


class _ChunkedCollectives:
    """Collectives that run in pieces beside kernels: with n pieces the first n-th of the kernels waits for nothing, or the last
    piece hides behind nothing. Those beside the same kernels begin with the first of these, and are waited for behind the last.
    """

    def __init__(
        self, pricer: InstructionPricer, parts: UnitCostInputs, unit: str, listed: Iterable[Instruction]
    ) -> None:
        together: dict[tuple[str, tuple[str, ...]], list[UnitCollective]] = {}
        for traffic in _started_collectives(listed):
            if traffic.chunked_with:
                together.setdefault((traffic.phase, traffic.chunked_with), []).append(traffic)
        self.first: dict[int, Transfer] = {}
        self.last: dict[int, Transfer] = {}
        self.unplaced: list[Transfer] = []
        for (phase, beside), moved in together.items():
            beside_them = [k for k in parts.kernels if k.phase == phase and not set(k.outputs).isdisjoint(beside)]
            compute_s = sum(pricer.kernel_s(kernel, parts) for kernel in beside_them)
            pieces = float(pricer.values.group_degree(moved[0].axes))
            traffic_s = sum(float(pricer.pricer.chunked_s(one, parts, pricer.values, pricer.links)) for one in moved)
            names = {kernel.outputs for kernel in beside_them}
            here = [k for one in listed if isinstance(one, KernelLaunch) and (k := one.kernel).outputs in names]
            if not traffic_s:
                continue
            transfer = Transfer(
                seconds=traffic_s + compute_s / pieces if here else traffic_s, axis=moved[0].stream, unit=unit,
                name=f"{moved[0].name} in pieces", chunked_kernels_s=compute_s if here else 0.0,
            )  # fmt: skip
            if here:
                self.first[id(here[0])], self.last[id(here[-1])] = transfer, transfer
            else:
                self.unplaced.append(transfer)

    def before(self, kernel: Launched) -> Iterator[TimedInstruction]:
        if id(kernel) in self.first:
            yield start_transfer(self.first[id(kernel)])

    def behind(self, kernel: Launched) -> Iterator[TimedInstruction]:
        if id(kernel) in self.last:
            yield WaitTransfer(self.last[id(kernel)])

    def without_kernels(self) -> Iterator[TimedInstruction]:
        """Those whose kernels another pass has."""
        for one in self.unplaced:
            yield start_transfer(one)
            yield WaitTransfer(one)


class VirtualStage(NamedTuple):
    """A virtual stage: its units in the model's order.

    `owned_units`: those, and others, whose weights rest on the rank because of the stage: it reduces and updates them.
    `borrowed_units`: units that run on weights which another unit owns. `host_s`: a micro-batch's activations to the host.
    `exchange_s`: gradients exchanged with the rank that has a copy of the weights. `saved_bytes`: what a
    micro-batch's forward pass
    keeps, of which `waiting_bytes` until weights' gradients are made where these wait.
    """

    units: tuple[str, ...]
    owned_units: tuple[str, ...]
    borrowed_units: frozenset[str] = frozenset()
    host_s: float = 0.0
    exchange_s: float = 0.0
    saved_bytes: float = 0.0
    waiting_bytes: float = 0.0


def build_virtual_stages(
    works: UnitTimings, placement: StagePlacement
) -> tuple[tuple[VirtualStage, ...], tuple[tuple[int, ...], ...]]:
    """All virtual stages, and those that each rank holds."""
    pricing = works.pricing
    placed = [tuple(unit.kind for unit in units) for units in stage_units(pricing.architecture, pricing.layout)]
    held = tuple(placement.stages_of_rank(rank) for rank in range(pricing.layout.pp))
    found: dict[int, VirtualStage] = {}
    for rank, numbers in enumerate(held):
        for number, units in zip(numbers, _split_recomputing(pricing, rank, [placed[n] for n in numbers]), strict=True):
            found[number] = _build_stage(works, rank, units)
    return tuple(found[number] for number in sorted(found)), held


def _split_recomputing(pricing: Pricing, rank: int, stages: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The units of a rank's stages, with the layers that recompute nothing by their own names: the last of each kind."""
    counts = pricing.counts(rank)
    left = {kind: int(number) - int(counts.kept.get(kind, 0)) for kind, number in counts.layers.items()}
    found = []
    for units in stages:
        names = []
        for unit in units:
            if unit in left:
                left[unit] -= 1
            names.append(NO_RECOMPUTE + unit if unit in left and left[unit] < 0 else unit)
        found.append(tuple(names))
    return found


def _build_stage(works: UnitTimings, rank: int, units: tuple[str, ...]) -> VirtualStage:
    """A stage of a rank. What the rank holds of embeddings follows from the counts of its price."""
    counts, (activation, state) = works.pricing.counts(rank), works.costs
    plain = [unit.removeprefix(NO_RECOMPUTE) for unit in units]
    used = {"embedding"} if "embedding" in units and not counts.copies else set()
    owned = [unit for unit in plain if unit not in used]
    if "head" in units and "embedding" not in units and counts.copies and not counts.embedding:
        owned.append("embedding")  # a copy, which multi-token prediction borrows
    if "head" in units and counts.untied:
        owned.append("untied")
    times: Mapping[str, int] = Counter(
        unit for unit in units if unit.removeprefix(NO_RECOMPUTE) in LAYER_UNITS + MTP_UNITS
    )
    split = {unit: number for unit, number in times.items() if unit.removeprefix(NO_RECOMPUTE) in SPLIT_UNITS}
    saved = sum_over_units(activation, {**times, "head": units.count("head")}, "saved_bytes")
    host = works.pricing.host
    exchange_s = 0.0
    if counts.exchanges and {"embedding", "head"} & set(units):
        exchange_s += float(state["embedding"].exchange_s)
    if works.pricing.pipeline.form.bidirectional:
        exchange_s += sum(float(state[unit].exchange_s) for unit in owned)
    return VirtualStage(
        units, tuple(owned), frozenset(used), exchange_s=exchange_s,
        host_s=float(sum_over_units(activation, times, "saved_bytes")) / host.bytes_per_s if host.activations else 0.0,
        saved_bytes=0.0 if host.activations else float(saved),
        waiting_bytes=float(sum_over_units(activation, split, "waiting_bytes")),
    )  # fmt: skip
