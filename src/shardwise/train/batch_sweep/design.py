"""What a sweep over batches runs next: arithmetic on what it has run, so that it may stop and go on at any place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.batch.learning_rate import square_root_learning_rate
from shardwise.batch.runs import NOT_REACHED, BatchRun
from shardwise.errors import require

FACTOR = 2.0  # between neighbouring learning rates: the best is at most its root from one of them
FARTHEST = 3  # of these from the square-root rule's: 1/8 to 8 times


@dataclass(frozen=True, slots=True)
class Trial:
    """A run that is to be made, and the most steps of it: those after which it is of no use."""

    batch_tokens: int
    learning_rate: float
    seed: int
    most_steps: int

    @property
    def name(self) -> str:
        """That of its folder."""
        return f"batch-{self.batch_tokens}-rate-{self.learning_rate:.3g}-seed-{self.seed}"

    @property
    def key(self) -> tuple[int, float, int]:
        """What tells it from all others of its sweep."""
        return self.batch_tokens, self.learning_rate, self.seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Batches in tokens, each run to a loss with `num_seeds` seeds at the learning rate that reaches it in the fewest steps.

    The rate is looked for with the first seed: among `learning_rates`, or, where there are none, at and around the square-root
    rule's, which is `learning_rate` at a batch of `plan_batch_tokens`: both neighbours (half and double) of the best are tried,
    until the best lies between them. A rate that needs more steps than the best so far is stopped there. Raises `InputError`.
    """

    batches: tuple[int, ...]
    plan_batch_tokens: int
    learning_rate: float
    learning_rates: tuple[float, ...] = ()
    num_seeds: int = 3
    first_seed: int = 0
    most_steps: int = 10_000

    def __post_init__(self) -> None:
        wrong = [rate for rate in (self.learning_rate, *self.learning_rates) if not 0 < rate < math.inf]
        require([f"learning rate: found {rate:g}; a number above 0 is required" for rate in wrong])

    @property
    def seeds(self) -> range:
        """The seeds that each batch is run with."""
        return range(self.first_seed, self.first_seed + self.num_seeds)

    def next_trials(self, runs: Sequence[BatchRun]) -> Iterator[Trial]:
        """The runs that may be made now, those of the smallest batches, which take the most steps, first."""
        for batch in sorted(self.batches):
            yield from self._of_batch(batch, [run for run in runs if run.batch_tokens == batch])

    def _of_batch(self, batch: int, runs: Sequence[BatchRun]) -> Iterator[Trial]:
        tuned = [run for run in runs if run.seed == self.first_seed]
        best = min((run for run in tuned if run.steps is not None), key=lambda run: run.steps or 0.0, default=None)
        rates = [rate for rate in self._rates(batch, tuned, best) if rate not in [run.learning_rate for run in tuned]]
        most = self.most_steps if best is None or best.steps is None else min(math.ceil(best.steps), self.most_steps)
        yield from (Trial(batch, rate, self.first_seed, most) for rate in rates)
        if best is not None and best.learning_rate is not None and not rates:
            done = [run.seed for run in runs if run.learning_rate == best.learning_rate]
            for seed in self.seeds:
                if seed not in done:
                    yield Trial(batch, best.learning_rate, seed, self.most_steps)

    def _rates(self, batch: int, tuned: Sequence[BatchRun], best: BatchRun | None) -> Sequence[float]:
        """The learning rates of a batch that have to be known before the best of them counts."""
        if self.learning_rates:
            return self.learning_rates
        middle = square_root_learning_rate(self.learning_rate, self.plan_batch_tokens, batch)
        grid = [middle * FACTOR**power for power in range(-FARTHEST, FARTHEST + 1)]
        if not tuned:
            return [middle]
        tried = [grid.index(run.learning_rate) for run in tuned if run.learning_rate in grid]
        if best is not None:
            at = grid.index(best.learning_rate) if best.learning_rate in grid else FARTHEST
            near = [at - 1, at + 1]
        else:  # too high where one has failed, too low where all have run to their end
            near = [min(tried) - 1] if any(run.failed != NOT_REACHED for run in tuned) else [max(tried) + 1]
        return [grid[place] for place in near if 0 <= place < len(grid)]
