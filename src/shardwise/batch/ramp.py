"""The global batch of each step, and the samples before it: arithmetic on the step's number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwise.errors import InputError
from shardwise.units import parse_count


@dataclass(frozen=True, slots=True)
class BatchRamp:
    """Sequences of the global batch: `((0, 64), (1000, 128))` is 64 from step 0 and 128 from step 1000 on."""

    values: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.values]
        if not steps or steps[0] != 0 or any(b <= a for a, b in pairwise(steps)):
            raise InputError(f"batch: found a ramp from steps {steps}; steps that start at 0 and grow are required")
        if any(sequences < 1 for _, sequences in self.values):
            raise InputError(f"batch: found {self.values}; at least one sequence in each batch is required")

    def sequences(self, step: int) -> int:
        """Sequences of the global batch of a step."""
        return next(sequences for start, sequences in reversed(self.values) if start <= step)

    def first_sample(self, step: int) -> int:
        """Samples of all steps before this one: the number of its first."""
        if step < 0:
            raise InputError(f"step: found {step}; a step of at least 0 is required")
        stops = [start for start, _ in self.values[1:]]
        spans = zip(self.values, [*stops, step], strict=True)
        return sum(max(min(stop, step) - start, 0) * sequences for (start, sequences), stop in spans)

    def until(self, step: int) -> BatchRamp:
        """The ramp without the changes behind `step`.

        >>> BatchRamp(((0, 64), (1000, 128), (2000, 256))).until(1000)
        BatchRamp(values=((0, 64), (1000, 128)))
        """
        return BatchRamp(tuple(value for value in self.values if value[0] <= step))

    def then(self, step: int, sequences: int) -> BatchRamp:
        """The same steps before `step`, and from it on batches of so many sequences.

        >>> BatchRamp(((0, 64), (1000, 128))).then(500, 96)
        BatchRamp(values=((0, 64), (500, 96)))
        """
        kept = tuple(value for value in self.values if value[0] < step)
        changes = not kept or kept[-1][1] != sequences
        return BatchRamp((*kept, (step, sequences)) if changes else kept)


def parse_ramp(text: str, what: str) -> tuple[tuple[int, int], ...]:
    """Steps and the sequences of the batch from each on. Raises `InputError`.

    >>> parse_ramp("0:64,1000:128", "batch_ramp")
    ((0, 64), (1000, 128))
    """
    pairs: Sequence[tuple[str, str, str]] = [part.partition(":") for part in text.split(",") if part.strip()]
    if not all(colon for _, colon, _ in pairs):
        raise InputError(f"{what}: found {text!r}; STEP:SEQUENCES,... is required, such as 0:64,1000:128")
    return tuple(
        (parse_count(step, what=what, least=0), parse_count(sequences, what=what)) for step, _, sequences in pairs
    )
