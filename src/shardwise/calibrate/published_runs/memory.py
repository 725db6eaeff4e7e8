"""From an estimate's terms to what an instrument reads: few constants, one row for each kind of instrument.

An estimate is what a device must hold, with what the runtime takes. A counter of allocated bytes does not see the runtime; one
of reserved bytes sees what the caching allocator keeps besides; the driver sees all of a process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from shardwise.loss import loss_named

# Part of what tensors take that a caching allocator keeps besides, in segments that hold none. Source: PyTorch, CUDA memory
# management, says why; the part is that of torchtitan's reserved bytes (arXiv 2410.06511, tables 1 to 5) over what tensors take.
SLACK = 0.05
# A process beside its allocator: 1.6 GB of context and kernels (BigScience, chronicles-prequel.md: 1,573 MiB on an A100), and
# what NCCL takes for the rings and channels of the groups of a layout with tp, pp and dp, the rest of BigScience's readings.
PROCESS_BYTES = 7e9


class Instrument(NamedTuple):
    """What is read beside tensors: a part of them, and bytes in place of the runtime's (None: these)."""

    name: str
    words: str  # in a row's note about its memory column
    slack: float
    fixed_bytes: float | None


# In the order in which they are looked for. Liger's figures are ml-engineering's, of reserved bytes.
INSTRUMENTS = (
    Instrument("allocated", r"alloc", 0.0, 0.0),
    Instrument("reserved", r"reserved|liger", SLACK, 0.0),
    Instrument("nvidia-smi", r"nvidia-smi", SLACK, PROCESS_BYTES),
    Instrument("not stated", r"", 0.0, None),
)


def instrument_of(text: str) -> Instrument:
    """The instrument of a row, by its note about its memory column."""
    return next(one for one in INSTRUMENTS if re.search(one.words, text.lower()))


def read_bytes(terms: Mapping[str, float], loss: str, text: str) -> float:
    """Bytes that a row's instrument reads where an estimate has these terms, priced with a kind of loss.

    A peak that was taken with another kind of loss than the step time says so.
    """
    found = instrument_of(text)
    held = sum(value for term, value in terms.items() if term != "runtime")
    if "with liger" in text.lower():
        held -= terms["logits"] * (1 - loss_named("chunked").bytes_per_logit / loss_named(loss).bytes_per_logit)
    fixed = terms["runtime"] if found.fixed_bytes is None else found.fixed_bytes
    return held * (1 + found.slack) + fixed
