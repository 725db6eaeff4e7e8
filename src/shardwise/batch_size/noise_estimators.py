"""The noise scale from norms of gradients.

Letters: g the true gradient; Sigma the covariance of one example's gradient; G the mean gradient of a batch of examples, or of
tokens; b the smaller batch (small_batch); B the larger one (large_batch).

The simple noise scale is B_simple = tr(Sigma) / |g|^2. The gradient of a batch of B has the expected squared norm
|g|^2 + tr(Sigma) / B, so that two sizes of batch give both. `GradientNoise` is such a pair of estimates, `NoiseSample` what one
step of a run measured; `estimate_noise` takes the ratio of means over steps with an interval, `RunningNoise` averages while a run
goes on.

Source: McCandlish, Kaplan, Amodei et al. 2018, An Empirical Model of Large-Batch Training (arXiv 1812.06162), section 2.2 and
appendix A.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.values import InputError, raise_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    """Estimates of tr(Sigma) and of |g|² from two batches, each without bias; their quotient is B_simple, in the batches' unit.

    A single estimate of |g|² may be negative: averages of both over many steps are divided, not their quotients averaged.
    """

    covariance_trace: float
    squared_gradient: float

    @property
    def simple_noise_scale(self) -> float:
        """B_simple = tr(Sigma) / |g|²."""
        return self.covariance_trace / self.squared_gradient


def gradient_noise(
    small_batch: float, small_squared_norm: float, large_batch: float, large_squared_norm: float
) -> GradientNoise:
    """tr(Sigma), |g|² and the noise scale from squared norms of the gradients of a small and of a large batch.

    Formula: tr(Sigma) = (|G(b)|² - |G(B)|²) / (1/b - 1/B); |g|² = (B·|G(B)|² - b·|G(b)|²) / (B - b); B_simple is their quotient.
    Assumes: independent examples; of data-parallel ranks b is the batch of one and B that of all, before and after the mean.
    B_simple is B_noise where the Hessian is a multiple of the identity. Unit of B_simple: that of the batches.
    Source: McCandlish et al., An Empirical Model of Large-Batch Training, 2018, appendix A.1; the note, E.3.

    >>> noise = gradient_noise(10, 104.0, 100, 14.0)
    >>> round(noise.covariance_trace), noise.squared_gradient, round(noise.simple_noise_scale)
    (1000, 4.0, 250)
    """
    if not 0 < small_batch < large_batch:
        raise InputError(
            f"small_batch, large_batch: found {small_batch:g} and {large_batch:g}; two batches above 0, the smaller first, are "
            "required"
        )
    trace = (small_squared_norm - large_squared_norm) / (1.0 / small_batch - 1.0 / large_batch)
    square = (large_batch * large_squared_norm - small_batch * small_squared_norm) / (large_batch - small_batch)
    return GradientNoise(covariance_trace=trace, squared_gradient=square)


MAX_BLOCKS = 20  # of a run's measurements; more leave too few in a block for what is correlated
MIN_BLOCKS = 5  # below that the quantile's expansion is off by more than 0.1%
NORMAL_95 = 1.6448536269514722  # 95% of a normal distribution are below: both ends of a 90% interval


@dataclass(frozen=True, slots=True)
class NoiseSample:
    """Squared norms of two gradients of the same weights: the mean over parts of `small_tokens`, and that of `big_tokens`.

    >>> NoiseSample(small_norm_squared=5.0, big_norm_squared=2.0, small_tokens=8, big_tokens=32).noise
    GradientNoise(covariance_trace=32.0, squared_gradient=1.0)
    """

    small_norm_squared: float
    big_norm_squared: float
    small_tokens: float
    big_tokens: float

    @property
    def noise(self) -> GradientNoise:
        """Unbiased estimates of tr(Sigma) and |G|^2, either of which may be negative. Raises `InputError` for batches that are
        not 0 < small < big."""
        return gradient_noise(self.small_tokens, self.small_norm_squared, self.big_tokens, self.big_norm_squared)


def noise_sample_of_parts(sum_of_squares: float, big_norm_squared: float, tokens: Sequence[float]) -> NoiseSample:
    """Return the sample of a batch whose gradient was computed in parts of so many tokens: replicas, or micro-batches of one
    device.

    `sum_of_squares` adds the squared norms of the parts' contributions, whose sum is the gradient of the batch. With
    contributions (b_i / B) g_i the expected sum is q |G|^2 + tr(Sigma) / B, q = sum of (b_i / B)^2: that of even parts of q B
    tokens, times q. So uneven parts are unbiased too. Raises `InputError` for fewer than two parts that have tokens.

    >>> noise_sample_of_parts(1.25, 2.0, [8, 8, 8, 8])
    NoiseSample(small_norm_squared=5.0, big_norm_squared=2.0, small_tokens=8.0, big_tokens=32.0)
    """
    total = math.fsum(tokens)
    if sum(part_tokens > 0 for part_tokens in tokens) < 2:
        raise InputError("noise scale: found a batch in one part; two replicas or micro-batches are required")
    share = math.fsum((part_tokens / total) ** 2 for part_tokens in tokens)
    return NoiseSample(sum_of_squares / share, big_norm_squared, share * total, total)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredNoise:
    """tr(Sigma) / |G|^2 in tokens over some steps, with its 90% interval, and the means that it is the ratio of.

    `tokens` are infinite where the mean of |G|^2 is not above 0, `high` where it is not told apart from 0, or few were measured.
    """

    tokens: float
    low: float
    high: float
    noise: GradientNoise
    num_samples: int
    num_blocks: int


def estimate_noise(samples: Sequence[NoiseSample]) -> MeasuredNoise:
    """Return the noise scale of some steps: the ratio of the mean of tr(Sigma) to that of |G|^2, as ratios of single steps are
    biased.

    The interval is Fieller's: the ratios r for which the mean of tr(Sigma) - r |G|^2 is within Student's 95% quantile of
    standard errors of 0. The errors are those of means of up to 20 blocks of consecutive steps, so that correlated neighbours
    do not count as independent. With fewer than 5 samples it is unbounded. Raises `InputError` without a sample.

    Source: Fieller 1954, Some Problems in Interval Estimation, J. R. Stat. Soc. B 16.

    >>> measured = estimate_noise([NoiseSample(5.0, 2.0, 8, 32)] * 10)
    >>> measured.tokens, measured.low, measured.high
    (32.0, 32.0, 32.0)
    """
    raise_problems([] if samples else ["noise scale: found no measurement; one step that was measured is required"])
    noises = [sample.noise for sample in samples]
    mean, blocks = average_noise(noises), _block_means(noises)
    low, high = _fieller_interval(blocks) if len(blocks) >= MIN_BLOCKS else (0.0, math.inf)
    return MeasuredNoise(
        tokens=mean.simple_noise_scale if mean.squared_gradient > 0 else math.inf, low=low, high=high, noise=mean,
        num_samples=len(samples), num_blocks=len(blocks),
    )  # fmt: skip


def average_noise(noises: Sequence[GradientNoise]) -> GradientNoise:
    """Return the mean of both estimates, each by itself."""
    count = len(noises)
    return GradientNoise(
        covariance_trace=math.fsum(noise.covariance_trace for noise in noises) / count,
        squared_gradient=math.fsum(noise.squared_gradient for noise in noises) / count,
    )


def _block_means(noises: Sequence[GradientNoise]) -> list[GradientNoise]:
    """Return the means of blocks of consecutive measurements; a remainder at the start is dropped."""
    size = -(-len(noises) // MAX_BLOCKS)
    return [average_noise(noises[start : start + size]) for start in range(len(noises) % size, len(noises), size)]


def _fieller_interval(blocks: Sequence[GradientNoise]) -> tuple[float, float]:
    """Return the ends of the interval of a ratio s / g of means: the roots r of (s - r g)^2 = t^2 var(s - r g)."""
    count, mean = len(blocks), average_noise(blocks)
    s, g = mean.covariance_trace, mean.squared_gradient
    factor = student_quantile_95(count - 1) ** 2 / (count * (count - 1))
    deviations = [(block.covariance_trace - s, block.squared_gradient - g) for block in blocks]
    ss, sg, gg = (factor * math.fsum(block[i] * block[j] for block in deviations) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b, c = g * g - gg, s * g - sg, s * s - ss
    root = math.sqrt(max(b * b - a * c, 0.0))
    if g <= 0 or a <= 0:  # |G|^2 may be 0: all ratios above some are within
        return max((b - root) / a, 0.0) if g > 0 > a and c > 0 else 0.0, math.inf
    return max((b - root) / a, 0.0), (b + root) / a


def student_quantile_95(degrees_of_freedom: int) -> float:
    """Return the 95% quantile of Student's distribution with so many degrees of freedom, to 0.1% from 4 on.

    Source: Abramowitz and Stegun 1964, 26.7.5.

    >>> round(student_quantile_95(19), 3)
    1.729
    """
    x = NORMAL_95
    terms = (
        (x**3 + x) / 4.0,
        (5.0 * x**5 + 16.0 * x**3 + 3.0 * x) / 96.0,
        (3.0 * x**7 + 19.0 * x**5 + 17.0 * x**3 - 15.0 * x) / 384.0,
    )
    return x + math.fsum(term / degrees_of_freedom**power for power, term in enumerate(terms, start=1))


class RunningNoise:
    """Exponential averages of tr(Sigma) and |G|^2 and their ratio: an estimate during a run.

    `decay` is the weight of earlier samples. Source: McCandlish et al. 2018, appendix A.1.

    >>> average = RunningNoise(decay=0.9)
    >>> average.add(NoiseSample(5.0, 2.0, 8, 32))
    >>> average.tokens
    32.0
    """

    def __init__(self, decay: float = 0.95) -> None:
        raise_problems([] if 0 <= decay < 1 else [f"decay: found {decay}; at least 0 and below 1 is required"])
        self.decay = decay
        self._trace = self._squared = self._weight = 0.0

    def add(self, sample: NoiseSample) -> None:
        """Add the sample of a measured step."""
        decay, noise = self.decay, sample.noise
        self._trace = decay * self._trace + (1.0 - decay) * noise.covariance_trace
        self._squared = decay * self._squared + (1.0 - decay) * noise.squared_gradient
        self._weight = decay * self._weight + 1.0 - decay

    @property
    def noise(self) -> GradientNoise | None:
        """The averages, corrected for their start at 0; None before the first sample."""
        if not self._weight:
            return None
        return GradientNoise(covariance_trace=self._trace / self._weight, squared_gradient=self._squared / self._weight)

    @property
    def tokens(self) -> float | None:
        """The noise scale; None before the first sample, and while either average is not above 0."""
        return self._trace / self._squared if min(self._trace, self._squared) > 0 else None
