"""Synthetic branches: the critical batch is recovered, and invalid files are refused with the line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from json_schemas import require_valid
from number_paths import require_payload_numbers

from shardwise.batch_size.branch_losses import (
    BRANCH_SCHEMA,
    BRANCHES_FILE,
    Branch,
    BranchOutcome,
    BranchPoint,
    compare_branches,
    is_branch_folder,
    read_branch_point,
    read_branches,
    window_loss,
)
from shardwise.batch_size.payloads import BranchesRecord
from shardwise.values import InputError, to_json

WINDOW = 2**18
BATCHES = [2**power for power in range(9, 15)]
SCATTER = 0.45  # nats, of the loss of a sequence of 64 tokens: that of a small model's


def branch_losses(batch: int, noise: np.ndarray, penalty: float) -> list[float]:
    """Losses of a branch's steps: a fall with the tokens seen, the noise of the window's sequences, and a penalty."""
    tokens = np.arange(WINDOW // batch) * batch
    return list(3.3 - 0.75 * np.log1p(tokens / 3e5) + noise.reshape(len(tokens), -1).mean(axis=1) + penalty)


def branch(batch: float, loss: float | None, failed: str | None = None) -> Branch:
    return Branch(batch_tokens=batch, learning_rate=1e-3, steps=64, loss=loss, failed=failed)


def test_window_loss_does_not_depend_on_the_batch_where_losses_fall_equally_per_token() -> None:
    """A mean over the last half is 0.008 higher with batches of 16Ki than of 512: a step's loss is that before its update."""
    quiet = np.zeros(WINDOW // 64)
    truth = 3.3 - 0.75 * math.log1p(WINDOW / 3e5)
    losses = {batch: branch_losses(batch, quiet, 0.0) for batch in BATCHES}
    losses_at_window_end = [window_loss(losses[batch], batch, WINDOW) for batch in BATCHES]
    assert losses_at_window_end == pytest.approx([truth] * 6, abs=8e-3)
    assert max(losses_at_window_end) - min(losses_at_window_end) < 2.5e-3
    means = [np.mean(losses[batch][len(losses[batch]) // 2 :]) for batch in (512, 16384)]
    assert means[1] - means[0] > 0.008


def test_the_line_is_fitted_by_least_squares() -> None:
    losses = list(np.random.default_rng(3).normal(3.0, 0.1, 40))
    tokens = np.arange(40) * 512.0
    slope, start = np.polyfit(tokens[20:], losses[20:], 1)
    assert window_loss(losses, 512, 40 * 512) == pytest.approx(start + slope * 40 * 512, rel=1e-12)


@pytest.mark.parametrize("critical", BATCHES[1:-1])
def test_the_critical_batch_is_the_largest_without_a_penalty(critical: int) -> None:
    """In 40 synthetic sets of branches. All branches of a set take the same samples, whose scatter is 40 times the tolerance."""
    comparisons = []
    for seed in range(40):
        noise = np.random.default_rng(seed).normal(0.0, SCATTER, WINDOW // 64)
        worse = {batch: 0.03 * max(0.0, math.log2(batch / critical)) for batch in BATCHES}
        losses = {batch: window_loss(branch_losses(batch, noise, worse[batch]), batch, WINDOW) for batch in BATCHES}
        comparisons.append(compare_branches([branch(batch, loss) for batch, loss in losses.items()]))
    assert sum(comparison.critical_batch_tokens == critical for comparison in comparisons) >= 38
    assert sum(comparison.next_tokens == 2 * critical for comparison in comparisons) >= 38


def test_the_critical_batch_is_the_largest_within_tolerance_of_all_smaller_batches() -> None:
    """Compare with the definition, by trying all pairs of batches."""
    random = np.random.default_rng(1)
    for _ in range(300):
        losses = dict(zip(BATCHES, 3.0 + random.normal(0.0, 0.01, len(BATCHES)), strict=True))
        largest = max(k for k in BATCHES if all(losses[k] <= losses[j] + 0.01 for j in BATCHES if j < k))
        comparison = compare_branches([branch(batch, loss) for batch, loss in reversed(losses.items())], 0.01)
        assert comparison.critical_batch_tokens == largest
        assert comparison.next_tokens == min((batch for batch in BATCHES if batch > largest), default=None)
        assert comparison.is_smallest == (largest == BATCHES[0])


def test_a_tolerance_of_a_tenth_of_the_fall_gives_a_ninth_of_the_noise_scale() -> None:
    """The progress of a batch B per token is 1 / (1 + B / B_noise) of that of the smallest batches."""
    noise, fall = 9e4, 0.1
    batches = [9.0, 1e3, 9e3, 1.1e4, 2e4, 4e4]
    branches = [branch(batch, 3.0 - fall / (1.0 + batch / noise)) for batch in batches]
    comparison = compare_branches(branches, tolerance=0.1 * fall)
    assert (comparison.critical_batch_tokens, comparison.next_tokens) == (9e3, 1.1e4)


def test_branches_that_failed_are_left_out() -> None:
    comparison = compare_branches([branch(1, 3.0), branch(2, None, "diverged"), branch(4, 3.001), branch(8, 3.5)])
    assert (comparison.critical_batch_tokens, comparison.next_tokens) == (4, 8)
    assert [branch.failed for branch in comparison.failed] == ["diverged"]
    with pytest.raises(InputError, match="found 1 that came to the end of the window; at least 2"):
        compare_branches([branch(1, 3.0), branch(2, None, "diverged")])
    with pytest.raises(InputError, match="tolerance: found 0"):
        compare_branches([branch(1, 3.0), branch(2, 3.0)], 0.0)


def test_a_window_of_few_steps_is_refused() -> None:
    assert window_loss([3.0] * 16, 64, 1024) == pytest.approx(3.0)
    with pytest.raises(InputError, match="found 15 steps of 64 tokens in a window of 960; at least 16"):
        window_loss([3.0] * 15, 64, 960)


LINE = {"batch_tokens": 64, "learning_rate": 1e-3, "steps": 32, "loss": 3.0, "held_out_loss": None, "failed": None}
POINT = {
    "schema": BRANCH_SCHEMA,
    "run": "runs/a",
    "step": 20,
    "batch_tokens": 64,
    "learning_rate": 1e-3,
    "window_tokens": 2048,
}


def test_branch_files_are_read_and_invalid_lines_are_named(tmp_path: Path) -> None:
    assert not is_branch_folder(tmp_path)
    with pytest.raises(InputError, match="the folder of branches that `shardwise batch branch` made is required"):
        read_branches(tmp_path)
    (tmp_path / "branch.json").write_text(json.dumps(POINT))
    (tmp_path / BRANCHES_FILE).write_text(json.dumps(LINE) + "\n")
    assert is_branch_folder(tmp_path)
    assert (read_branch_point(tmp_path).step, read_branch_point(tmp_path).window_tokens) == (20, 2048)
    assert [branch.loss for branch in read_branches(tmp_path)] == [3.0]
    wrong = [{**LINE, "loss": -1}, {**LINE, "loss": None}, {**LINE, "steps": "many"}, 7]
    (tmp_path / BRANCHES_FILE).write_text("".join(json.dumps(line) + "\n" for line in wrong) + "not JSON\n")
    with pytest.raises(InputError) as caught:
        read_branches(tmp_path)
    parts = (
        "loss is -1; a number above 0",
        "neither a loss nor why it failed",
        "steps is 'many'",
        "found '7'",
        "found 'not JSON'",
    )
    assert len(caught.value.problems) == len(parts)
    for number, (problem, part) in enumerate(zip(caught.value.problems, parts, strict=True), 1):
        assert problem.startswith(f"{tmp_path / BRANCHES_FILE}:{number}: ")
        assert part in problem
    (tmp_path / BRANCHES_FILE).write_text("")
    with pytest.raises(InputError, match="found no branches"):
        read_branches(tmp_path)
    for text, part in (
        ('{"schema": "other/1"}', "found schema 'other/1'"),
        ("[]", "found schema 'list'"),
        ("{", "is not JSON"),
        (json.dumps({**POINT, "step": None}), "step is None"),
    ):
        (tmp_path / "branch.json").write_text(text)
        with pytest.raises(InputError, match=part):
            read_branch_point(tmp_path)


def test_failed_branches_are_last_in_the_payload() -> None:
    comparison = compare_branches([branch(1, 3.0), branch(2, None, "diverged"), branch(4, 3.001)])
    point = BranchPoint(run="runs/a", step=40, batch_tokens=64.0, learning_rate=1e-3, window_tokens=4096.0)
    outcome = BranchOutcome(point=point, compared=comparison)
    payload = to_json(BranchesRecord.of(outcome))
    require_valid(payload)
    assert require_payload_numbers(outcome) == 3 + 2 * 5
    *_, failed = payload["branches"]
    assert [row["batch_tokens"] for row in payload["branches"]] == [1, 4, 2]
    assert (failed["failed"], failed["loss"], failed["excess"], failed["is_within"]) == ("diverged", None, None, None)
