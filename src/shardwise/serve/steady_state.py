"""Steady state of an instance: how many requests run, what a token takes beside the others' inputs, and how long a first token
is.

At a fixed concurrency each request is followed by the next. Of C requests at a copy of attention, b run (what memory and the
engine's limit hold) and the others wait. A request sees `osl` passes of b sequences, and between them the inputs of the b - 1
others once each:

    TPOT = pass(b) / tokens per pass + (b - 1) / osl * (chunks' seconds beyond a pass that they share)

A first token takes the host's time for a request, the passes until it is scheduled, its own chunks, and those of requests that
came just before: requests that started together end together, so that more wait than arrivals at random would make
(`queue_factor` * (b - 1)**`queue_exponent`, fitted). Beyond what memory holds a request waits (C / b - 1) lives of others.

At a rate requests come at random (Poisson). By Little's law b = rate * osl * TPOT(b), and inputs wait as in a queue with
service of one length (M/D/1, Pollaczek and Khinchine): rho / (2 (1 - rho)) of the chunks' seconds, with rho the share of time
that inputs take.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.model import Architecture
from shardwise.serve.configuration_table import ConfigurationTable, Floats
from shardwise.serve.engines import ServingEngine
from shardwise.serve.kernel_seconds import ServingRates, slower_of
from shardwise.serve.memory import MemoryColumns
from shardwise.serve.pass_cost import device_seconds, price_pass
from shardwise.serve.pass_work import Column, PassTokens
from shardwise.serve.serving_constants import ReleaseFactor, ServingConstants
from shardwise.serve.serving_problem import BatchLimits, ServingProblem

OVERFULL_SHARPNESS = 8.0  # how sharply waiting for memory sets in: the softplus of C / b - 1 with this slope
INTERVAL_DEVIATIONS = 1.645  # of a normal distribution on either side of 90%


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyState:
    """Columns of a table at its concurrencies. `running` requests decode in one copy of attention, of which `waiting` for each
    running one have no room; `pass_s` is a decode pass with the host's time, `prompt_s` one request's chunks by themselves,
    `shared_prompt_s` what they add to the passes that they share."""

    running: Floats
    waiting: Floats
    pass_s: Floats
    prompt_s: Floats
    shared_prompt_s: Floats
    tpot_s: Floats
    ttft_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPricer:
    """Passes of one problem on an engine's rates: what a steady state is made of."""

    architecture: Architecture
    rates: ServingRates
    engine: ServingEngine
    factor: ReleaseFactor
    limits: BatchLimits

    @property
    def constants(self) -> ServingConstants:
        """Constants of the engine."""
        return self.rates.constants

    def decode_terms(self, table: ConfigurationTable, running: Floats, context: float) -> dict[str, Column]:
        """Return the device's seconds of a decode pass by term."""
        drafted = self.limits.mtp_tokens
        sequences = running / table.pp
        tokens = PassTokens(decode_sequences=sequences, tokens_per_sequence=1.0 + drafted, decode_context=context)
        return price_pass(self.architecture, table, self.rates, tokens)

    def decode_seconds(self, table: ConfigurationTable, running: Floats, context: float) -> Floats:
        """Return the seconds of a decode pass with the host's time, drafts included."""
        terms = self.decode_terms(table, running, context)
        drafted = self.limits.mtp_tokens
        # A module of multi-token prediction is a layer and the head, once for each drafted token.
        share = 1.0 + drafted * 2.0 / self.architecture.num_layers
        return (
            device_seconds(terms) * share + self.host_seconds(table, running, 1 + drafted)
        ) * self.factor.pass_factor

    def host_seconds(self, table: ConfigurationTable, running: Floats, num_passes: int = 1) -> Floats:
        """Return the host's seconds between passes: by pass, and by running sequence of the instance."""
        constants = self.constants
        return constants.pass_host_s * num_passes + constants.sequence_host_s * running * table.attention_dp

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a sequence gains in a pass: its own, and of those drafted as many as are accepted one after the other."""
        limits = self.limits
        acceptance = limits.acceptance or self.constants.acceptance
        return 1.0 + sum(acceptance**position for position in range(1, limits.mtp_tokens + 1))

    def prompt_seconds(
        self, table: ConfigurationTable, running: Floats, isl: float, context: float
    ) -> tuple[Floats, Floats]:
        """Return the seconds of an input's chunks by themselves, and what they add to passes that they share with decoding."""
        chunk_tokens = np.minimum(table.max_batched_tokens, isl)
        num_chunks = np.ceil(isl / chunk_tokens)
        chunk = isl / num_chunks / table.cp
        alone = PassTokens(prompt_tokens=chunk, prompt_context=isl / 2)
        eager = self.architecture.num_layers * self.constants.eager_layer_s
        alone_s = slower_of(
            device_seconds(price_pass(self.architecture, table, self.rates, alone, has_prompt=True)), eager
        )
        prompt_s = num_chunks * alone_s * self.factor.pass_factor
        if not (self.engine.fuses_chunks and self.limits.chunked_prefill):
            return prompt_s, prompt_s
        shared = PassTokens(
            decode_sequences=running / table.pp, decode_context=context, prompt_tokens=chunk, prompt_context=isl / 2
        )
        shared_s = slower_of(
            device_seconds(price_pass(self.architecture, table, self.rates, shared, has_prompt=True)), eager
        )
        shared_s = (shared_s + self.host_seconds(table, running)) * self.factor.pass_factor
        added = shared_s - self.decode_seconds(table, running, context)
        return prompt_s, num_chunks * np.maximum(added, 1e-5)


def solve_steady_state(
    pricer: PassPricer, problem: ServingProblem, table: ConfigurationTable, memory: MemoryColumns
) -> SteadyState:
    """Return the steady state of each row at its concurrency."""
    workload, constants = problem.workload, pricer.constants
    present = table.concurrency / (table.replicas * table.attention_dp)
    largest = np.minimum(memory.largest_batch, pricer.limits.max_num_seqs or pricer.engine.max_num_seqs)
    largest = np.maximum(largest * constants.capacity_margin, 1.0)
    running = np.minimum(np.maximum(present, 1.0), largest)
    pass_s = pricer.decode_seconds(table, running, workload.mean_context)
    prompt_s, shared_s = pricer.prompt_seconds(table, running, workload.new_input_tokens, workload.mean_context)
    other_requests = np.maximum(running - 1.0, 0.0)
    tpot_s = pass_s / pricer.tokens_per_pass + other_requests / workload.osl * shared_s
    first_token_s = first_token_seconds(pricer, table, running, pass_s, prompt_s)
    ttft_s = (
        first_token_s
        + prompt_s * constants.prompt_factor * constants.queue_factor * other_requests**constants.queue_exponent
    )
    ttft_s = ttft_s * pricer.factor.first_token_factor
    overfull = np.clip((present / largest - 1.0) * OVERFULL_SHARPNESS, -30.0, 30.0)
    waiting = np.maximum(np.log1p(np.exp(overfull)) / OVERFULL_SHARPNESS - 0.02, 0.0)
    return SteadyState(
        running=running, waiting=waiting, pass_s=pass_s, prompt_s=prompt_s, shared_prompt_s=shared_s, tpot_s=tpot_s,
        ttft_s=ttft_s + waiting * workload.osl * tpot_s,
    )  # fmt: skip


def first_token_seconds(
    pricer: PassPricer, table: ConfigurationTable, running: Floats, pass_s: Floats, prompt_s: Floats
) -> Floats:
    """Return the seconds to a first token where no other input waits: the server, passes until it is scheduled, its chunks."""
    constants = pricer.constants
    server = constants.request_s + constants.request_host_s * running * table.attention_dp
    return server + constants.wait_passes * pass_s + prompt_s * constants.prompt_factor


def queueing_seconds(rate_per_s: Floats, service_s: Floats) -> Floats:
    """Return the mean wait of random arrivals for a server whose service takes always the same (M/D/1); infinite when it is full.

    >>> float(queueing_seconds(np.array(5.0), np.array(0.1)))
    0.05
    """
    busy = np.minimum(rate_per_s * service_s, 1.0)
    with np.errstate(divide="ignore"):
        return busy / (2.0 * (1.0 - busy)) * service_s


def latency_within(limit_s: float | None, value_s: Floats, low_s: Floats, high_s: Floats) -> NDArray[np.bool_]:
    """Return for each row whether a latency is within a limit with the confidence that picks need (`PICK_MARGIN`)."""
    if limit_s is None:
        return np.ones_like(value_s, dtype=bool)
    return value_s * (high_s / value_s) ** PICK_MARGIN <= limit_s


# Share of the way to the interval's end, in logarithms, that a pick keeps below a limit: of groups of published rows at most a
# tenth of the picks then break it by more than 5%.
PICK_MARGIN = 0.5
