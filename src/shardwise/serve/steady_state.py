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

from shardwise.serve.kernel_seconds import ServingRates, slower_of
from shardwise.serve.pass_cost import device_seconds, price_pass
from shardwise.serve.pass_work import Column
from shardwise.serve.serving_constants import ServingConstants
from shardwise.serve.speculative_decoding import expected_tokens
from shardwise.serve.table_work import TableWork

DRAFT_LAYERS = 2.0  # a module of multi-token prediction is a layer and the head, counted as a second one
SHORTEST_S = 1e-5  # that a chunk adds to a pass at least
OVERFULL_SHARPNESS = 8.0  # how sharply waiting for memory sets in: the softplus of C / b - 1 with this slope
INTERVAL_DEVIATIONS = 1.645  # of a normal distribution on either side of 90%


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyState:
    """Columns of a table at its concurrencies. `running` requests decode in one copy of attention, of which `waiting` for each
    running one have no room; `pass_s` is a decode pass with the host's time, `prompt_s` one request's chunks by themselves,
    `shared_prompt_s` what they add to the passes that they share;
    `input_share` of TPOT is others' inputs."""

    running: Column
    waiting: Column
    pass_s: Column
    prompt_s: Column
    shared_prompt_s: Column
    tpot_s: Column
    ttft_s: Column
    input_share: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPricer:
    """Passes of a table's rows on an engine's rates: what a steady state is made of. Each column is one row's, or a number."""

    work: TableWork
    rates: ServingRates
    fuses_chunks: Column
    pass_factor: Column = 1.0
    first_token_factor: Column = 1.0
    acceptance: float | None = None

    @property
    def constants(self) -> ServingConstants:
        """Constants of the engine."""
        return self.rates.constants

    @property
    def drafted(self) -> Column:
        """Tokens that are drafted in a pass."""
        return self.work.tokens_per_sequence - 1.0

    @property
    def tokens_per_pass(self) -> Column:
        """Tokens that a sequence gains in a pass: its own, and of those drafted as many as are accepted one after the other."""
        acceptance = self.constants.acceptance if self.acceptance is None else self.acceptance
        return expected_tokens(acceptance, self.drafted)

    def decode_terms(self, running: Column) -> dict[str, Column]:
        """Return the device's seconds of a decode pass by term; drafts' modules are a layer and the head each."""
        work = self.work.work(running / self.work.pp, self.rates.routing)
        share = 1.0 + self.drafted * DRAFT_LAYERS / self.work.num_layers
        return {name: seconds * share for name, seconds in price_pass(work, self.rates).items()}

    def decode_seconds(self, running: Column) -> Column:
        """Return the seconds of a decode pass with the host's time."""
        return (device_seconds(self.decode_terms(running)) + self.host_seconds(running)) * self.pass_factor

    def host_seconds(self, running: Column) -> Column:
        """Return the host's seconds between passes: by pass, and by running sequence of the instance."""
        constants = self.constants
        per_pass = constants.pass_host_s * self.work.tokens_per_sequence
        return per_pass + constants.sequence_host_s * running * self.work.attention_dp

    def chunk_terms(self, running: Column) -> dict[str, Column]:
        """Return the device's seconds by term of a pass with a chunk of an input beside `running` decoding sequences."""
        work = self.work.work(running / self.work.pp, self.rates.routing, has_prompt=True)
        return price_pass(work, self.rates, has_prompt=True)

    def prompt_seconds(self, running: Column, pass_s: Column) -> tuple[Column, Column]:
        """Return the seconds of an input's chunks by themselves, and what they add to passes that they share with decoding.

        A pass with a chunk is not captured as a graph: the host launches each of its kernels.
        """
        eager = self.work.num_layers * self.constants.eager_layer_s
        alone_s = self.work.num_chunks * slower_of(device_seconds(self.chunk_terms(0.0)), eager) * self.pass_factor
        shared_s = slower_of(device_seconds(self.chunk_terms(running)), eager) + self.host_seconds(running)
        added_s = self.work.num_chunks * np.maximum(shared_s * self.pass_factor - pass_s, SHORTEST_S)
        return alone_s, np.where(self.fuses_chunks, added_s, alone_s)


def solve_steady_state(pricer: PassPricer, present: Column, largest_batch: Column, osl: Column) -> SteadyState:
    """Return the steady state of `present` requests in each copy of attention, of which memory holds `largest_batch`."""
    constants = pricer.constants
    largest = np.maximum(largest_batch * constants.capacity_margin, 1.0)
    running = np.minimum(np.maximum(present, 1.0), largest)
    pass_s = pricer.decode_seconds(running)
    prompt_s, shared_s = pricer.prompt_seconds(running, pass_s)
    other_requests = np.maximum(running - 1.0, 0.0)
    inputs_s = other_requests / osl * shared_s
    tpot_s = pass_s / pricer.tokens_per_pass + inputs_s
    first_token_s = first_token_seconds(pricer, running, pass_s, prompt_s)
    queue_s = prompt_s * constants.prompt_factor * constants.queue_factor * other_requests**constants.queue_exponent
    ttft_s = (first_token_s + queue_s) * pricer.first_token_factor
    overfull = np.clip((present / largest - 1.0) * OVERFULL_SHARPNESS, -30.0, 30.0)
    waiting = np.maximum(np.log1p(np.exp(overfull)) / OVERFULL_SHARPNESS - 0.02, 0.0)
    return SteadyState(
        running=running, waiting=waiting, pass_s=pass_s, prompt_s=prompt_s, shared_prompt_s=shared_s, tpot_s=tpot_s,
        ttft_s=ttft_s + waiting * osl * tpot_s, input_share=inputs_s / tpot_s,
    )  # fmt: skip


def first_token_seconds(pricer: PassPricer, running: Column, pass_s: Column, prompt_s: Column) -> Column:
    """Return the seconds to a first token where no other input waits: the server, passes until it is scheduled, its chunks."""
    constants = pricer.constants
    server_s = constants.request_s + constants.request_host_s * running * pricer.work.attention_dp
    return server_s + constants.wait_passes * pass_s + prompt_s * constants.prompt_factor


def queueing_seconds(rate_per_s: Column, service_s: Column) -> Column:
    """Return the mean wait of random arrivals for a server whose service takes always the same (M/D/1); infinite when it is full.

    >>> float(queueing_seconds(np.array(5.0), np.array(0.1)))
    0.05
    """
    busy = np.minimum(rate_per_s * service_s, 1.0)
    with np.errstate(divide="ignore"):
        wait_s: Column = busy / (2.0 * (1.0 - busy)) * service_s
    return wait_s


def latency_within(limit_s: float | None, value_s: Column, low_s: Column, high_s: Column) -> NDArray[np.bool_]:
    """Return for each row whether a latency is within a limit with the confidence that picks need (`PICK_MARGIN`)."""
    if limit_s is None:
        return np.ones_like(value_s, dtype=bool)
    is_within: NDArray[np.bool_] = value_s * (high_s / value_s) ** PICK_MARGIN <= limit_s
    return is_within


# Share of the way to the interval's end, in logarithms, that a pick keeps below a limit: of groups of published rows at most a
# tenth of the picks then break it by more than 5%.
PICK_MARGIN = 0.05
