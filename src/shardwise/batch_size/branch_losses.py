"""The critical batch from branches of a checkpoint: the largest batch that loses nothing against smaller ones.

A noise scale of gradients stands for the critical batch under assumptions (SGD, a Hessian that is a multiple of the identity).
Branches assume only that a batch which has caught up within a window of tokens stays level. Copies of a run go on from its
checkpoint over the same samples, each with its own batch and the learning rate that goes with it; then losses are compared.

A folder of branches has `branch.json`, the `BranchPoint`, and `branches.jsonl`, a line for each branch: {"batch_tokens",
"learning_rate", "steps", "loss", "held_out_loss", "failed"}; `loss` is null where the branch failed, `failed` null or the
reason.

Source: Merrill et al., Critical Batch Size Revisited, 2025 (arXiv 2505.23971), section 3.1.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.batch_size.json_rows import not_an_object_text, parse_json_lines, read_positive, read_required_text
from shardwise.values import FileMessages, InputError, argument_label, format_quantity, raise_problems, read_json

LOSS_TOLERANCE = 0.01  # nats, within which two losses count as the same: section 3.1 of the source
SMOOTHED_SHARE = 0.5  # of the window, at its end: what the smoothed loss is made of
MIN_STEPS = 16  # of a branch: 8 of them are in that part, for a line
MIN_BRANCHES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One branch: batch, learning rate, steps, and losses in nats.

    `loss` is the smoothed loss at the window's end (None: the branch failed, as `failed` says), `held_out_loss` that of
    held-out text after the last step (None: there is none).
    """

    batch_tokens: float
    learning_rate: float
    steps: float
    loss: float | None
    held_out_loss: float | None = None
    failed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPoint:
    """The start of all branches: the run, the step of its checkpoint, its batch and learning rate there; and the tokens of the
    window that each branch is trained on."""

    run: str
    step: int
    batch_tokens: float
    learning_rate: float
    window_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedBranch:
    """A branch that has a loss. `excess` is its loss above the lowest of all smaller batches, in nats; 0 for the smallest."""

    branch: Branch
    excess: float
    is_within: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedBranches:
    """Branches by batch, the smallest first; `tolerance` is in nats, and `failed` are branches without a loss."""

    tolerance: float
    compared: tuple[ComparedBranch, ...]
    failed: tuple[Branch, ...]

    @property
    def critical_batch_tokens(self) -> float:
        """The largest batch within the tolerance of all smaller ones."""
        return max(comparison.branch.batch_tokens for comparison in self.compared if comparison.is_within)

    @property
    def next_tokens(self) -> float | None:
        """The next larger batch, which is over the tolerance; None where the critical batch is the largest that was tried."""
        larger = (
            comparison.branch.batch_tokens
            for comparison in self.compared
            if comparison.branch.batch_tokens > self.critical_batch_tokens
        )
        return min(larger, default=None)

    @property
    def is_smallest(self) -> bool:
        """True if every batch but the smallest is over the tolerance, so that the critical one may be smaller still."""
        return self.critical_batch_tokens == self.compared[0].branch.batch_tokens


def window_loss(losses: Sequence[float], batch_tokens: float, window_tokens: float) -> float:
    """Return the smoothed loss of a branch at the end of its window, from the losses of its steps, each of `batch_tokens`.

    It is the value at the end of the least-squares line through the losses of the window's last half. Each loss counts at the
    tokens before its step, since it is that of the weights before the update: a mean over the same tokens would be later for
    larger batches. Branches take the same samples, which add about the same to all losses. Differs: the source takes an
    exponential average over steps (0.5 of each new one). Raises `InputError` for losses that are too few for a line.

    >>> round(window_loss([3.0 - 0.01 * step for step in range(16)], 64, 1024), 6)
    2.84
    """
    points = ((step * batch_tokens - window_tokens, loss) for step, loss in enumerate(losses))
    late_points = [(offset, loss) for offset, loss in points if -SMOOTHED_SHARE * window_tokens <= offset < 0]
    if len(late_points) < SMOOTHED_SHARE * MIN_STEPS:
        raise InputError(
            f"branches: found {len(losses)} steps of {format_quantity(batch_tokens)} tokens in a window of "
            f"{format_quantity(window_tokens)}; at least {MIN_STEPS} are required"
        )
    return _line_at_0(late_points)


def _line_at_0(points: Sequence[tuple[float, float]]) -> float:
    """Return the value at x = 0 of the least-squares line through points."""
    x, y = (math.fsum(coordinates) / len(points) for coordinates in zip(*points, strict=True))
    slope = math.fsum((a - x) * (b - y) for a, b in points) / math.fsum((a - x) ** 2 for a, _ in points)
    return y - slope * x


def require_tolerance(tolerance: float) -> None:
    """Raise `InputError` for a tolerance that is not positive."""
    if not 0 < tolerance < math.inf:
        raise InputError(f"{argument_label('tolerance')}: found {tolerance:g}; a number of nats above 0 is required")


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchOutcome:
    """Compared branches, and the checkpoint that they start from."""

    point: BranchPoint
    compared: ComparedBranches


def read_branch_outcome(folder: str | os.PathLike[str], tolerance: float = LOSS_TOLERANCE) -> BranchOutcome:
    """Compare the branches of a folder. Raises `InputError`."""
    point, branches = read_branch_point(folder), read_branches(folder)
    return BranchOutcome(point=point, compared=compare_branches(branches, tolerance))


def compare_branches(branches: Sequence[Branch], tolerance: float = LOSS_TOLERANCE) -> ComparedBranches:
    """Find the critical batch: the largest whose loss is at most `tolerance` nats above that of every smaller one.

    Raises `InputError` for a tolerance that is not positive, and for fewer than two branches with a loss.

    >>> losses = {512: 3.300, 1024: 3.296, 2048: 3.304, 4096: 3.318}
    >>> branches = [Branch(batch_tokens=batch, learning_rate=1e-3, steps=64, loss=loss) for batch, loss in losses.items()]
    >>> comparison = compare_branches(branches)
    >>> comparison.critical_batch_tokens, comparison.next_tokens
    (2048, 4096)
    """
    require_tolerance(tolerance)
    finished = sorted(
        (branch for branch in branches if branch.loss is not None), key=lambda branch: branch.batch_tokens
    )
    if len(finished) < MIN_BRANCHES:
        raise InputError(
            f"branches: found {len(finished)} that came to the end of the window; at least {MIN_BRANCHES} are required"
        )
    return ComparedBranches(
        tolerance=tolerance, compared=tuple(_compare_ended(finished, tolerance)),
        failed=tuple(branch for branch in branches if branch.loss is None),
    )  # fmt: skip


def _compare_ended(finished: Sequence[Branch], tolerance: float) -> Iterator[ComparedBranch]:
    lowest = math.inf
    for branch in finished:
        assert branch.loss is not None
        excess = branch.loss - lowest if lowest < math.inf else 0.0
        lowest = min(lowest, branch.loss)
        yield ComparedBranch(branch=branch, excess=excess, is_within=excess <= tolerance)


BRANCH_KIND = "branch"
BRANCHES_FILE = "branches.jsonl"
BRANCH_SCHEMA = "shardwise.batch_branch/1"  # of branch.json
REQUIRED_FOLDER = "the folder of branches that `shardwise batch branch` made"


def is_branch_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds branches."""
    return Path(path, f"{BRANCH_KIND}.json").is_file()


def read_branch_point(path: str | os.PathLike[str]) -> BranchPoint:
    """Read the checkpoint, batch and learning rate that branches start from. Raises `InputError`."""
    file = Path(path, f"{BRANCH_KIND}.json")
    fields = read_json(file, FileMessages(fix=f"{REQUIRED_FOLDER} is required"))
    if not isinstance(fields, Mapping) or fields.get("schema") != BRANCH_SCHEMA:
        schema = fields.get("schema") if isinstance(fields, Mapping) else type(fields).__name__
        raise InputError(f"{file}: found schema {schema!r}; {BRANCH_SCHEMA!r} is required")
    problems: list[str] = []
    names = ("step", "batch_tokens", "learning_rate", "window_tokens")
    numbers = {name: read_positive(fields, name, str(file), problems, required=True) or 0.0 for name in names}
    raise_problems(problems)
    return BranchPoint(run=str(fields.get("run")), **{**numbers, "step": int(numbers["step"])})  # type: ignore[arg-type]


def read_branches(path: str | os.PathLike[str]) -> tuple[Branch, ...]:
    """Return the finished branches of a folder. Raises `InputError` with every line that is wrong."""
    branches_file = Path(path, BRANCHES_FILE)
    branches: list[Branch] = []
    problems: list[str] = []
    for location, row in parse_json_lines(read_required_text(branches_file, REQUIRED_FOLDER), branches_file):
        branch = _parse_branch(row, location, problems)
        branches += [branch] if branch else []
    raise_problems(problems)
    if not branches:
        raise InputError(f"{branches_file}: found no branches; a line for each is required")
    return tuple(branches)


def _parse_branch(row: Any, location: str, problems: list[str]) -> Branch | None:
    """Return the branch of a row, or None and append what is wrong to `problems`."""
    if not isinstance(row, Mapping):
        problems.append(not_an_object_text(row, location))
        return None
    num_problems = len(problems)
    batch, rate, steps = (
        read_positive(row, name, location, problems, required=True)
        for name in ("batch_tokens", "learning_rate", "steps")
    )
    loss, held_out = (read_positive(row, name, location, problems) for name in ("loss", "held_out_loss"))
    failed = row.get("failed")
    if loss is None and not failed and len(problems) == num_problems:
        problems.append(f"{location}: found neither a loss nor why it failed; one of them is required")
    if len(problems) > num_problems or batch is None or rate is None or steps is None:
        return None
    return Branch(
        batch_tokens=batch, learning_rate=rate, steps=steps, loss=loss, held_out_loss=held_out,
        failed=None if failed is None else str(failed),
    )  # fmt: skip
