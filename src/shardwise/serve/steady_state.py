"""Steady state of an instance: how many requests run, what a token takes beside the others' inputs, and how long a first token
is.

At a fixed concurrency each request is followed by the next. Of C requests at a copy of attention, b run (what memory and the
engine's limit hold) and the others wait. A request sees `osl` passes of b sequences, and between them the inputs of the b - 1
others once each, of which passes take as many as come together:

    TPOT = pass(b) / tokens per pass + (b - 1 - before) / osl * (a pass with inputs, beyond a decode pass) / its inputs

where those `before` its own input are in its first token: half of the inputs that it meets, and of a first wave half of all in
other passes, and all in its own.

A first token takes the host's time for a request, the pass that runs when it comes, the passes until requests are admitted, its
own chunks, and those of the inputs that it meets (`first_tokens`). A run starts with b requests at once, whose inputs are
computed one after the other: the mean over a run has them too, as 1 of `waves`. Beyond what memory holds a request waits
(C / b - 1) lives of others.

At a rate requests come at random (Poisson): no wave starts at once, and inputs wait as in a queue with service of one length
(M/D/1, Pollaczek and Khinchine): rho / (2 (1 - rho)) of the chunks' seconds, with rho the share of time that inputs take. By
Little's law C = rate * (TTFT(rate) + (osl - 1) * TPOT(b)) (`random_first_token_seconds`).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from shardwise.serve.first_tokens import Arrivals, queued_passes, wave_crowding
from shardwise.serve.kernel_seconds import ServingRates, slower_of
from shardwise.serve.pass_cost import device_seconds, price_pass
from shardwise.serve.pass_work import Column, PassWork
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
    running one have no room; `pass_s` is a decode pass with the host's time, `shared_prompt_s` what one request's
    chunks add to the passes that they share; `input_share` of TPOT is others' inputs."""

    running: Column
    waiting: Column
    pass_s: Column
    shared_prompt_s: Column
    tpot_s: Column
    ttft_s: Column
    input_share: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Outputs of `osl` tokens, of which the shortest lack `length_spread` of the longest. `first_wave_share` of the requests
    start at once, the others when one ends; `admission_passes` lie between two admissions of requests. Of those that
    `come_at_random` none waits for another's end, and none starts with a wave."""

    osl: Column
    length_spread: Column
    first_wave_share: Column = 0.1
    admission_passes: Column = 1.0
    come_at_random: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPricer:
    """Passes of a table's rows on an engine's rates: what a steady state is made of. Each column is one row's, or a number."""

    work: TableWork
    rates: ServingRates
    fuses_chunks: Column
    polls: bool = False
    captures_decode: bool = True
    shares_host: bool = True
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

    def decode_work(self, running: Column) -> PassWork:
        """Return the work of a decode pass, without drafts' modules."""
        return self.work.work(running / self.work.pp, self.rates.routing)

    @property
    def draft_share(self) -> Column:
        """Multiple of a decode pass that it takes with drafts: their modules are a layer and the head each."""
        return 1.0 + self.drafted * DRAFT_LAYERS / self.work.num_layers

    def decode_terms(self, running: Column) -> dict[str, Column]:
        """Return the device's seconds of a decode pass by term."""
        terms = price_pass(self.decode_work(running), self.rates)
        return {name: seconds * self.draft_share for name, seconds in terms.items()}

    def decode_seconds(self, running: Column) -> Column:
        """Return the seconds of a decode pass with the host's time: between passes, and for kernels that it launches."""
        device_s = device_seconds(self.decode_terms(running))
        if not self.captures_decode:
            device_s = slower_of(device_s, self.rates.eager_seconds(self.work.kernels))
        return (device_s + self.host_seconds(running)) * self.pass_factor

    def host_seconds(self, running: Column) -> Column:
        """Return the host's seconds between passes: by pass, and by running sequence, of all copies of attention where they share
        a host process."""
        constants = self.constants
        per_pass = constants.pass_host_s * self.work.tokens_per_sequence
        sharing = self.work.attention_dp if self.shares_host else 1.0
        per_sequence = constants.sequence_host_s * running * sharing
        return (per_pass + per_sequence) * self.rates.host_factor

    def chunk_terms(self, running: Column, inputs: Column = 1.0) -> dict[str, Column]:
        """Return the device's seconds by term of a pass with chunks of `inputs` beside `running` decoding sequences."""
        work = self.work.work(running / self.work.pp, self.rates.routing, prompts=inputs)
        return price_pass(work, self.rates, has_prompt=True)

    def input_pass_seconds(self, running: Column, inputs: Column = 1.0) -> Column:
        """Return the seconds of a pass with chunks of inputs; it is not captured as a graph: the host launches each kernel."""
        eager_s = self.rates.eager_seconds(self.work.kernels)
        return slower_of(device_seconds(self.chunk_terms(running, inputs)), eager_s) * self.pass_factor

    def mixed_pass_seconds(self, running: Column, inputs: Column) -> Column:
        """Return the seconds of a pass with inputs as the engine schedules them, with the host's: beside `running` sequences that
        decode, or by themselves."""
        decoding = running * self.fuses_chunks
        return self.input_pass_seconds(decoding, inputs) + self.host_seconds(decoding) * self.pass_factor

    def first_wave_seconds(self, running: Column) -> Column:
        """Return the mean seconds of inputs until their first token where all come at once, by as many as a pass takes."""
        joined = np.minimum(running, self.inputs_per_pass)
        passes = (running / joined + 1.0) / 2.0 * self.work.num_chunks
        return self.constants.prompt_factor * passes * self.mixed_pass_seconds(running, joined)

    def later_wave_seconds(self, running: Column, pass_s: Column, input_pass_s: Column, arrivals: Arrivals) -> Column:
        """Return the mean seconds of inputs that come when others end: the rest of a pass, the passes until they are admitted,
        those that have the inputs of others, and their own."""
        constants = self.constants
        met = arrivals.num_inputs(running - 1.0)
        joined = np.minimum(met, self.inputs_per_pass)
        rate = running * arrivals.crowding / arrivals.life_passes
        load = self.fuses_chunks * np.minimum(rate / joined * self.work.num_chunks, 1.0)
        queue = queued_passes(load, arrivals.randomness, running / self.inputs_per_pass)
        wait_s = constants.wait_passes * (load * input_pass_s + (1.0 - load) * pass_s)
        passes = self.work.num_chunks * ((met / joined + 1.0) / 2.0 + queue)
        return wait_s + arrivals.admission_wait(met) * pass_s + constants.prompt_factor * passes * input_pass_s

    @property
    def inputs_per_pass(self) -> Column:
        """Inputs that one pass takes at most."""
        return np.maximum(self.work.batched_tokens / self.work.chunk_tokens, 1.0)

    def arrivals(self, running: Column, pass_s: Column, requests: Requests) -> Arrivals:
        """Return when requests of an instance start.

        Decoding goes on beside chunks where they share passes, so that what starts later also ends later: inputs of a wave take
        turns in the server and in passes. Where inputs go first, all of a wave decode together.
        """
        passes = requests.osl / self.tokens_per_pass
        in_passes = running * self.work.num_chunks / self.inputs_per_pass
        in_server = running * self.work.attention_dp * self.constants.server_turn_s / pass_s
        stagger = self.fuses_chunks * np.minimum(np.maximum(in_passes, in_server) / passes, 1.0)
        crowding, randomness = wave_crowding(requests.length_spread, stagger)
        if requests.come_at_random:
            crowding, randomness = 1.0, 1.0
        return Arrivals(
            life_passes=passes,
            crowding=crowding,
            randomness=randomness,
            admission_passes=requests.admission_passes,
            polls=self.polls,
        )


def solve_steady_state(pricer: PassPricer, present: Column, largest_batch: Column, requests: Requests) -> SteadyState:
    """Return the steady state of `present` requests in each copy of attention, of which memory holds `largest_batch`."""
    osl = requests.osl
    largest = np.maximum(largest_batch * pricer.constants.capacity_margin, 1.0)
    running = np.minimum(np.maximum(present, 1.0), largest)
    pass_s = pricer.decode_seconds(running)
    arrivals = pricer.arrivals(running, pass_s, requests)
    met = arrivals.num_inputs(running - 1.0)
    joined = np.minimum(met, pricer.inputs_per_pass)
    input_pass_s = pricer.mixed_pass_seconds(running, joined)
    added_s = np.maximum(input_pass_s - pass_s * pricer.fuses_chunks, SHORTEST_S)
    shared_s = added_s / joined * pricer.work.num_chunks
    share = 0.0 if requests.come_at_random else requests.first_wave_share
    # Inputs that were computed before a request's own are in its first token, and not between its tokens.
    wave_joined = np.minimum(running, pricer.inputs_per_pass)
    before = share * ((running + wave_joined) / 2.0 - 1.0) + (1.0 - share) * ((met + joined) / 2.0 - 1.0)
    inputs_s = (running - 1.0 - before) / osl * shared_s
    tpot_s = pass_s / pricer.tokens_per_pass + inputs_s
    if requests.come_at_random:
        unqueued_s = pricer.constants.wait_passes * pass_s + arrivals.admission_wait(met) * pass_s
        unqueued_s = server_seconds(pricer, running) + unqueued_s
        ttft_s = random_first_token_seconds(pricer, unqueued_s, present, np.maximum(osl - 1.0, 0.0) * tpot_s)
    else:
        later_s = pricer.later_wave_seconds(running, pass_s, input_pass_s, arrivals)
        waves_s = share * pricer.first_wave_seconds(running) + (1.0 - share) * later_s
        ttft_s = (server_seconds(pricer, running) + waves_s) * pricer.first_token_factor
    overfull = np.clip((present / largest - 1.0) * OVERFULL_SHARPNESS, -30.0, 30.0)
    waiting = np.maximum(np.log1p(np.exp(overfull)) / OVERFULL_SHARPNESS - 0.02, 0.0)
    return SteadyState(
        running=running, waiting=waiting, pass_s=pass_s, shared_prompt_s=shared_s, tpot_s=tpot_s,
        ttft_s=ttft_s + waiting * osl * tpot_s, input_share=inputs_s / tpot_s,
    )  # fmt: skip


def server_seconds(pricer: PassPricer, running: Column) -> Column:
    """Return the seconds of the server before an engine has a request: of its own, for its tokens, and for each of those that
    run."""
    constants, work = pricer.constants, pricer.work
    tokens_s = constants.input_token_host_s * work.chunk_tokens * work.num_chunks
    return constants.request_s + tokens_s + constants.request_host_s * running * work.attention_dp


def random_first_token_seconds(pricer: PassPricer, unqueued_s: Column, present: Column, decode_s: Column) -> Column:
    """Return the seconds to first tokens of requests that come at random, of which `present` are in the system of a copy of
    attention: `unqueued_s` before the input's own seconds, the queue and these; a request decodes for `decode_s` after it.

    With s the seconds of an input, A those of a request without a queue, f the factor of first tokens and x = rate * s, Little's
    law is C = rate * (A + f s x / (2 (1 - x))): (2 A - f s) x^2 - 2 (A + C s) x + 2 C s = 0, whose smaller root is below 1.
    """
    factor = pricer.first_token_factor
    prompt_s = prompt_seconds(pricer) * pricer.constants.prompt_factor
    alone_s = (unqueued_s + prompt_s) * factor + decode_s
    square, linear, constant = 2.0 * alone_s - factor * prompt_s, alone_s + present * prompt_s, 2.0 * present * prompt_s
    busy = constant / (linear + np.sqrt(linear * linear - square * constant))
    first_token_s: Column = present * prompt_s / busy - decode_s
    return first_token_s


def prompt_seconds(pricer: PassPricer) -> Column:
    """Return the seconds of an input's chunks by themselves."""
    return pricer.work.num_chunks * pricer.input_pass_seconds(0.0)


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
    """Return for each row whether a latency is within a limit with the probability that picks need (`PICK_PROBABILITY`)."""
    if limit_s is None:
        return np.ones_like(value_s, dtype=bool)
    deviations = NormalDist().inv_cdf(PICK_PROBABILITY)
    is_within: NDArray[np.bool_] = value_s * (high_s / value_s) ** (deviations / INTERVAL_DEVIATIONS) <= limit_s
    return is_within


# Probability that a pick is within a limit. Of groups of published rows a tenth of the picks at most then break it by more than
# 5%. At 0.8 some 1% do, and a pick has 12% less throughput than the best on average: a published grid of concurrencies has steps
# of 2, so that a step less costs a third.
PICK_PROBABILITY = 0.53
