"""Verdict on memory: whether what a layout takes fits in a device, in three values.

A price of memory has an error. Where a device has less than `TIGHT_MARGIN` of its memory left, the price leaves the answer
open, and the verdict is "tight".
"""

from __future__ import annotations

from typing import Literal, get_args

MemoryVerdict = Literal["fits", "tight", "does not fit"]
MEMORY_VERDICTS: tuple[MemoryVerdict, ...] = get_args(MemoryVerdict)
# Share of a device's memory below which the answer is open. Source: a twentieth of 159 published peaks is more than 8.9% above
# the price (docs/accuracy.md); a study of the same runs takes 10% of allocated memory as the rule for running out of it, 15%
# of reserved. Above the whole memory the answer is no: allocated bytes are over-predicted by 4.4% at most (30 runs), and an
# allocator keeps 5% besides (`SLACK` of published runs).
TIGHT_MARGIN = 0.10


def memory_verdict(memory_bytes: float, capacity_bytes: float) -> MemoryVerdict:
    """Return the verdict on bytes of a device of so much memory.

    >>> [memory_verdict(predicted, 100e9) for predicted in (90e9, 95e9, 101e9)]
    ['fits', 'tight', 'does not fit']
    """
    if memory_bytes > capacity_bytes:
        return "does not fit"
    return "fits" if memory_bytes <= capacity_bytes * (1.0 - TIGHT_MARGIN) else "tight"


def describe_margin(margin: float, verdict: MemoryVerdict) -> str:
    """Return a verdict with the share of the memory that is free, or missing.

    >>> describe_margin(0.25, "fits"), describe_margin(0.04, "tight"), describe_margin(-0.5, "does not fit")
    ('fits, 25% free', 'TIGHT, 4.0% free of the 10% that predictions need', 'DOES NOT FIT, 50% too much')
    """
    match verdict:
        case "fits":
            return f"fits, {margin:.0%} free"
        case "tight":
            return f"TIGHT, {margin:.1%} free of the {TIGHT_MARGIN:.0%} that predictions need"
        case _:
            return f"DOES NOT FIT, {-margin:.0%} too much"


def tight_memory_note(margin: float) -> str:
    """Return the caveat of an estimate whose memory is tight."""
    return (
        f"memory is tight: {margin:.1%} of a device is free, and predictions of memory are off by up to {TIGHT_MARGIN:.0%}; "
        "the run may run out of memory"
    )
