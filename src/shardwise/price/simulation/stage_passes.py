"""Instruction list of a pass through a stage, as an engine runs it, and by the conventions of overlap.

In engine order, collectives on activations stand where the units' lists have them. Weights that rest in parts are
gathered one unit ahead; gradients that are scattered are waited for when the next ones leave, the last of them before
the pass ends. What is reduced once per step leaves in the last pass, as soon as the last kernel has made it, and is
waited for before the update, which sums the norm first and waits for its new weights last. Source: run/engine, whose
collectives are captured and compared with the list.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwise.pipeline import BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD
from shardwise.price.overlap import HIDEABLE
from shardwise.price.simulation.streams import (
    HOST,
    StartTransfer,
    TimedInstruction,
    TimedKernel,
    Transfer,
    WaitTransfer,
    copy_with_new_transfers,
    start_transfer,
    started_transfers,
)
from shardwise.price.simulation.unit_timings import UnitTimings, VirtualStage
from shardwise.step import CONTROL, GATHER, GRADIENT, UPDATE

LIST = "list"  # starts and waits as in the list
LINKS = "links"  # the single stream of all communication that adds up
# By a convention of overlap the stream on which the traffic of an axis runs beside the whole pass; None: behind its kernels,
# where nothing hides it. `none` is what an engine does whose collectives are waited for where they start.
CONVENTION_STREAMS: Mapping[str, Callable[[str, Container[str]], str | None]] = {
    "sum": lambda axis, hideable: LINKS,
    "max": lambda axis, hideable: axis,
    "per_axis": lambda axis, hideable: LINKS if axis in hideable else None,
    "none": lambda axis, hideable: None,
}
OVERLAP_CHOICES = (LIST, *CONVENTION_STREAMS)


class StagePass(NamedTuple):
    """A pass through a stage; whether it is the rank's `first` forward pass, or the `last` that gives gradients. `share` of a
    full micro-batch's sequences, which a step's last one may have fewer of."""

    stage: VirtualStage
    kind: str
    first: bool = False
    last: bool = False
    share: float = 1.0


class PassLists:
    """Lists of the passes of one layout."""

    def __init__(self, works: UnitTimings, *, reduces_after: bool) -> None:
        self.works, self.reduces_after = works, reduces_after

    def engine_order(self, stage_pass: StagePass) -> list[TimedInstruction]:
        """Return a pass as an engine runs it; in the `last` one, collectives of the step start and are not waited for.

        Weights are gathered, and gradients scattered, in full whatever the sequences of a micro-batch.
        """
        stage = stage_pass.stage
        units = [
            copy_with_new_transfers(works, stage_pass.share, full_roles=(GATHER, GRADIENT))
            for works in self.units(stage, stage_pass.kind, last=stage_pass.last)
        ]
        listed = beside_host_copy([*_delay_scatter_waits(_prefetch_gathers(units))], stage.host_s * stage_pass.share)
        reductions = (*self.shard_reductions(stage), *self.late_reductions(stage)) if stage_pass.last else ()
        return [*listed, *(start_transfer(replace(reduction)) for reduction in reductions)]

    def units(self, stage: VirtualStage, kind: str, *, last: bool = False) -> list[Sequence[TimedInstruction]]:
        """Return the work of each unit with a full micro-batch, in the order of the pass; in the `last` one with what is reduced
        once per step."""
        works_by_unit: list[Sequence[TimedInstruction]] = []
        for unit in stage.units if kind == FORWARD else stage.units[::-1]:
            works, is_borrowed = self.works.unit_work(unit, kind), unit in stage.borrowed_units
            if is_borrowed and kind != FORWARD:
                works = tuple(_without_roles(works, (GATHER, GRADIENT)))
            reduces = last and not is_borrowed
            works_by_unit.append(self.start_step_reductions(unit, works) if reduces else works)
        for unit in self.units_without_passes(stage) if kind != FORWARD else ():
            gradient_work = _with_roles(self.works.unit_work(unit, kind), (GATHER, GRADIENT))
            works_by_unit.append((*gradient_work, *(self.start_step_reductions(unit, ()) if last else ())))
        return works_by_unit

    @staticmethod
    def units_without_passes(stage: VirtualStage) -> tuple[str, ...]:
        """Return the units that the rank owns and that no micro-batch passes through."""
        return tuple(unit for unit in stage.owned_units if unit in ("embedding", "untied") and unit not in stage.units)

    def reduced(self, unit: str) -> Iterator[Transfer]:
        """Yield the collectives that sum a unit's gradients once per step."""
        started = started_transfers(self.works.unit_work(unit, UPDATE))
        return (transfer for transfer in started if transfer.role == GRADIENT)

    def scatters_gradients(self, unit: str) -> bool:
        """Return True if a unit's gradients are scattered with every micro-batch, so that the step reduces shards."""
        started = started_transfers(self.works.unit_work(unit, FULL_BACKWARD))
        return any(transfer.waits_for_next for transfer in started)

    def start_step_reductions(self, unit: str, works: Sequence[TimedInstruction]) -> tuple[TimedInstruction, ...]:
        """Return a unit's work, with collectives of the step started after the last kernel that makes their payload."""
        listed = list(works)
        for reduction in () if self.scatters_gradients(unit) or self.reduces_after else self.reduced(unit):
            kernels = ((i, work) for i, work in enumerate(listed) if isinstance(work, TimedKernel))
            makers = [i for i, kernel in kernels if not set(kernel.results).isdisjoint(reduction.carries)]
            listed.insert(makers[-1] + 1 if makers else 0, start_transfer(reduction))
        return tuple(listed)

    def late_reductions(self, stage: VirtualStage) -> Iterator[Transfer]:
        """Yield the reductions of gradients that rest whole, where they wait for the end of the backward pass."""
        stage_units = (unit for unit in stage.units[::-1] if unit not in stage.borrowed_units)
        for unit in (*stage_units, *self.units_without_passes(stage)) if self.reduces_after else ():
            if not self.scatters_gradients(unit):
                yield from self.reduced(unit)

    def shard_reductions(self, stage: VirtualStage) -> Iterator[Transfer]:
        """Yield the collectives that sum scattered gradients over replicas, once per step."""
        scattered = (unit for unit in stage.owned_units if self.scatters_gradients(unit))
        return (reduction for unit in scattered for reduction in self.reduced(unit))

    @staticmethod
    def mirror_exchanges(stage: VirtualStage) -> Iterator[Transfer]:
        """Yield the exchange of gradients with the rank that has a copy of the weights."""
        if stage.exchange_s:
            yield Transfer(seconds=stage.exchange_s, axis="pp", unit="embedding", name="all_reduce of both copies")

    def convention_order(
        self, passes: Sequence[StagePass], overlap: str, hideable: Container[str] = HIDEABLE
    ) -> list[TimedInstruction]:
        """Order concurrent passes by an overlap convention: hideable communication beside the kernels, the rest after them.

        As in the estimate, all of a pass takes the share of its sequences.
        """
        listed = [
            work
            for stage_pass in passes
            for works in self.units(stage_pass.stage, stage_pass.kind)
            for work in copy_with_new_transfers(works, stage_pass.share)
        ]
        transfers = (transfer for stage_pass in passes for transfer in self._convention_transfers(stage_pass))
        arranged = _arrange_by_convention([*listed, *map(start_transfer, transfers)], overlap, hideable)
        return beside_host_copy(arranged, max(stage_pass.stage.host_s * stage_pass.share for stage_pass in passes))

    def _convention_transfers(self, stage_pass: StagePass) -> Iterator[Transfer]:
        """Yield what a convention counts in a pass apart from the pass's own list."""
        stage, kind, first, last, share = stage_pass
        sends = kind != BACKWARD_WEIGHT and self.works.pricing.layout.pp > 1
        message_s = self.works.message_s() * share if sends else 0.0
        if message_s:
            yield Transfer(seconds=message_s, axis="pp", unit="carry", name="send_recv x")
        for unit in stage.owned_units:
            for transfer in started_transfers(self.works.unit_work(unit, UPDATE)):
                if first if transfer.role == GATHER else last:
                    yield replace(transfer)
        yield from self.mirror_exchanges(stage) if last else ()

    def update(self, stages: Iterable[VirtualStage], overlap: str, stream_s: float) -> list[TimedInstruction]:
        """Return the update of a rank's stages, beside which the optimizer's state streams through the device in `stream_s`.

        By a convention all communication counts elsewhere.
        """
        stages = list(stages)
        owned = [unit for stage in stages for unit in stage.owned_units][::-1]
        by_unit = (_without_roles(self.works.unit_work(unit, UPDATE), (GRADIENT,)) for unit in owned)
        works = [work for unit_works in by_unit for work in copy_with_new_transfers(unit_works)]
        if overlap != LIST:
            return beside_host_copy([work for work in works if isinstance(work, TimedKernel)], stream_s)
        control, plain = [*_with_roles(works, (CONTROL,))], [*_without_roles(works, (CONTROL,))]
        waits = [work for work in plain if isinstance(work, WaitTransfer)]
        exchanges = (exchange for stage in stages for exchange in self.mirror_exchanges(stage))
        exchanged = [work for exchange in exchanges for work in (start_transfer(exchange), WaitTransfer(exchange))]
        kernels_and_starts = [work for work in plain if not isinstance(work, WaitTransfer)]
        return beside_host_copy([*exchanged, *control, *kernels_and_starts, *waits], stream_s)


def _arrange_by_convention(
    works: Iterable[TimedInstruction], overlap: str, hideable: Container[str]
) -> list[TimedInstruction]:
    """Return the kernels in order, hidden transfers beside all of them, and exposed ones after them."""
    kernels: list[TimedInstruction] = []
    hidden: list[StartTransfer] = []
    exposed: list[StartTransfer] = []
    for work in works:
        if isinstance(work, TimedKernel):
            kernels.append(work)
        elif isinstance(work, StartTransfer) and work.transfer.exposed_s:
            exposed_part = replace(work.transfer, seconds=work.transfer.exposed_s, chunked_kernels_s=0.0)
            stream = CONVENTION_STREAMS[overlap](exposed_part.axis, hideable)
            (exposed if stream is None else hidden).append(StartTransfer(exposed_part, stream or exposed_part.axis))
    waits = [WaitTransfer(start.transfer) for start in hidden]
    return [*hidden, *kernels, *waits, *(work for start in exposed for work in (start, WaitTransfer(start.transfer)))]


def beside_host_copy(works: Sequence[TimedInstruction], host_s: float) -> list[TimedInstruction]:
    """Return the work with copies to or from the host beside all of it."""
    if not host_s:
        return list(works)
    copy = Transfer(seconds=host_s, axis=HOST, unit=HOST, name="copy")
    return [start_transfer(copy), *works, WaitTransfer(copy)]


def _prefetch_gathers(units: Sequence[Sequence[TimedInstruction]]) -> Iterator[TimedInstruction]:
    """Yield the work of units in order, with the weights of each gathered as the one before begins."""
    gathers = [
        [work for work in works if isinstance(work, StartTransfer) and work.transfer.role == GATHER] for works in units
    ]
    yield from gathers[0] if gathers else ()
    for works, following in zip(units, [*gathers[1:], []], strict=True):
        yield from following
        yield from (work for work in works if not (isinstance(work, StartTransfer) and work.transfer.role == GATHER))


def _delay_scatter_waits(works: Iterable[TimedInstruction]) -> Iterator[TimedInstruction]:
    """Yield the work, with scattered gradients waited for when the next ones leave, and all others at the end."""
    pending: list[WaitTransfer] = []
    for work in works:
        if isinstance(work, WaitTransfer) and work.transfer.role == GRADIENT:
            pending.append(work)
            continue
        if isinstance(work, StartTransfer) and work.transfer.waits_for_next:
            yield from (wait for wait in pending if wait.transfer.waits_for_next)
            pending = [wait for wait in pending if not wait.transfer.waits_for_next]
        yield work
    yield from pending


def _with_roles(works: Iterable[TimedInstruction], roles: Container[str]) -> Iterator[TimedInstruction]:
    return (work for work in works if not isinstance(work, TimedKernel) and work.transfer.role in roles)


def _without_roles(works: Iterable[TimedInstruction], roles: Container[str]) -> Iterator[TimedInstruction]:
    return (work for work in works if isinstance(work, TimedKernel) or work.transfer.role not in roles)
