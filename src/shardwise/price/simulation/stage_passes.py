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

from shardwise.pipeline.actions import BACKWARD, FORWARD, WEIGHT
from shardwise.price.overlap import HIDEABLE
from shardwise.price.simulation.streams import HOST, Await, Begin, Kernel, Transfer, Work, again, begun, transfers
from shardwise.price.simulation.timed_instructions import Stage, UnitWorks
from shardwise.step.instructions import CONTROL, GATHER, GRADIENT, UPDATE

LIST = "list"  # starts and waits as in the list
LINKS = "links"  # the single stream of all communication that adds up
# By a convention of overlap the stream on which the traffic of an axis runs beside the whole pass; None: behind its kernels,
# where nothing hides it. `none` is what an engine does whose collectives are waited for where they start.
CONVENTIONS: Mapping[str, Callable[[str, Container[str]], str | None]] = {
    "sum": lambda axis, hideable: LINKS,
    "max": lambda axis, hideable: axis,
    "per_axis": lambda axis, hideable: LINKS if axis in hideable else None,
    "none": lambda axis, hideable: None,
}
OVERLAPS = (LIST, *CONVENTIONS)


class Pass(NamedTuple):
    """A pass through a stage; whether it is the rank's `first` one forward, or the `last` that gives gradients."""

    stage: Stage
    kind: str
    first: bool = False
    last: bool = False


class Passes:
    """The lists of the passes of one layout."""

    def __init__(self, works: UnitWorks, *, reduces_after: bool) -> None:
        self.works, self.reduces_after = works, reduces_after

    def listed(self, stage: Stage, kind: str, *, last: bool) -> list[Work]:
        """A pass as an engine runs it; in the `last` one, collectives of the step start and are not waited for."""
        found = beside([*_behind_one(_gathered_ahead(self.units(stage, kind, last=last)))], stage.host_s)
        return (
            [*found, *(begun(replace(one)) for one in (*self.of_shards(stage), *self.behind(stage)))] if last else found
        )

    def units(self, stage: Stage, kind: str, *, last: bool = False) -> list[list[Work]]:
        """The work of each unit, in the order of the pass; in the `last` one with what is reduced once per step."""
        order = stage.units if kind == FORWARD else stage.units[::-1]
        found = []
        for unit in order:
            works = self.works.of(unit, kind)
            if unit in stage.used and kind != FORWARD:
                works = tuple(_without(works, (GATHER, GRADIENT)))
            found.append(again(self.sending(unit, works) if last and unit not in stage.used else works))
        for unit in self.lent(stage) if kind != FORWARD else ():
            own = _only(self.works.of(unit, kind), (GATHER, GRADIENT))
            found.append(again([*own, *(self.sending(unit, ()) if last else ())]))
        return found

    @staticmethod
    def lent(stage: Stage) -> tuple[str, ...]:
        """Units that the rank owns and that no micro-batch passes through."""
        return tuple(unit for unit in stage.owned if unit in ("embedding", "untied") and unit not in stage.units)

    def reduced(self, unit: str) -> Iterator[Transfer]:
        """The collectives that sum a unit's gradients once per step."""
        return (one for one in transfers(self.works.of(unit, UPDATE)) if one.role == GRADIENT)

    def scatters(self, unit: str) -> bool:
        """Whether a unit's gradients are scattered with every micro-batch, and what is reduced once per step are shards."""
        return any(one.one_behind for one in transfers(self.works.of(unit, BACKWARD)))

    def sending(self, unit: str, works: Sequence[Work]) -> list[Work]:
        """A unit's work, with collectives of the step started after the last kernel that makes their payload."""
        found = list(works)
        if self.scatters(unit) or self.reduces_after:
            return found
        for one in self.reduced(unit):
            makers = [
                n for n, k in enumerate(found) if isinstance(k, Kernel) and not set(k.results).isdisjoint(one.carries)
            ]
            found.insert(makers[-1] + 1 if makers else 0, begun(one))
        return found

    def behind(self, stage: Stage) -> Iterator[Transfer]:
        """The collectives that sum gradients which rest whole, where they wait for the end of the backward pass."""
        own = (*(unit for unit in stage.units[::-1] if unit not in stage.used), *self.lent(stage))
        for unit in own if self.reduces_after else ():
            if not self.scatters(unit):
                yield from self.reduced(unit)

    def of_shards(self, stage: Stage) -> Iterator[Transfer]:
        """The collectives that sum scattered gradients over replicas, once per step."""
        return (one for unit in stage.owned if self.scatters(unit) for one in self.reduced(unit))

    @staticmethod
    def exchanged(stage: Stage) -> Iterator[Transfer]:
        """Gradients exchanged with the rank that has a copy of the weights."""
        if stage.exchange_s:
            yield Transfer(seconds=stage.exchange_s, axis="pp", unit="embedding", name="all_reduce of both copies")

    def by_convention(self, passes: Sequence[Pass], overlap: str, hideable: Container[str] = HIDEABLE) -> list[Work]:
        """One pass, or several that run concurrently, by a convention."""
        found = [work for one in passes for works in self.units(one.stage, one.kind) for work in works]
        found += [begun(moved) for one in passes for moved in self._moved_beside(one)]
        return beside(_arranged(found, overlap, hideable), max(one.stage.host_s for one in passes))

    def _moved_beside(self, one: Pass) -> Iterator[Transfer]:
        """What a convention counts in a pass apart from its own list."""
        message_s = self.works.message_s() if one.kind != WEIGHT and self.works.pricing.layout.pp > 1 else 0.0
        if message_s:
            yield Transfer(seconds=message_s, axis="pp", unit="carry", name="send_recv x")
        for unit in one.stage.owned:
            for moved in transfers(self.works.of(unit, UPDATE)):
                if one.first if moved.role == GATHER else one.last:
                    yield replace(moved)
        yield from self.exchanged(one.stage) if one.last else ()

    def update(self, stages: Iterable[Stage], overlap: str, stream_s: float) -> list[Work]:
        """The update of a rank's stages, beside which the optimizer's state goes through the device in `stream_s`.

        By a convention all that moves counts elsewhere.
        """
        stages = list(stages)
        owned = [unit for stage in stages for unit in stage.owned][::-1]
        works = [work for unit in owned for work in again(_without(self.works.of(unit, UPDATE), (GRADIENT,)))]
        if overlap != LIST:
            return beside([work for work in works if isinstance(work, Kernel)], stream_s)
        control, others = [*_only(works, (CONTROL,))], [*_without(works, (CONTROL,))]
        waits = [work for work in others if isinstance(work, Await)]
        exchanged = [work for stage in stages for one in self.exchanged(stage) for work in (begun(one), Await(one))]
        own = [work for work in others if not isinstance(work, Await)]
        return beside([*exchanged, *control, *own, *waits], stream_s)


def _arranged(works: Iterable[Work], overlap: str, hideable: Container[str]) -> list[Work]:
    """Kernels one after the other; what hides beside all of them, and behind them what does not."""
    kernels: list[Work] = []
    hidden: list[Begin] = []
    exposed: list[Begin] = []
    for work in works:
        if isinstance(work, Kernel):
            kernels.append(work)
        elif isinstance(work, Begin) and work.transfer.exposed_s:
            own = replace(work.transfer, seconds=work.transfer.exposed_s, beside_s=0.0)
            stream = CONVENTIONS[overlap](own.axis, hideable)
            (exposed if stream is None else hidden).append(Begin(own, stream or own.axis))
    waits = [Await(one.transfer) for one in hidden]
    return [*hidden, *kernels, *waits, *(work for one in exposed for work in (one, Await(one.transfer)))]


def beside(works: Sequence[Work], host_s: float) -> list[Work]:
    """The same with copies to or from the host beside all of it."""
    if not host_s:
        return list(works)
    copy = Transfer(seconds=host_s, axis=HOST, unit=HOST, name="copy")
    return [begun(copy), *works, Await(copy)]


def _gathered_ahead(units: Sequence[Sequence[Work]]) -> Iterator[Work]:
    """The work of units one after the other, with the weights of each gathered as the one before begins."""
    gathers = [[work for work in works if isinstance(work, Begin) and work.transfer.role == GATHER] for works in units]
    yield from gathers[0] if gathers else ()
    for works, following in zip(units, [*gathers[1:], []], strict=True):
        yield from following
        yield from (work for work in works if not (isinstance(work, Begin) and work.transfer.role == GATHER))


def _behind_one(works: Iterable[Work]) -> Iterator[Work]:
    """The same, with gradients that are scattered waited for when the next ones leave, and all others at the end."""
    waiting: list[Await] = []
    for work in works:
        if isinstance(work, Await) and work.transfer.role == GRADIENT:
            waiting.append(work)
            continue
        if isinstance(work, Begin) and work.transfer.one_behind:
            yield from (one for one in waiting if one.transfer.one_behind)
            waiting = [one for one in waiting if not one.transfer.one_behind]
        yield work
    yield from waiting


def _only(works: Iterable[Work], roles: Container[str]) -> Iterator[Work]:
    return (work for work in works if not isinstance(work, Kernel) and work.transfer.role in roles)


def _without(works: Iterable[Work], roles: Container[str]) -> Iterator[Work]:
    return (work for work in works if isinstance(work, Kernel) or work.transfer.role not in roles)
