"""Seconds of one pass by term, from its work and a chip's rates."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.model import Architecture
from shardwise.serve.configuration_table import ConfigurationTable
from shardwise.serve.kernel_seconds import ServingRates, slower_of
from shardwise.serve.pass_counts import count_pass
from shardwise.serve.pass_work import Column, PassTokens

TERMS: Mapping[str, str] = {
    "attention": "products of attention", "recurrence": "products of recurrences", "mlp": "products of MLPs",
    "experts": "products of experts", "router": "router", "vocabulary": "products with the vocabulary",
}  # fmt: skip
CACHE, PROMPT, LAUNCHES, HOST = "attention over the cache", "attention of inputs", "launches", "host"
COLLECTIVES: Mapping[str, str] = {"all_reduce": "all-reduce", "exchange": "exchange of tokens with experts"}


def price_pass(
    architecture: Architecture,
    table: ConfigurationTable,
    rates: ServingRates,
    tokens: PassTokens,
    *,
    has_prompt: bool = False,
) -> dict[str, Column]:
    """Return the seconds of a pass on the device by term, for each row of a table, without the host's."""
    work = count_pass(architecture, table, tokens, rates.routing)
    terms: dict[str, Column] = {}
    for group, products in work.products.items():
        seconds = rates.product_seconds(group, products, has_prompt=has_prompt)
        terms[TERMS[group]] = seconds
    terms[CACHE] = rates.attention_seconds(work)
    if has_prompt:
        terms[PROMPT] = rates.prompt_attention_seconds(work)
    terms[LAUNCHES] = rates.launch_seconds(work)
    for collective in work.collectives:
        terms[COLLECTIVES[collective.kind]] = rates.collective_seconds(collective)
    return terms


def device_seconds(terms: Mapping[str, Column]) -> Column:
    """Return the sum of the terms of a pass."""
    return sum(terms.values(), start=0.0)


def eager_seconds(terms: Mapping[str, Column], num_layers: int, eager_layer_s: float) -> Column:
    """Return the seconds of a pass that the host launches kernel by kernel: at least `eager_layer_s` a layer."""
    return slower_of(device_seconds(terms), num_layers * eager_layer_s + 0.0 * device_seconds(terms))
