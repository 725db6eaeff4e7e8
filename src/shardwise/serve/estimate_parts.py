"""Parts of the estimate of one configuration: intervals, the terms of its passes, its memory and its price."""

from __future__ import annotations

import numpy as np

from shardwise.hardware.chips import Chip
from shardwise.serve.configuration_table import Floats
from shardwise.serve.memory import MemoryColumns
from shardwise.serve.pass_cost import HOST
from shardwise.serve.pass_work import Column
from shardwise.serve.serving_estimate import Prediction, ServingMemory, ServingVerdict
from shardwise.serve.steady_state import INTERVAL_DEVIATIONS, PassPricer, prompt_seconds

# Share of weights, activations and context within which a model is neither said to fit nor not to: each of them is within 1% of
# eight start-up reports (`memory`).
MEMORY_MARGIN = 0.01
SECONDS_PER_HOUR = 3600.0


def first(column: Column) -> float:
    """Return the first row of a column, or a number as it is."""
    return float(np.ravel(column)[0])


def interval(values: Column, spread: Column) -> tuple[Floats, Floats]:
    """Return the ends of the 90% intervals of values."""
    factor = np.exp(INTERVAL_DEVIATIONS * np.asarray(spread))
    return np.asarray(values / factor), np.asarray(values * factor)


def interval_of(value: float, spread: float) -> Prediction:
    """Return a prediction with the ends of its 90% interval, from the standard deviation of its logarithm."""
    factor = float(np.exp(INTERVAL_DEVIATIONS * spread))
    return Prediction(value=value, low=value / factor, high=value * factor)


def decode_pass_terms(pricer: PassPricer, running: Column) -> dict[str, float]:
    """Return the terms of a decode pass of `running` requests, the largest first; they add up to the pass."""
    scale = first(pricer.pass_factor)
    seconds = {name: scale * first(value) for name, value in pricer.decode_terms(running).items()}
    seconds[HOST] = max(first(pricer.decode_seconds(running)) - sum(seconds.values()), 0.0)
    return _sorted(seconds)


def prompt_pass_terms(pricer: PassPricer) -> dict[str, float]:
    """Return the terms of one request's chunks, the largest first; launches by the host are what is beyond the device's."""
    scale = first(pricer.work.num_chunks) * first(pricer.pass_factor)
    seconds = {name: scale * first(value) for name, value in pricer.chunk_terms(0.0).items()}
    seconds[HOST] = max(first(prompt_seconds(pricer)) - sum(seconds.values()), 0.0)
    return _sorted(seconds)


def _sorted(seconds: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in sorted(seconds.items(), key=lambda item: -item[1]) if value > 0}


def memory_of_row(memory: MemoryColumns) -> ServingMemory:
    """Return the memory of a table's first row, with the verdict on one request."""
    parts = memory.parts
    doubt_bytes = MEMORY_MARGIN * first(parts.fixed_bytes)
    free_bytes = first(memory.spare_bytes - parts.request_bytes)
    verdict: ServingVerdict = "fits"
    if free_bytes < doubt_bytes:
        verdict = "does not fit" if free_bytes < -doubt_bytes else "not known"
    return ServingMemory(
        capacity_bytes=first(parts.capacity_bytes), usable_bytes=first(memory.usable_bytes),
        weight_bytes=first(parts.weight_bytes), activation_bytes=first(parts.activation_bytes),
        runtime_bytes=first(parts.runtime_bytes), cache_bytes=first(memory.cache_bytes),
        cache_bytes_per_token=first(parts.token_bytes), cache_tokens=int(first(memory.cache_tokens)),
        largest_batch=int(first(memory.largest_batch)), lacking_bytes=max(-free_bytes, 0.0), verdict=verdict, rule=memory.rule,
    )  # fmt: skip


def dollars_per_million(chip: Chip, throughput: Prediction) -> Prediction | None:
    """Return the dollars of a million output tokens at the tokens per second of a chip, where it has a price."""
    price = chip.price_usd_per_hour
    if price is None:
        return None
    per_million = price / SECONDS_PER_HOUR * 1e6
    assert throughput.low is not None
    assert throughput.high is not None
    return Prediction(
        value=per_million / throughput.value, low=per_million / throughput.high, high=per_million / throughput.low
    )
