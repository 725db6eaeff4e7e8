"""The work of a rank, in order, with seconds: kernels, transfers where they start, and where they are waited for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

HOST = "host"  # the axis of copies to and from the host
ACTIVATION, GATHER, GRADIENT, CONTROL = "activation", "weight", "gradient", "control"  # what a transfer is for


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel of a unit on the compute stream; `results` are the tensors that it makes."""

    seconds: float
    unit: str
    phase: str
    name: str
    results: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfer:
    """A collective, or a copy to or from the host, charged to an axis; each is one of its own.

    `carries`: the tensors that it moves. `beside_s`: of one that runs in pieces beside kernels, the seconds of these.
    `one_behind`: it is waited for when the next one of its kind begins.
    """

    seconds: float
    axis: str
    unit: str
    name: str
    role: str = ACTIVATION
    carries: tuple[str, ...] = ()
    beside_s: float = 0.0
    one_behind: bool = False

    @property
    def exposed_s(self) -> float:
        """The rest of it after the kernels that it overlaps with."""
        return max(self.seconds - self.beside_s, 0.0)


@dataclass(frozen=True, slots=True)
class Begin:
    """A transfer starts when its stream is free and its payload is ready."""

    transfer: Transfer
    stream: str


@dataclass(frozen=True, slots=True)
class Await:
    """Later work on the compute stream waits for a transfer."""

    transfer: Transfer


Work = Kernel | Begin | Await


def begun(transfer: Transfer) -> Begin:
    """Its start, on the stream of its axis."""
    return Begin(transfer, transfer.axis)


def transfers(works: Iterable[Work]) -> Iterator[Transfer]:
    """Those that begin, in order."""
    return (one.transfer for one in works if isinstance(one, Begin))


def again(works: Iterable[Work]) -> list[Work]:
    """The same once more, with transfers of its own."""
    own: dict[Transfer, Transfer] = {}
    found: list[Work] = []
    for one in works:
        match one:
            case Kernel():
                found.append(one)
            case Begin():
                own[one.transfer] = replace(one.transfer)
                found.append(Begin(own[one.transfer], one.stream))
            case Await():
                found.append(Await(own[one.transfer]))
    return found
