"""Instructions of a unit with seconds, which add up to the unit's price, and the contents of virtual stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple

from shardwise.model import MTP_UNITS, is_layer
from shardwise.pipeline import BACKWARD_WEIGHT
from shardwise.pipeline.actions import StagePlacement
from shardwise.price.instruction_prices import InstructionPricer
from shardwise.price.layout_pricer import Pricing
from shardwise.price.simulation.streams import TimedInstruction, TimedKernel, Transfer, WaitTransfer, start_transfer
from shardwise.price.stage_contents import NO_RECOMPUTE
from shardwise.price.unit_cost import ActivationCost, StateCost, sum_over_units
from shardwise.price.unit_inputs import chunked_groups
from shardwise.sharding import CollectiveKind
from shardwise.step import (
    UPDATE,
    Kernel,
    StartCollective,
    UnitCollective,
    WaitCollective,
    unroll_rings,
)
from shardwise.step.instructions import SingleInstruction
from shardwise.step.pipeline_stages import select_instructions, splits_backward_pass, stage_units
from shardwise.step.unit_instructions import payload_tensors


class UnitTimings:
    """Timed work of units in passes of each kind, in one layout."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self._cache: dict[tuple[str, str], tuple[TimedInstruction, ...]] = {}

    @cached_property
    def costs(self) -> tuple[Mapping[str, ActivationCost], Mapping[str, StateCost]]:
        """Costs of the units, by name."""
        return self.pricing.unit_costs()

    def unit_work(self, unit: str, kind: str) -> tuple[TimedInstruction, ...]:
        """Return a unit's work in a pass of a kind, or in the update."""
        if (unit, kind) not in self._cache:
            self._cache[unit, kind] = tuple(self._time_unit(unit, kind))
        return self._cache[unit, kind]

    def _time_unit(self, unit: str, kind: str) -> Iterator[TimedInstruction]:
        pricer = InstructionPricer(self.pricing, unit)
        unit_instructions, plain_unit = pricer.unit_instructions, pricer.unit
        listed = (
            unit_instructions.passes[UPDATE]
            if kind == UPDATE
            else select_instructions(unit_instructions, plain_unit, kind)
        )
        instructions = [*unroll_rings(listed)]
        host = _LaunchOverhead(pricer, kind)
        chunked = _ChunkedCollectives(pricer, instructions)
        started = (
            (collective, self._transfer(pricer, collective)) for collective in _started_collectives(instructions)
        )
        transfers = {id(collective): transfer for collective, transfer in started if transfer is not None}
        casts = set[str]()
        for instruction in instructions:
            match instruction:
                case Kernel() as kernel:
                    if kernel.phase not in casts:
                        casts.add(kernel.phase)
                        yield from host.casts(plain_unit, kernel.phase)
                    yield from chunked.before(kernel)
                    seconds = pricer.kernel_s(kernel) + host.gap_s(kernel.phase)
                    yield TimedKernel(
                        seconds=seconds, unit=plain_unit, phase=kernel.phase, name=kernel.name, results=kernel.outputs
                    )
                    yield from chunked.after(kernel)
                case StartCollective() if id(instruction.collective) in transfers:
                    yield start_transfer(transfers[id(instruction.collective)])
                case WaitCollective() if id(instruction.collective) in transfers:
                    yield WaitTransfer(transfers[id(instruction.collective)])
        yield from chunked.without_kernels()

    def _transfer(self, pricer: InstructionPricer, collective: UnitCollective) -> Transfer | None:
        """Return the transfer of a collective; None where it takes no time, or runs in chunks."""
        seconds = 0.0 if collective.chunked_with else pricer.collective_s(collective)
        if seconds == 0.0:
            return None
        unit = pricer.unit_instructions.unit
        return Transfer(
            seconds=seconds, axis=collective.time_term, unit=unit.name, name=collective.name,
            role=collective.purpose,
            carries=payload_tensors(unit, collective),
            waits_for_next=collective.kind is CollectiveKind.REDUCE_SCATTER and collective.scope == "micro_batch",
        )  # fmt: skip

    def message_s(self) -> float:
        """Return the seconds of a micro-batch's hidden state, or of its gradient, to the next stage."""
        return float(self.costs[0]["carry"].forward_traffic_s["pp"])


def _started_collectives(instructions: Iterable[SingleInstruction]) -> Iterator[UnitCollective]:
    return (instruction.collective for instruction in instructions if isinstance(instruction, StartCollective))


class _LaunchOverhead:
    """Overhead of a unit's pass beside its kernels: casts of product operands, and the host's launches.

    Launch seconds are shared out over the kernels of a phase. Operands of a W pass have been cast before it.
    """

    def __init__(self, pricer: InstructionPricer, kind: str) -> None:
        self.pricer, self.kind = pricer, kind
        self.cache: dict[str, float] = {}

    def casts(self, unit: str, phase: str) -> Iterator[TimedKernel]:
        seconds = self.pricer.casts_s(phase)
        if seconds and self.kind != BACKWARD_WEIGHT:
            yield TimedKernel(seconds=seconds, unit=unit, phase=phase, name="cast")

    def gap_s(self, phase: str) -> float:
        if phase not in self.cache:
            self.cache[phase] = 0.0 if self.kind == UPDATE else self.pricer.gap_s(phase)
        return self.cache[phase]


class _ChunkedCollectives:
    """Collectives that run in chunks beside kernels.

    With n chunks the first n-th of the kernels has nothing to overlap with, or the last chunk has not. Collectives
    beside the same kernels start with the first of these, and are waited for after the last.
    """

    def __init__(self, pricer: InstructionPricer, instructions: Iterable[SingleInstruction]) -> None:
        self.first: dict[int, Transfer] = {}
        self.last: dict[int, Transfer] = {}
        self.unplaced: list[Transfer] = []
        launches = [instruction for instruction in instructions if isinstance(instruction, Kernel)]
        for collectives, kernels in chunked_groups(_started_collectives(instructions), pricer.parts.kernels):
            compute_s = sum(pricer.kernel_s(kernel) for kernel in kernels)
            num_chunks = float(pricer.values.group_degree(collectives[0].axes))
            chunked_s = partial(pricer.pricer.chunked_s, parts=pricer.parts, values=pricer.values, links=pricer.links)
            communication_s = sum(float(chunked_s(collective)) for collective in collectives)
            names = {kernel.outputs for kernel in kernels}
            launched = [kernel for kernel in launches if kernel.outputs in names]
            if not communication_s:
                continue
            transfer = Transfer(
                seconds=communication_s + compute_s / num_chunks if launched else communication_s, axis=collectives[0].stream,
                unit=pricer.unit, name=f"{collectives[0].name} in pieces", chunked_kernels_s=compute_s if launched else 0.0,
            )  # fmt: skip
            if launched:
                self.first[id(launched[0])], self.last[id(launched[-1])] = transfer, transfer
            else:
                self.unplaced.append(transfer)

    def before(self, kernel: Kernel) -> Iterator[TimedInstruction]:
        if id(kernel) in self.first:
            yield start_transfer(self.first[id(kernel)])

    def after(self, kernel: Kernel) -> Iterator[TimedInstruction]:
        if id(kernel) in self.last:
            yield WaitTransfer(self.last[id(kernel)])

    def without_kernels(self) -> Iterator[TimedInstruction]:
        """Yield starts and waits of the collectives whose kernels another pass has."""
        for transfer in self.unplaced:
            yield start_transfer(transfer)
            yield WaitTransfer(transfer)


class VirtualStage(NamedTuple):
    """A virtual stage: its units in the model's order.

    `owned_units`: units whose weights rest on the rank because of the stage, which it reduces and updates. `borrowed_units`:
    units that run on weights which another unit owns. `host_s`: seconds of a micro-batch's activations to the host.
    `exchange_s`: of gradients exchanged with the rank that has a copy of the weights. `saved_bytes`: what a micro-batch's
    forward pass keeps, of which `waiting_bytes` until weight gradients are made where these wait.
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
    """Return all virtual stages, and the numbers of those that each rank holds."""
    pricing = works.pricing
    placed = [tuple(unit.kind for unit in units) for units in stage_units(pricing.architecture, pricing.layout)]
    stages_by_rank = tuple(placement.stages_of_rank(rank) for rank in range(pricing.layout.pp))
    stages: dict[int, VirtualStage] = {}
    for rank, numbers in enumerate(stages_by_rank):
        for number, units in zip(numbers, _split_recomputing(pricing, rank, [placed[n] for n in numbers]), strict=True):
            stages[number] = _build_stage(works, rank, units)
    return tuple(stages[number] for number in sorted(stages)), stages_by_rank


def _split_recomputing(pricing: Pricing, rank: int, stages: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the units of a rank's stages; layers that recompute nothing, the last of each kind, get their own names."""
    counts = pricing.counts(rank)
    remaining = {kind: int(number) - int(counts.kept.get(kind, 0)) for kind, number in counts.layers.items()}
    names_by_stage = []
    for units in stages:
        names = []
        for unit in units:
            if unit in remaining:
                remaining[unit] -= 1
            names.append(NO_RECOMPUTE + unit if unit in remaining and remaining[unit] < 0 else unit)
        names_by_stage.append(tuple(names))
    return names_by_stage


def _is_layer_or_module(unit: str) -> bool:
    plain_unit = unit.removeprefix(NO_RECOMPUTE)
    return is_layer(plain_unit) or plain_unit in MTP_UNITS


def _build_stage(works: UnitTimings, rank: int, units: tuple[str, ...]) -> VirtualStage:
    """Build a stage of a rank. Who holds embeddings follows from the counts of the rank's price."""
    counts, (activation, state) = works.pricing.counts(rank), works.costs
    plain = [unit.removeprefix(NO_RECOMPUTE) for unit in units]
    used = {"embedding"} if "embedding" in units and not counts.copies else set()
    owned = [unit for unit in plain if unit not in used]
    if "head" in units and "embedding" not in units and counts.copies and not counts.embedding:
        owned.append("embedding")  # a copy, which multi-token prediction borrows
    if "head" in units and counts.untied:
        owned.append("untied")
    times: Mapping[str, int] = Counter(unit for unit in units if _is_layer_or_module(unit))
    split = {unit: number for unit, number in times.items() if splits_backward_pass(unit.removeprefix(NO_RECOMPUTE))}
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
