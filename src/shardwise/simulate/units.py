"""The instructions of a unit as work with seconds, the same that the unit's price consists of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from shardwise.cost.counts import KEPT
from shardwise.cost.instructions import InstructionPricer
from shardwise.cost.pricing import Pricing
from shardwise.cost.unit_costs import ActivationCost, StateCost
from shardwise.cost.unit_parts import Parts, charged_to
from shardwise.derive.derivation import Unit
from shardwise.lowering.instruction import Instruction, Launch, Start, Wait
from shardwise.lowering.kernels import Kernel as Launched
from shardwise.lowering.stages import of_kind
from shardwise.lowering.template import carried
from shardwise.lowering.traffic import Traffic
from shardwise.model.program import Role
from shardwise.schedule.action import WEIGHT
from shardwise.sharding.collective import Kind
from shardwise.simulate.work import ACTIVATION, CONTROL, GATHER, GRADIENT, Await, Kernel, Transfer, Work, begun

UPDATE = "update"  # beside the kinds of passes (`schedule.action`)
ROLES = {Role.WEIGHT: GATHER, Role.WEIGHT_GRADIENT: GRADIENT}


class UnitWorks:
    """The work of units in passes of each kind, in one layout."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing, self.pricer = pricing, InstructionPricer(pricing)
        self._known: dict[tuple[str, str], tuple[Work, ...]] = {}

    @cached_property
    def costs(self) -> tuple[Mapping[str, ActivationCost], Mapping[str, StateCost]]:
        """The costs of the units, by name."""
        return self.pricing.unit_costs()

    def of(self, unit: str, kind: str) -> tuple[Work, ...]:
        """A unit's work in a pass of a kind, or in the update."""
        if (unit, kind) not in self._known:
            self._known[unit, kind] = tuple(self._works(unit, kind))
        return self._known[unit, kind]

    def _works(self, unit: str, kind: str) -> Iterator[Work]:
        template, parts = self.pricer.template(unit), self.pricer.parts(unit)
        own = unit.removeprefix(KEPT)
        listed = template.passes[UPDATE] if kind == UPDATE else of_kind(template, own, kind)
        host = _Host(self.pricer, parts, kind)
        pieces = _Pieces(self.pricer, parts, own, listed)
        started = ((one, self._transfer(template.unit, one, parts)) for one in _started(listed))
        moved = {id(one): transfer for one, transfer in started if transfer is not None}
        casts = set[str]()
        for one in listed:
            if isinstance(one, Launch):
                kernel = one.kernel
                if kernel.phase not in casts:
                    casts.add(kernel.phase)
                    yield from host.casts(own, kernel.phase)
                yield from pieces.before(kernel)
                yield Kernel(
                    seconds=self.pricer.kernel_s(kernel, parts) + host.gap_s(kernel.phase), unit=own, phase=kernel.phase,
                    name=kernel.name, results=kernel.outputs,
                )  # fmt: skip
                yield from pieces.behind(kernel)
            elif isinstance(one, (Start, Wait)) and id(one.traffic) in moved:
                transfer = moved[id(one.traffic)]
                yield begun(transfer) if isinstance(one, Start) else Await(transfer)
        yield from pieces.without_kernels()

    def _transfer(self, unit: Unit, traffic: Traffic, parts: Parts) -> Transfer | None:
        """A collective; none where nothing moves, or where it runs in pieces."""
        seconds = 0.0 if traffic.beside else self.pricer.collective_s(traffic, parts)
        if seconds == 0.0:
            return None
        return Transfer(
            seconds=seconds, axis=charged_to(traffic), unit=unit.name, name=traffic.name,
            role=CONTROL if traffic.is_control else ROLES.get(traffic.role, ACTIVATION),
            carries=carried(unit, traffic),
            one_behind=traffic.kind is Kind.REDUCE_SCATTER and traffic.scope == "micro_batch",
        )  # fmt: skip

    def message_s(self) -> float:
        """Seconds of a micro-batch's hidden state, or of its gradient, to the next stage."""
        return float(self.costs[0]["carry"].forward_traffic_s["pp"])


def _started(listed: Iterable[Instruction]) -> Iterator[Traffic]:
    return (one.traffic for one in listed if isinstance(one, Start))


class _Host:
    """What a pass of a unit takes beside its kernels on the device: casts of what products take, and the host's launches.

    The seconds of the latter are shared out over the kernels of a phase. What is made in a weights' pass has been cast before.
    """

    def __init__(self, pricer: InstructionPricer, parts: Parts, kind: str) -> None:
        self.pricer, self.parts, self.kind = pricer, parts, kind
        self.known: dict[str, float] = {}

    def casts(self, unit: str, phase: str) -> Iterator[Kernel]:
        seconds = self.pricer.casts_s(self.parts, phase)
        if seconds and self.kind != WEIGHT:
            yield Kernel(seconds=seconds, unit=unit, phase=phase, name="cast")

    def gap_s(self, phase: str) -> float:
        if phase not in self.known:
            self.known[phase] = 0.0 if self.kind == UPDATE else self.pricer.gap_s(self.parts, phase)
        return self.known[phase]


class _Pieces:
    """Collectives that run in pieces beside kernels: with n pieces the first n-th of the kernels waits for nothing, or the last
    piece hides behind nothing. Those beside the same kernels begin with the first of these, and are waited for behind the last.
    """

    def __init__(self, pricer: InstructionPricer, parts: Parts, unit: str, listed: Iterable[Instruction]) -> None:
        together: dict[tuple[str, tuple[str, ...]], list[Traffic]] = {}
        for traffic in _started(listed):
            if traffic.beside:
                together.setdefault((traffic.phase, traffic.beside), []).append(traffic)
        self.first: dict[int, Transfer] = {}
        self.last: dict[int, Transfer] = {}
        self.unplaced: list[Transfer] = []
        for (phase, beside), moved in together.items():
            beside_them = [k for k in parts.kernels if k.phase == phase and not set(k.outputs).isdisjoint(beside)]
            compute_s = sum(pricer.kernel_s(kernel, parts) for kernel in beside_them)
            pieces = float(pricer.values.degree(moved[0].axes))
            traffic_s = sum(float(pricer.pricer.in_pieces_s(one, parts, pricer.values, pricer.links)) for one in moved)
            names = {kernel.outputs for kernel in beside_them}
            here = [k for one in listed if isinstance(one, Launch) and (k := one.kernel).outputs in names]
            if not traffic_s:
                continue
            transfer = Transfer(
                seconds=traffic_s + compute_s / pieces if here else traffic_s, axis=moved[0].group, unit=unit,
                name=f"{moved[0].name} in pieces", beside_s=compute_s if here else 0.0,
            )  # fmt: skip
            if here:
                self.first[id(here[0])], self.last[id(here[-1])] = transfer, transfer
            else:
                self.unplaced.append(transfer)

    def before(self, kernel: Launched) -> Iterator[Work]:
        if id(kernel) in self.first:
            yield begun(self.first[id(kernel)])

    def behind(self, kernel: Launched) -> Iterator[Work]:
        if id(kernel) in self.last:
            yield Await(self.last[id(kernel)])

    def without_kernels(self) -> Iterator[Work]:
        """Those whose kernels another pass has."""
        for one in self.unplaced:
            yield begun(one)
            yield Await(one)
