"""The list of a pass through a stage, as an engine runs it, and by the conventions of overlap.

As an engine runs it, what moves activations stands where the units' lists have it. Weights that rest in parts are gathered
one unit ahead; gradients that are scattered are waited for when the next ones leave, the last of them before the pass ends.
What is reduced once per step leaves in the last pass, as soon as the last kernel has made it, and is waited for in front of
the update, which sums the norm first and waits for its new weights last. Source: train/parallel (weights.py, reducer.py,
update.py), whose collectives are captured and held against the list.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwise.pipeline.actions import BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD
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
from shardwise.price.simulation.timed_instructions import UnitTimings, VirtualStage
from shardwise.step.instructions import CONTROL, GATHER, GRADIENT, UPDATE

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
    """A pass through a stage; whether it is the rank's `first` one forward, or the `last` that gives gradients."""

    stage: VirtualStage
    kind: str
    first: bool = False
    last: bool = False


class PassLists:
    """The lists of the passes of one layout."""

    def __init__(self, works: UnitTimings, *, reduces_after: bool) -> None:
        self.works, self.reduces_after = works, reduces_after

    def engine_order(self, stage: VirtualStage, kind: str, *, last: bool) -> list[TimedInstruction]:
        """A pass as an engine runs it; in the `last` one, collectives of the step start and are not waited for."""
        found = with_host_copy(
            [*_delay_scatter_waits(_prefetch_gathers(self.units(stage, kind, last=last)))], stage.host_s
        )
        return (
            [
                *found,
                *(
                    start_transfer(replace(one))
                    for one in (*self.shard_reductions(stage), *self.late_reductions(stage))
                ),
            ]
            if last
            else found
        )

    def units(self, stage: VirtualStage, kind: str, *, last: bool = False) -> list[list[TimedInstruction]]:
        """The work of each unit, in the order of the pass; in the `last` one with what is reduced once per step."""
        order = stage.units if kind == FORWARD else stage.units[::-1]
        found = []
        for unit in order:
            works = self.works.unit_work(unit, kind)
            if unit in stage.borrowed_units and kind != FORWARD:
                works = tuple(_without_roles(works, (GATHER, GRADIENT)))
            found.append(
                copy_with_new_transfers(
                    self.start_step_reductions(unit, works) if last and unit not in stage.borrowed_units else works
                )
            )
        for unit in self.units_without_passes(stage) if kind != FORWARD else ():
            own = _with_roles(self.works.unit_work(unit, kind), (GATHER, GRADIENT))
            found.append(copy_with_new_transfers([*own, *(self.start_step_reductions(unit, ()) if last else ())]))
        return found

    @staticmethod
    def units_without_passes(stage: VirtualStage) -> tuple[str, ...]:
        """Units that the rank owns and that no micro-batch passes through."""
        return tuple(unit for unit in stage.owned_units if unit in ("embedding", "untied") and unit not in stage.units)

    def reduced(self, unit: str) -> Iterator[Transfer]:
        """The collectives that sum a unit's gradients once per step."""
        return (one for one in started_transfers(self.works.unit_work(unit, UPDATE)) if one.role == GRADIENT)

    def scatters_gradients(self, unit: str) -> bool:
        """Whether a unit's gradients are scattered with every micro-batch, and what is reduced once per step are shards."""
        return any(one.waits_one_behind for one in started_transfers(self.works.unit_work(unit, FULL_BACKWARD)))

    def start_step_reductions(self, unit: str, works: Sequence[TimedInstruction]) -> list[TimedInstruction]:
        """A unit's work, with collectives of the step started after the last kernel that makes their payload."""
        found = list(works)
        if self.scatters_gradients(unit) or self.reduces_after:
            return found
        for one in self.reduced(unit):
            makers = [
                n
                for n, k in enumerate(found)
                if isinstance(k, TimedKernel) and not set(k.results).isdisjoint(one.carries)
            ]
            found.insert(makers[-1] + 1 if makers else 0, start_transfer(one))
        return found

    def late_reductions(self, stage: VirtualStage) -> Iterator[Transfer]:
        """The collectives that sum gradients which rest whole, where they wait for the end of the backward pass."""
        own = (
            *(unit for unit in stage.units[::-1] if unit not in stage.borrowed_units),
            *self.units_without_passes(stage),
        )
        for unit in own if self.reduces_after else ():
            if not self.scatters_gradients(unit):
                yield from self.reduced(unit)

    def shard_reductions(self, stage: VirtualStage) -> Iterator[Transfer]:
        """The collectives that sum scattered gradients over replicas, once per step."""
        return (one for unit in stage.owned_units if self.scatters_gradients(unit) for one in self.reduced(unit))

    @staticmethod
    def mirror_exchanges(stage: VirtualStage) -> Iterator[Transfer]:
        """Gradients exchanged with the rank that has a copy of the weights."""
        if stage.exchange_s:
            yield Transfer(seconds=stage.exchange_s, axis="pp", unit="embedding", name="all_reduce of both copies")

    def convention_order(
        self, passes: Sequence[StagePass], overlap: str, hideable: Container[str] = HIDEABLE
    ) -> list[TimedInstruction]:
        """One pass, or several that run concurrently, by a convention."""
        found = [work for one in passes for works in self.units(one.stage, one.kind) for work in works]
        found += [start_transfer(moved) for one in passes for moved in self._convention_transfers(one)]
        return with_host_copy(_arrange_by_convention(found, overlap, hideable), max(one.stage.host_s for one in passes))

    def _convention_transfers(self, one: StagePass) -> Iterator[Transfer]:
        """What a convention counts in a pass apart from its own list."""
        message_s = self.works.message_s() if one.kind != BACKWARD_WEIGHT and self.works.pricing.layout.pp > 1 else 0.0
        if message_s:
            yield Transfer(seconds=message_s, axis="pp", unit="carry", name="send_recv x")
        for unit in one.stage.owned_units:
            for moved in started_transfers(self.works.unit_work(unit, UPDATE)):
                if one.first if moved.role == GATHER else one.last:
                    yield replace(moved)
        yield from self.mirror_exchanges(one.stage) if one.last else ()

    def update(self, stages: Iterable[VirtualStage], overlap: str, stream_s: float) -> list[TimedInstruction]:
        """The update of a rank's stages, beside which the optimizer's state goes through the device in `stream_s`.

        By a convention all that moves counts elsewhere.
        """
        stages = list(stages)
        owned = [unit for stage in stages for unit in stage.owned_units][::-1]
        works = [
            work
            for unit in owned
            for work in copy_with_new_transfers(_without_roles(self.works.unit_work(unit, UPDATE), (GRADIENT,)))
        ]
        if overlap != LIST:
            return with_host_copy([work for work in works if isinstance(work, TimedKernel)], stream_s)
        control, others = [*_with_roles(works, (CONTROL,))], [*_without_roles(works, (CONTROL,))]
        waits = [work for work in others if isinstance(work, WaitTransfer)]
        exchanged = [
            work
            for stage in stages
            for one in self.mirror_exchanges(stage)
            for work in (start_transfer(one), WaitTransfer(one))
        ]
        own = [work for work in others if not isinstance(work, WaitTransfer)]
        return with_host_copy([*exchanged, *control, *own, *waits], stream_s)


def _arrange_by_convention(
    works: Iterable[TimedInstruction], overlap: str, hideable: Container[str]
) -> list[TimedInstruction]:
    """Kernels one after the other; what hides beside all of them, and behind them what does not."""
    kernels: list[TimedInstruction] = []
    hidden: list[StartTransfer] = []
    exposed: list[StartTransfer] = []
    for work in works:
        if isinstance(work, TimedKernel):
            kernels.append(work)
        elif isinstance(work, StartTransfer) and work.transfer.exposed_s:
            own = replace(work.transfer, seconds=work.transfer.exposed_s, chunked_kernels_s=0.0)
            stream = CONVENTION_STREAMS[overlap](own.axis, hideable)
            (exposed if stream is None else hidden).append(StartTransfer(own, stream or own.axis))
    waits = [WaitTransfer(one.transfer) for one in hidden]
    return [*hidden, *kernels, *waits, *(work for one in exposed for work in (one, WaitTransfer(one.transfer)))]


def with_host_copy(works: Sequence[TimedInstruction], host_s: float) -> list[TimedInstruction]:
    """The same with copies to or from the host beside all of it."""
    if not host_s:
        return list(works)
    copy = Transfer(seconds=host_s, axis=HOST, unit=HOST, name="copy")
    return [start_transfer(copy), *works, WaitTransfer(copy)]


def _prefetch_gathers(units: Sequence[Sequence[TimedInstruction]]) -> Iterator[TimedInstruction]:
    """The work of units one after the other, with the weights of each gathered as the one before begins."""
    gathers = [
        [work for work in works if isinstance(work, StartTransfer) and work.transfer.role == GATHER] for works in units
    ]
    yield from gathers[0] if gathers else ()
    for works, following in zip(units, [*gathers[1:], []], strict=True):
        yield from following
        yield from (work for work in works if not (isinstance(work, StartTransfer) and work.transfer.role == GATHER))


def _delay_scatter_waits(works: Iterable[TimedInstruction]) -> Iterator[TimedInstruction]:
    """The same, with gradients that are scattered waited for when the next ones leave, and all others at the end."""
    waiting: list[WaitTransfer] = []
    for work in works:
        if isinstance(work, WaitTransfer) and work.transfer.role == GRADIENT:
            waiting.append(work)
            continue
        if isinstance(work, StartTransfer) and work.transfer.waits_one_behind:
            yield from (one for one in waiting if one.transfer.waits_one_behind)
            waiting = [one for one in waiting if not one.transfer.waits_one_behind]
        yield work
    yield from waiting


def _with_roles(works: Iterable[TimedInstruction], roles: Container[str]) -> Iterator[TimedInstruction]:
    return (work for work in works if not isinstance(work, TimedKernel) and work.transfer.role in roles)


def _without_roles(works: Iterable[TimedInstruction], roles: Container[str]) -> Iterator[TimedInstruction]:
    return (work for work in works if isinstance(work, TimedKernel) or work.transfer.role not in roles)
