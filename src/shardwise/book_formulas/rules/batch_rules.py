"""The forms of `batch_size` that are rules of the books: noise scales, steps and tokens to a loss, learning rates."""

from shardwise.batch_size import BatchTradeoff
from shardwise.batch_size.growing_batch import dynamic_batch_tokens
from shardwise.batch_size.learning_rate import (
    linear_learning_rate,
    optimal_learning_rate,
    sign_learning_rate,
    square_root_learning_rate,
)
from shardwise.batch_size.noise_estimators import GradientNoise, gradient_noise
from shardwise.batch_size.noise_scale import critical_batch_of_loss
from shardwise.batch_size.tradeoff import (
    StepsAndTokens,
    doubling_speedup_ratio,
    improvement_fraction,
    steps_and_tokens,
    tradeoff_of_two_runs,
)

__all__ = [
    "BatchTradeoff",
    "GradientNoise",
    "StepsAndTokens",
    "critical_batch_of_loss",
    "doubling_speedup_ratio",
    "dynamic_batch_tokens",
    "gradient_noise",
    "improvement_fraction",
    "linear_learning_rate",
    "optimal_learning_rate",
    "sign_learning_rate",
    "square_root_learning_rate",
    "steps_and_tokens",
    "tradeoff_of_two_runs",
]
