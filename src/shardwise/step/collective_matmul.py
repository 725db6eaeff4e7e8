"""What of a list of instructions runs as a ring of tensor parallelism: a collective with the products beside it, in one go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardwise.derive.sharded_program import Communicate, Compute
from shardwise.layout.sharding_scheme import TP
from shardwise.sharding.collectives import Kind
from shardwise.step.instructions import Held, Instruction, Launch, Slice, Start, Traffic


@dataclass(frozen=True, slots=True)
class InPieces:
    """Products that take the blocks of what is gathered, or make parts of the blocks of a sum; `terms` are what else is in the
    sum. `keeps`: what is gathered is read by others as well, so that its blocks are put together."""

    traffic: Traffic
    products: tuple[Compute, ...]
    terms: tuple[Held, ...] = ()
    keeps: bool = False

    @property
    def moved(self) -> Communicate:
        """The collective as it was derived."""
        (found,) = self.traffic.derived
        return found

    @property
    def gathers(self) -> bool:
        return self.traffic.kind is Kind.ALL_GATHER

    @property
    def ends(self) -> tuple[Held, Held]:
        """What moves, as it lies before and behind the collective."""
        moved = self.moved
        return Held(moved.tensor.name, moved.collective.before), Held(moved.tensor.name, moved.collective.after)

    @property
    def block(self) -> Held:
        """What a rank has of it."""
        return self.ends[0] if self.gathers else self.ends[1]

    @property
    def dim(self) -> str:
        """Along which blocks lie."""
        before, after = (held.spec for held in self.ends)
        return next(dim for dim in before.dims if before.axes_of(dim) != after.axes_of(dim))

    @property
    def reads(self) -> tuple[Held, ...]:
        """What it takes, each once: of what is gathered the rank's own block."""
        whole = self.ends[1] if self.gathers else None
        read = [held for step in self.products for held in operands_of(step) if held != whole]
        return tuple(dict.fromkeys([*([self.block] if self.gathers else []), *read, *self.terms]))

    @property
    def writes(self) -> tuple[Held, ...]:
        """What it makes."""
        if not self.gathers:
            return (self.block,)
        made = tuple(held for step in self.products for held in _written(step))
        return (*made, *([self.ends[1]] if self.keeps else []))


def with_rings(instructions: Iterable[Instruction]) -> Iterator[Instruction | InPieces]:
    """Instructions, each ring where the last of its products stood, or where the collective did of which they make parts."""
    listed = list(instructions)
    rings = [one.traffic for one in listed if isinstance(one, Start) and one.traffic.axes == TP and one.traffic.beside]
    ring_of = {result: ring for ring in rings for result in ring.beside}
    summing = {ring.tensors[0]: ring for ring in rings if ring.kind is not Kind.ALL_GATHER} | ring_of
    products: dict[int, list[Compute]] = {id(ring): [] for ring in rings}
    terms: dict[int, list[Held]] = {id(ring): [] for ring in rings}
    for one in listed:
        ring = summing.get(one.kernel.outputs[0]) if isinstance(one, Launch) else getattr(one, "traffic", None)
        if ring is None or id(ring) not in products:
            yield one
        elif isinstance(one, Launch):
            (step,) = one.kernel.steps
            if one.kernel.outputs[0] not in ring.beside:
                terms[id(ring)] = [held for held in operands_of(step) if held.name not in ring.beside]
                continue
            products[id(ring)].append(step)
            if ring.kind is Kind.ALL_GATHER and len(products[id(ring)]) == len(ring.beside):
                own = tuple(products[id(ring)])
                yield InPieces(ring, own, keeps=_is_read_by_others(listed, InPieces(ring, own)))
        elif isinstance(one, Start) and ring.kind is not Kind.ALL_GATHER:
            yield InPieces(ring, tuple(products[id(ring)]), tuple(terms[id(ring)]))


def _is_read_by_others(listed: Iterable[Instruction], ring: InPieces) -> bool:
    """Whether others read what a ring gathers."""
    whole, own = ring.ends[1], {id(step) for step in ring.products}
    for one in listed:
        if isinstance(one, Launch):
            if any(whole in operands_of(step) for step in one.kernel.steps if id(step) not in own):
                return True
        elif isinstance(one, Start | Slice):
            moved = one.traffic.derived if isinstance(one, Start) else (one.step,)
            if any(Held(step.tensor.name, step.collective.before) == whole for step in moved):
                return True
    return False


def operands_of(step: Compute) -> list[Held]:
    """What a step reads, as it lies."""
    return [Held(*one) for one in zip(step.operation.operands, step.placed.inputs, strict=False)]


def _written(step: Compute) -> list[Held]:
    return [Held(*one) for one in zip(step.operation.outputs, step.placed.outputs, strict=True)]
