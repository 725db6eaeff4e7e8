"""From what a row says about its software to a stack, and the facts about it that its constants do not know."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from shardwise.calibrate.published_runs.facts import Facts
from shardwise.cluster.calibration import Calibration
from shardwise.cluster.chip import Chip
from shardwise.cluster.stacks import Stack, calibration_of, stack_of_software


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The stack of a row, whether its attention keeps its scores on the chip, whether the host waits for the router's
    counts, and the sustained clock over the chip's usual one."""

    stack: Stack
    fused_attention: bool
    synchronises: bool
    clock: float

    def calibration(self, chip: Chip) -> Calibration:
        """What published runs say about the chip under this software."""
        return self.stated(calibration_of(chip.name, self.stack))

    def stated(self, calibration: Calibration) -> Calibration:
        """A calibration with what the row states."""
        return replace(
            calibration, clock=self.clock, fused_attention=self.fused_attention, synchronises=self.synchronises
        )


def software_of(facts: Facts, clock: float) -> Software:
    """The software of a row. Where tokens over a capacity are dropped, the host knows all sizes beforehand."""
    stack = stack_of_software(facts.text("software"))
    stated, routing = facts.flag("flash_attn"), facts.text("model") + facts.text("notes")
    return Software(
        stack=stack, fused_attention=not stack.unfused_attention if stated is None else stated,
        synchronises=not re.search(r"token-?drop|capacity", routing), clock=clock,
    )  # fmt: skip
