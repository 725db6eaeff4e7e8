"""Noise scales: of a quadratic against draws of it, from norms without bias, and as values that are read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shardwise.batch_size.hessian_noise import quadratic_step
from shardwise.batch_size.noise_estimators import gradient_noise
from shardwise.batch_size.noise_scale import (
    NOISE_FILE,
    NoiseScale,
    noise_payload,
    parse_noise_scale,
    published_noise_scale,
)
from shardwise.values.errors import InputError

GRADIENT, HESSIAN, COVARIANCE = np.array([1.0, 2.0]), np.diag([1.0, 4.0]), np.diag([10.0, 5.0])


def test_noise_scales_of_a_quadratic_equal_the_formulas() -> None:
    """The note, E.1: tr(H·Sigma) / g'Hg = 30/17, tr(Sigma) / |g|² = 3, |g|² / g'Hg = 5/17, |g|⁴ / (2·g'Hg) = 25/34."""
    step = quadratic_step(GRADIENT, HESSIAN, COVARIANCE)
    assert (step.noise_scale, step.simple_noise_scale) == pytest.approx((30 / 17, 3.0))
    assert (step.max_learning_rate, step.max_improvement) == pytest.approx((5 / 17, 25 / 34))
    assert (step.improvement(10), step.learning_rate(10)) == pytest.approx((0.625, 0.25))


def test_the_best_learning_rate_of_a_quadratic_equals_that_of_drawn_gradients() -> None:
    """The mean loss after a step from drawn gradients is lowest at eta(B), and lower by dJ(B); H and Sigma do not commute."""
    hessian = np.array([[2.0, 0.7], [0.7, 1.0]])
    covariance = np.array([[6.0, -2.0], [-2.0, 3.0]])
    batch = 4
    step = quadratic_step(GRADIENT, hessian, covariance)
    draws = np.random.default_rng(0).multivariate_normal(GRADIENT, covariance / batch, 400_000)
    linear = float((draws @ GRADIENT).mean())
    curved = float(np.einsum("ni,ij,nj->n", draws, hessian, draws).mean())
    assert step.learning_rate(batch) == pytest.approx(linear / curved, rel=0.01)
    assert step.improvement(batch) == pytest.approx(linear**2 / (2 * curved), rel=0.01)


def test_norms_of_two_batches_give_trace_and_gradient() -> None:
    """The note, E.3: E|G(B)|² = |g|² + tr(Sigma) / B, with |g|² = 4 and tr(Sigma) = 1,000."""
    noise = gradient_noise(10, 104.0, 100, 14.0)
    assert (noise.covariance_trace, noise.squared_gradient, noise.simple_noise_scale) == pytest.approx((1000, 4, 250))


def test_norms_before_and_after_the_mean_over_ranks_give_the_scale_in_tokens() -> None:
    """64 ranks of 32,768 tokens, with squared norms of 0.052 before and 0.0145 after the mean."""
    noise = gradient_noise(32768, 0.052, 64 * 32768, 0.0145)
    assert noise.covariance_trace == pytest.approx(1248.3, rel=1e-4)
    assert noise.simple_noise_scale == pytest.approx(89775, rel=1e-4)


def test_estimates_from_norms_have_no_bias() -> None:
    """Means over 200,000 draws of eight gradients of one example each, and their mean: within four standard errors."""
    draws = np.random.default_rng(1).multivariate_normal(GRADIENT, COVARIANCE, (200_000, 8))
    small = (draws**2).sum(axis=2).mean(axis=1)
    large = (draws.mean(axis=1) ** 2).sum(axis=1)
    traces, squares = (
        np.array([getattr(gradient_noise(1, s, 8, b), name) for s, b in zip(small[:20000], large[:20000], strict=True)])
        for name in ("covariance_trace", "squared_gradient")
    )
    assert abs(traces.mean() - 15) < 4 * traces.std() / np.sqrt(len(traces))
    assert abs(squares.mean() - 5) < 4 * squares.std() / np.sqrt(len(squares))


def test_a_noise_scale_is_parsed_or_read_from_a_run(tmp_path: Path) -> None:
    assert parse_noise_scale("1.2Mi") == NoiseScale(tokens=1.2 * 2**20, source="given")
    measured = NoiseScale(tokens=3e5, interval90=(2e5, 5e5), source="32 steps")
    (tmp_path / NOISE_FILE).write_text(json.dumps(noise_payload(measured)), encoding="utf-8")
    for place in (str(tmp_path), tmp_path / NOISE_FILE):
        noise = parse_noise_scale(place)
        assert (noise.tokens, noise.interval90) == (3e5, (2e5, 5e5))
        assert noise.source == f"measured: {tmp_path / NOISE_FILE}"


def test_the_published_law_states_its_source() -> None:
    noise = published_noise_scale(3.0)
    assert 1e6 <= noise.tokens <= 2e6
    assert "Kaplan et al." in noise.source


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("much", "found 'much'; tokens such as 1.2Mi, or the folder of a run"),
        ("0", "found '0'; tokens above 0"),
        ("1e16", "at most 1e\\+15"),
        (Path("nowhere"), "nowhere does not exist"),
        ("nowhere.json", "nowhere.json: cannot read"),
    ],
)
def test_text_that_is_not_a_noise_scale_is_refused(text: str | Path, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        parse_noise_scale(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "found schema \\[\\]"),
        ('{"schema": "shardwise.noise/1", "tokens": "many"}', "tokens is 'many'"),
        ('{"schema": "shardwise.noise/1", "tokens": 5, "interval90": [6, 7]}', "found an interval of 6 to 7"),
    ],
)
def test_a_file_without_a_noise_scale_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / NOISE_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=problem):
        parse_noise_scale(tmp_path)


def test_inputs_without_a_noise_scale_are_refused() -> None:
    with pytest.raises(InputError, match="a curvature above 0"):
        quadratic_step([1, 0], [-1, 1], [1, 1])
    with pytest.raises(InputError, match=r"hessian: found shape \(3, 3\)"):
        quadratic_step([1, 0], [1, 1, 1], [1, 1])
    with pytest.raises(InputError, match="the smaller first"):
        gradient_noise(8, 1.0, 8, 1.0)
    with pytest.raises(InputError, match="nats per token"):
        published_noise_scale(0.0)
