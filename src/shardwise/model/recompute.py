"""Recompute policies: whose results the forward pass keeps for the backward pass. One table; layouts, search and help read it.

A policy is asked about each operation of a block. What it does not keep is rebuilt from what it does keep, by the least
slice of the forward pass (`model/backward.py`); a block's input and its weights are always there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.model.operations import Operation


@dataclass(frozen=True, slots=True)
class Policy:
    """`keeps` says whether the results of an operation may be kept; `summary` says it to people."""

    summary: str
    keeps: Callable[[Operation], bool]


def _hands_over(operation: Operation) -> bool:
    return getattr(operation, "function", "") == "handover"


# From the policy that keeps most to the one that keeps least.
POLICIES: dict[str, Policy] = {
    "none": Policy("keep whatever the backward pass reads", lambda operation: True),
    # S0: "big matmuls only". Tokens that went to their experts or came back are kept too, as their AllToAll costs more
    # than their bytes.
    "selective": Policy(
        "keep the results of matrix products and of attention, rebuild what is elementwise",
        lambda operation: operation.kind in ("contract", "scan") or _hands_over(operation),
    ),
    # S0: "block remat"
    "full": Policy("keep a block's input alone, run the block again", lambda operation: False),
}
