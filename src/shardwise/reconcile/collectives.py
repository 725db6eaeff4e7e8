"""The collectives of a step: those that the layout is realised with, against those that were really issued."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shardwise.planning.plan import Plan
from shardwise.sharding.collective import ROWS, Issued
from shardwise.train.issued import comparable, instance_of
from shardwise.train.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Miscounted:
    """A collective that was not issued as often as realised."""

    issued: Issued
    planned: int
    found: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """How many were planned and issued, the payload in bytes of both by axes, and what differs. With `uneven` rows of experts
    their bytes were not compared."""

    planned: int
    found: int
    planned_bytes: dict[str, int]
    found_bytes: dict[str, int]
    miscounted: tuple[Miscounted, ...]
    uneven: bool = False

    @property
    def equal(self) -> bool:
        return not self.miscounted


def collectives(
    plan: Plan, recipe: Recipe, num_tokens: int, seen: Counter[Issued], *, even: bool = False, pp_rank: int = 0
) -> Collectives:
    """Compare kind, axes, format, bytes and count for a step of `num_tokens`; bytes of experts' rows where these are `even`.

    `pp_rank`: the place along `pp` of the rank that was seen.
    """
    layout = plan.layout
    num_seqs = num_tokens // plan.job.seq_len
    num_micro_batches = -(-num_seqs // (layout.num_replicas * layout.micro_batch_seqs))
    return compared(instance_of(plan, recipe).at(pp_rank).issued(num_micro_batches), seen, even=even)


def compared(planned: Counter[Issued], seen: Counter[Issued], *, even: bool = False) -> Collectives:
    """The two lists, one held against the other (`comparable`)."""
    wanted, found = comparable(planned, seen, even=even)
    return Collectives(
        planned=planned.total(), found=seen.total(), planned_bytes=_bytes(planned), found_bytes=_bytes(seen),
        miscounted=tuple(
            Miscounted(issued=one, planned=wanted[one], found=found[one])
            for one in sorted({*wanted, *found})
            if wanted[one] != found[one]
        ),
        uneven=not even and any(one.what == ROWS for one in planned),
    )  # fmt: skip


def _bytes(counts: Counter[Issued]) -> dict[str, int]:
    """Payload by axes, such as "dp" or "dp, fsdp"."""
    found: dict[str, int] = {}
    for one, count in sorted(counts.items()):
        axes = ", ".join(one.axes)
        found[axes] = found.get(axes, 0) + count * one.num_bytes
    return found
