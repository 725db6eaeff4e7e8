"""Seconds of one pass by term, from its work and a chip's rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from shardwise.serve.kernel_seconds import ServingRates
from shardwise.serve.pass_work import Column, PassWork

TERMS: Mapping[str, str] = {
    "attention": "products of attention", "recurrence": "products of recurrences", "mlp": "products of MLPs",
    "experts": "products of experts", "router": "router", "vocabulary": "products with the vocabulary",
    "streams": "products of residual streams",
}  # fmt: skip
CACHE, PROMPT, LAUNCHES, HOST = "attention over the cache", "attention of inputs", "launches", "host"
ACTIVATIONS = "norms, gates and casts"
COLLECTIVES: Mapping[str, str] = {"all_reduce": "all-reduce", "exchange": "exchange of tokens and logits"}


def price_pass(work: PassWork, rates: ServingRates, *, has_prompt: bool = False) -> dict[str, Column]:
    """Return the seconds of a pass on the device by term, for each row of a table, without the host's."""
    terms: dict[str, Column] = defaultdict(float)
    for group, products in work.products.items():
        terms[TERMS[group]] = rates.product_seconds(group, products, has_prompt=has_prompt)
    terms[CACHE] = rates.attention_seconds(work)
    if has_prompt:
        terms[PROMPT] = rates.prompt_attention_seconds(work)
    terms[ACTIVATIONS] = rates.activation_seconds(work)
    terms[LAUNCHES] = rates.launch_seconds(work)
    for collective in work.collectives:
        terms[COLLECTIVES[collective.kind]] += rates.collective_seconds(collective)
    return dict(terms)


def device_seconds(terms: Mapping[str, Column]) -> Column:
    """Return the sum of the terms of a pass."""
    total: Column = 0.0
    for seconds in terms.values():
        total = total + seconds
    return total
