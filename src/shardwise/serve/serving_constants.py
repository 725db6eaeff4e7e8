"""Constants that passes are priced with: shares of a chip's peaks, latencies of launches and collectives, an engine's host times.

They are of all engines, or of one; `serving_constants.toml` has each with its width. A release differs from its engine by a
factor on its passes and one on its first tokens (`ReleaseFactor`), drawn towards 1 by how little was measured of it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from statistics import geometric_mean
from typing import Any

CONSTANTS_FILE = "serving_constants.toml"
NEUTRAL = (
    "neutral"  # the stack of no engine: its constants are the geometric means of the engines', its spreads the widest
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConstants:
    """Constants of one engine.

    Shares of the memory's bandwidth: `weight_share` of matrices, `expert_share` of experts, `cache_share` of keys and values.
    Shares of the peak: `decode_share` of products and `decode_attention_share` in decode passes, `prompt_share`,
    `expert_prompt_share` and `prompt_attention_share` where a pass has a chunk of an input. Factors on reading and computing:
    `fp4_factor` of fp4 matrices, `fp4_expert_factor`, `int4_expert_factor` and `fp8_expert_factor` of experts. `routing_skew`:
    share of tokens whose experts count as chosen independently; `expert_imbalance`: the busiest device's tokens over the mean,
    where experts are split by expert.

    A launch takes `kernel_s` times `launch_factor` of the chip; the numbers of launches of a layer are scaled by
    `latent_kernels`, `indexer_kernels`, `expert_kernels`, `fp4_expert_kernels`, `recurrence_kernels` and, for casts before
    narrow products, `cast_kernels`. Passes with a chunk are launched without a captured graph: `eager_launch_s` a kernel
    at least. An all-reduce takes `reduce_hop_s` for each doubling of devices, an exchange with experts `exchange_s`, both
    `link_share` of the link's rate. The host takes `pass_host_s` between passes and `sequence_host_s` for each running
    sequence; hosts of A100, a generation older, take
    `ampere_host_factor` times as long.

    First tokens: `request_s` before the engine sees a request, `wait_passes` times the pass that runs when it comes,
    `prompt_factor` times the chunks' seconds, its own and those of the inputs that it meets; `request_host_s` of the server for
    each running sequence, `server_turn_s` between two requests that come at once, and `input_token_host_s` for each token of
    an input, which is text before. `memory_fraction`: the engine's share of memory as it was started in the published runs,
    `capacity_margin` on the requests that the cache holds. `acceptance` of one drafted token.
    """

    weight_share: float
    expert_share: float
    cache_share: float
    decode_share: float
    decode_attention_share: float
    prompt_share: float
    expert_prompt_share: float
    prompt_attention_share: float
    fp4_factor: float
    fp4_expert_factor: float
    int4_expert_factor: float
    fp8_expert_factor: float
    routing_skew: float
    expert_imbalance: float

    indexer_kernels: float
    expert_kernels: float
    fp4_expert_kernels: float
    recurrence_kernels: float
    cast_kernels: float
    hopper_launch_factor: float
    ampere_host_factor: float
    reduce_hop_s: float
    exchange_s: float
    link_share: float
    kernel_s: float
    pass_host_s: float
    sequence_host_s: float
    eager_launch_s: float
    request_s: float
    wait_passes: float
    prompt_factor: float
    request_host_s: float
    server_turn_s: float
    input_token_host_s: float
    memory_fraction: float
    capacity_margin: float
    acceptance: float


CONSTANT_NAMES = tuple(field.name for field in fields(ServingConstants))
ENGINE_CONSTANTS = (  # of each engine by itself; the others are of all engines
    "kernel_s", "pass_host_s", "sequence_host_s", "eager_launch_s", "request_s", "memory_fraction",
)  # fmt: skip
# Constants of all engines that a release with older kernels has by itself.
EARLIER_RELEASES: Mapping[str, tuple[str, ...]] = {"vllm 0.2": ("prompt_share",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseFactor:
    """Factors of one release of an engine: of one chip and format of experts (or weights) where `chip` and `weights` say so."""

    engine: str
    release: str
    chip: str | None = None
    weights: str | None = None
    pass_factor: float = 1.0
    first_token_factor: float = 1.0
    num_rows: int = 0


@cache
def constants_file() -> Mapping[str, Any]:
    """Return the fitted tables: constants, factors of releases, spreads of predictions."""
    text = resources.files(__package__ or "").joinpath(CONSTANTS_FILE).read_text()
    return tomllib.loads(text)


@cache
def load_constants(engine: str) -> ServingConstants:
    """Return the constants of an engine by name."""
    tables = constants_file()
    by_engine = tables["engine_constants"]
    of_engines = (
        [table for name, table in by_engine.items() if name not in EARLIER_RELEASES]
        if engine == NEUTRAL
        else [by_engine[engine]]
    )
    shared = {name: tables["constants"][name]["value"] for name in CONSTANT_NAMES if name not in ENGINE_CONSTANTS}
    names = (*ENGINE_CONSTANTS, *EARLIER_RELEASES.get(engine, ()))
    of_engine = {name: geometric_mean(table[name]["value"] for table in of_engines) for name in names}
    return ServingConstants(**{**shared, **of_engine})


def prediction_spreads(latency: str, engine: str, kind: str) -> tuple[float, ...]:
    """Return the deviations of logarithms of what was measured over predictions, by cell; `latency` is "tpot" or "ttft", `kind`
    "dense" or "experts"."""
    tables = constants_file()["spreads"][latency]
    of_engines = [
        table[kind]
        for name, table in tables.items()
        if engine == name or (engine == NEUTRAL and name not in EARLIER_RELEASES)
    ]
    return tuple(max(cell) for cell in zip(*of_engines, strict=True))


@cache
def release_factors(engine: str) -> tuple[ReleaseFactor, ...]:
    """Return the factors of all releases of an engine that were measured."""
    return tuple(ReleaseFactor(**row) for row in constants_file().get("releases", ()) if row["engine"] == engine)
