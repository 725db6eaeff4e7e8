"""Contention of kernels and collectives: how many times as long a kernel takes while a transfer runs beside it.

They share the bandwidth of memory, power and, on GPUs, multiprocessors, of which NCCL's kernels take some. The constants of
stacks are fitted to whole steps, whose kernels were slowed already, so that a simulated step has no contention unless it is asked
for. A chip without an entry here has no published figure: its contention is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.values import InputError, argument_label, parse_at_least

NO_CONTENTION = 1.0
PUBLISHED = "published"  # in place of a number: the figure that is published for the chip


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedContention:
    """Published slowdown of kernels beside traffic on a chip: the average as a factor, the highest where it is stated, the
    source with its date, and what was measured."""

    factor: float
    highest: float | None
    meaning: str
    source: str


# "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning": 18.9% on average, at most 40.0%,
# over all of its GPUs; the abstract states none by GPU.
_OVERLAP_STUDY = PublishedContention(
    factor=1.189,
    highest=1.40,
    meaning="computation beside communication over computation alone, averaged over GPT and Llama models on 4 A100, H100, "
    "MI210 and MI250",
    source="Lee et al., 2025-07-03, arXiv 2507.03114, abstract",
)
_RESERVED_MULTIPROCESSORS = PublishedContention(
    factor=132 / (132 - 20),
    highest=None,
    meaning="20 of 132 multiprocessors run the kernels of communication: what kernels that fill all of them take on the rest; "
    "derived, not measured",
    source="DeepSeek-V3 Technical Report, 2024-12-27, arXiv 2412.19437, section 3.5.1",
)
CONTENTION_BY_CHIP: Mapping[str, PublishedContention] = {
    **dict.fromkeys(("a100-40gb", "a100-80gb", "h100"), _OVERLAP_STUDY), "h800": _RESERVED_MULTIPROCESSORS,
}  # fmt: skip


def parse_contention(text: float | str, chip: str) -> float:
    """Return the contention that a text asks for: a number of at least 1, or "published" for the figure of a chip.

    Raises `InputError` for another text, and for "published" where no figure is.

    >>> parse_contention("1.2", "tpu-v5p"), parse_contention("published", "h100")
    (1.2, 1.189)
    """
    label = argument_label("contention")
    if text != PUBLISHED:
        return parse_at_least(text, label=label, minimum=NO_CONTENTION)
    published = CONTENTION_BY_CHIP.get(chip)
    if published is None:
        raise InputError(
            f"{label}: found 'published', but no slowdown of kernels beside traffic is published for "
            f"{chip or 'a chip outside of the catalogue'}; a number of at least 1 is required, such as 1.2 "
            f"(figures: {', '.join(CONTENTION_BY_CHIP)})"
        )
    return published.factor
