"""Serving engines: what they run, the limits that they start with, and how they share out memory."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from shardwise.model import Architecture
from shardwise.serve.serving_constants import (
    NEUTRAL,
    ReleaseFactor,
    ServingConstants,
    load_constants,
    release_factors,
)
from shardwise.serve.serving_layout import DEFAULTS, ServingLayout
from shardwise.serve.serving_problem import BatchLimits
from shardwise.values import did_you_mean, lookup, raise_problems
from shardwise.values.input_texts import parse_integer

MemoryRule = Literal["of total", "of free", "static"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingEngine:
    """An engine at a release, with its defaults.

    `memory_rule`: its fraction is of the device's memory, less weights and the largest pass ("of total", vLLM), of what these
    leave ("of free", TensorRT-LLM), or of the memory for weights and cache ("static", SGLang). `degrees` are the parallel
    degrees and forms of a layout that it has an option for, beside tp and replicas. `exchanges_within_copy`: with
    `dispatch=all_to_all` tokens of one copy of attention are exchanged too, and not only those of several. `fuses_chunks`:
    chunks of inputs share passes with decoding sequences. `polls_requests`: where requests are not admitted before each pass, it
    is at fixed intervals, and not so long after the first. `reserves_output`: a request starts when the cache has room for all
    of its output. `pool_prefill_factor`: the seconds of inputs in a pool of their own over those of the same passes elsewhere.
    `captures_decode`: passes without inputs are replayed as captured graphs; elsewhere the host launches each of their kernels.
    `pool_shares_host`: in a pool that decodes one process serves the sequences of all copies of attention between passes, as in
    instances that do both; elsewhere each copy has its own.
    `constants_name`: whose constants a release has, where they are not the current ones.
    """

    name: str
    title: str
    release: str | None
    memory_rule: MemoryRule
    memory_fractions: Mapping[str, float]
    max_num_seqs: int
    max_batched_tokens: int
    fuses_chunks: bool
    polls_requests: bool
    reserves_output: bool
    exchanges_within_copy: bool
    pool_prefill_factor: float
    pool_shares_host: bool
    captures_decode: bool
    constants_name: str
    degrees: tuple[str, ...]
    measured_chips: tuple[str, ...]
    source: str

    @property
    def constants(self) -> ServingConstants:
        """Constants of the engine, of all its releases that have `constants_name`."""
        return load_constants(self.constants_name)

    def at_release(self, release: str) -> ServingEngine:
        """Return the engine at a release, with what that release did otherwise (`releases` of engines.toml)."""
        changes = dict(_engines_file()[self.name].get("releases", {}).get(release, {}))
        for name in ("degrees", "measured_chips"):
            if name in changes:
                changes[name] = tuple(changes[name])
        return replace(self, release=release, **changes)

    @property
    def memory_fraction(self) -> float:
        """Default of the engine's share of memory at its release."""
        return self.default_fraction(self.release or "")

    def default_fraction(self, release: str) -> float:
        """Return the default of the engine's share of memory at a release: that of the newest which is known, up to it.

        >>> [get_serving_engine("vllm").default_fraction(release) for release in ("0.19.0", "0.32.0")]
        [0.9, 0.92]
        """
        earlier = [version for version in self.memory_fractions if _version(version) <= _version(release)]
        return self.memory_fractions[max(earlier or self.memory_fractions, key=_version)]

    def batch_limits(self, limits: BatchLimits) -> BatchLimits:
        """Return limits with the engine's defaults where none are set."""
        return replace(
            limits, max_num_seqs=limits.max_num_seqs or self.max_num_seqs,
            max_batched_tokens=limits.max_batched_tokens or self.max_batched_tokens,
            memory_fraction=limits.memory_fraction or self.memory_fraction,
        )  # fmt: skip

    def layout_problems(self, architecture: Architecture, layout: ServingLayout) -> list[str]:
        """Return a sentence for each degree and form of a layout that the engine does not have."""
        problems = [
            f"layout: {name} is {getattr(layout, name)}; {self.title} does not have it, so {name}=1 is required"
            for name in ("attention_dp", "pp", "cp", "ep")
            if getattr(layout, name) > 1 and name not in self.degrees
        ]
        if layout.ep > 1 and layout.expert_tp_degree > 1 and "expert_tp" not in self.degrees:
            problems.append(
                f"layout: expert_tp is {layout.expert_tp_degree}; {self.title} splits experts by expert or each of them, so "
                f"ep={layout.tp * layout.attention_dp} is required"
            )
        return problems + self.form_problems(layout)

    def form_problems(self, layout: ServingLayout) -> list[str]:
        """Return a sentence for each form of a layout that the engine has no option for, or not with its degrees."""
        problems = [
            f"layout: {name} is {value}; {self.title} has no option for it, so {name}={DEFAULTS[name]} is required, or the "
            f"engine {NEUTRAL!r}, which has every form and is none that runs"
            for name in ("ws", "dispatch", "redundant_experts", "cache_split")
            if (value := getattr(layout, name)) != DEFAULTS[name] and name not in self.degrees
        ]
        if layout.dispatch == "all_gather" or "dispatch" not in self.degrees or self.name == NEUTRAL:
            return problems
        if layout.expert_tp_degree > 1:
            problems.append(
                f"layout: dispatch is {layout.dispatch} with expert_tp={layout.expert_tp_degree}; {self.title} exchanges tokens "
                f"between whole experts, so ep={layout.tp * layout.attention_dp} is required"
            )
        if layout.attention_dp == 1 and not self.exchanges_within_copy:
            problems.append(
                f"layout: dispatch is {layout.dispatch} with attention_dp=1; {self.title} exchanges tokens between copies of "
                "attention, so attention_dp of at least 2 is required, or dispatch=all_gather"
            )
        return problems

    def release_factor(self, chip: str, weights: str) -> ReleaseFactor:
        """Return the factor of the release on a chip with experts or weights of a format: the most specific that was measured."""
        factors = [factor for factor in release_factors(self.name) if factor.release == self.release]
        for key in ((chip, weights), (None, None)):
            match = next((factor for factor in factors if (factor.chip, factor.weights) == key), None)
            if match is not None:
                return match
        return ReleaseFactor(engine=self.name, release=self.release or "")


def _version(release: str) -> tuple[int, ...]:
    """Return the numbers of a release, for an order; what follows a number in letters is left out."""
    return tuple(parse_integer(number) for number in re.findall(r"(?:^|\.)(\d+)", release)[:3])


@cache
def _engines_file() -> Mapping[str, Any]:
    return tomllib.loads(resources.files(__package__ or "").joinpath("engines.toml").read_text(encoding="utf-8"))


@cache
def serving_engines() -> Mapping[str, ServingEngine]:
    """Return the engines by name, at their newest release with constants."""
    return {
        name: ServingEngine(
            name=name, constants_name=name, degrees=tuple(table["degrees"]), measured_chips=tuple(table["measured_chips"]),
            **{key: table.get(key) for key in ENGINE_KEYS},
        )
        for name, table in _engines_file().items()
    }  # fmt: skip


ENGINE_KEYS = (
    "title", "release", "memory_rule", "memory_fractions", "max_num_seqs", "max_batched_tokens", "fuses_chunks",
    "polls_requests", "reserves_output", "exchanges_within_copy", "pool_prefill_factor", "pool_shares_host", "captures_decode",
    "source",
)  # fmt: skip


def serving_engine_names() -> tuple[str, ...]:
    """Return the names of the engines.

    >>> serving_engine_names()
    ('vllm', 'sglang', 'trtllm', 'neutral')
    """
    return tuple(serving_engines())


def get_serving_engine(name: str, release: str | None = None) -> ServingEngine:
    """Return an engine by name, at a release (None: the newest with constants).

    Raises `InputError` for an unknown engine, and for a release of which nothing was measured.

    >>> get_serving_engine("vllm").memory_rule
    'of total'
    """
    engine = lookup(serving_engines(), name, "serving engine")
    if release is None:
        return engine
    releases = tuple(dict.fromkeys(factor.release for factor in release_factors(name)))
    if release not in releases:
        raise_problems(
            [
                f"release: found {release!r}{did_you_mean(release, releases)}; of {engine.title} "
                f"{', '.join(releases) or 'none'} were measured: leave it out for {engine.release}"
            ]
        )
    return engine.at_release(release)
