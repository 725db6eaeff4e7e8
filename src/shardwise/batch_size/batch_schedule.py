"""Schedules of the global batch in a run: by the tokens seen so far or by the gradient noise scale, as text and by step.

`parse_batch_schedule` reads a schedule as people write it; `ramp_from_phases` turns its phases into a `BatchRamp`, the batch of
each step.

Sources: McCandlish et al. 2018 (the noise scale); Megatron-LM, megatron/core/num_microbatches_calculator.py
(RampupBatchsizeNumMicroBatchesCalculator; read 2026-11), whose `--rampup-batch-size START INCREMENT SAMPLES` is the linear ramp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from shardwise.batch_size.growing_batch import dynamic_batch_tokens
from shardwise.values import InputError, describe_unknown, parse_count, parse_quantity, raise_problems, run_all

SCHEDULE_FLAG = "--batch-schedule"
SCHEDULE_FORMS = "0:64Ki,200M:128Ki or linear:from=64Ki,by=64Ki,over=200M or noise:lambda=2Mi"
DECISION_STEPS = 100  # steps between two decisions of a schedule by noise scale: as many as its average takes in
Phase = tuple[int, int]  # tokens of the run before it, tokens of its batches


@dataclass(frozen=True, slots=True)
class PhasedBatches:
    """Batches by the tokens seen: `((0, 65536), (200_000_000, 131072))` has batches of 128 Ki tokens from the first step
    before which 200 million tokens were seen. Raises `InputError` for phases that do not begin at 0, or do not grow."""

    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.phases]
        if starts[:1] != [0] or any(b <= a for a, b in pairwise(starts)):
            raise InputError(
                f"{SCHEDULE_FLAG}: found phases from {', '.join(f'{start:,}' for start in starts)} tokens on; the first from 0, "
                "each later than the one before, are required"
            )

    def resolve(self, batch_tokens: int, quantum: int) -> PhasedBatches:
        """Return the same schedule: it leaves nothing open."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearBatches:
    """Batches from `first` tokens to `last` (None: the plan's) in equal increments, each after the same part of `over` tokens.

    `resolve` raises `InputError` where the increments do not lead from one to the other.

    >>> ramp = LinearBatches(first=4096, increment=2048, over=90_000, last=10240)
    >>> ramp.resolve(65536, 1024).phases
    ((0, 4096), (30000, 6144), (60000, 8192), (90000, 10240))
    """

    first: int
    increment: int
    over: int
    last: int | None = None

    def resolve(self, batch_tokens: int, quantum: int) -> PhasedBatches:
        """Return the phases of a run whose plan has batches of `batch_tokens`."""
        last = batch_tokens if self.last is None else self.last
        num_increments, remainder = divmod(last - self.first, self.increment)
        if remainder or num_increments < 1:
            raise InputError(
                f"{SCHEDULE_FLAG}: found from={self.first:,} by={self.increment:,} to a batch of {last:,} tokens; a larger "
                "batch at the end, by a whole number of increments, is required"
            )
        return PhasedBatches(
            tuple(
                (-(-index * self.over // num_increments), self.first + index * self.increment)
                for index in range(num_increments + 1)
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScaleBatches:
    """B = sqrt(lambda · B_noise), decided again after every `every` steps from the current estimate of the noise scale.

    All in tokens. `exchange_tokens` is lambda, how many more tokens a step less is worth (`dynamic_batch_tokens`). Batches are
    multiples of `increment` from `smallest` to `largest`, and `smallest` until there is an estimate. None stands for what the
    layout needs for one micro-batch of each replica (`smallest`, `increment`), and for the plan's batch (`largest`).

    Assumes B_simple, which a run measures, in place of B_noise, as McCandlish et al. 2018 do (isotropic curvature).

    >>> schedule = NoiseScaleBatches(exchange_tokens=1e6, smallest=1024, largest=10**6, increment=1024)
    >>> schedule.batch(10_000), schedule.batch(0.0), schedule.batch(10**9)
    (100352, 1024, 999424)
    """

    exchange_tokens: float
    smallest: int | None = None
    largest: int | None = None
    increment: int | None = None
    every: int = DECISION_STEPS

    def __post_init__(self) -> None:
        if not 0 < self.exchange_tokens < math.inf:
            raise InputError(
                f"{SCHEDULE_FLAG}: found lambda={self.exchange_tokens:g}; a number of tokens above 0 is required"
            )
        if self.smallest is not None and self.largest is not None and self.smallest > self.largest:
            raise InputError(
                f"{SCHEDULE_FLAG}: found from={self.smallest:,} to={self.largest:,}; from at most to is required"
            )

    def resolve(self, batch_tokens: int, quantum: int) -> NoiseScaleBatches:
        """Return the schedule with defaults of a plan with batches of `batch_tokens` whose layout runs multiples of `quantum`
        tokens."""
        max_tokens = batch_tokens if self.largest is None else self.largest
        min_tokens = min(quantum, max_tokens) if self.smallest is None else self.smallest
        return replace(self, largest=max_tokens, smallest=min_tokens, increment=self.increment or quantum)

    def batch(self, noise_tokens: float) -> int:
        """Return the tokens of the batch at a noise scale; for a resolved schedule."""
        assert self.smallest is not None
        assert self.largest is not None
        assert self.increment is not None
        target = dynamic_batch_tokens(max(noise_tokens, 0.0), self.exchange_tokens)
        target = min(max(target, self.smallest), self.largest)
        batch_tokens = round(target / self.increment) * self.increment
        while batch_tokens > self.largest:
            batch_tokens -= self.increment
        return max(batch_tokens, self.smallest)


BatchSchedule = PhasedBatches | LinearBatches | NoiseScaleBatches


def parse_batch_schedule(text: str, label: str = SCHEDULE_FLAG) -> BatchSchedule:
    """Return the schedule of a text. Raises `InputError`, which begins with `label`.

    >>> parse_batch_schedule("0:64Ki,200M:128Ki")
    PhasedBatches(phases=((0, 65536), (200000000, 131072)))
    >>> parse_batch_schedule("64Ki").phases
    ((0, 65536),)
    >>> parse_batch_schedule("linear:from=12Mi,by=3Mi,over=469G").over
    469000000000
    >>> parse_batch_schedule("noise:lambda=2Mi,to=4Mi,every=50").every
    50
    """
    name, colon, fields_text = text.strip().partition(":")
    if colon and not name[:1].isdigit():
        if name not in _PARSERS:
            raise InputError(
                f"{label}: {describe_unknown(name, _PARSERS)}; a schedule such as {SCHEDULE_FORMS} is required"
            )
        return _PARSERS[name](_parse_fields(fields_text, name, label), label)
    parts = [part.partition(":") for part in text.split(",") if part.strip()]
    if not parts or (len(parts) > 1 and not all(colon for _, colon, _ in parts)):
        raise InputError(f"{label}: found {text!r}; TOKENS:BATCH,... is required, such as {SCHEDULE_FORMS}")
    return PhasedBatches(tuple(_parse_phase(part, label) for part in parts))


def _parse_phase(part: tuple[str, str, str], label: str) -> Phase:
    start, batch = (part[0], part[2]) if part[1] else ("0", part[0])
    return parse_count(start, label=label, minimum=0), parse_count(batch, label=label)


def _parse_fields(text: str, name: str, label: str) -> dict[str, str]:
    required_by_name, fields = _FIELDS[name], {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or key not in required_by_name:
            raise InputError(
                f"{label}: found {part!r} for {name}; {', '.join(f'{field}=N' for field in required_by_name)} is known"
            )
        fields[key] = value
    missing = [field for field, is_required in required_by_name.items() if is_required and field not in fields]
    raise_problems(
        [f"{label}: {name} has no {field}; {field}=N is required, such as {SCHEDULE_FORMS}" for field in missing]
    )
    return fields


def _parse_linear(fields: Mapping[str, str], label: str) -> BatchSchedule:
    first, increment, over, *last = _parse_counts(fields, ("from", "by", "over", "to"), label)
    return LinearBatches(first=first, increment=increment, over=over, last=last[0] if last else None)


def _parse_noise(fields: Mapping[str, str], label: str) -> BatchSchedule:
    exchange = parse_quantity(fields["lambda"], label=f"{label} lambda", unit="")
    names = {"from": "smallest", "to": "largest", "by": "increment", "every": "every"}
    counts = _parse_counts(fields, tuple(names), label)
    return NoiseScaleBatches(
        exchange_tokens=exchange, **dict(zip((names[key] for key in names if key in fields), counts, strict=True))
    )


def _parse_counts(fields: Mapping[str, str], names: Sequence[str], label: str) -> list[int]:
    """Return the whole numbers of those names that are given, in order; all problems are raised at once."""
    parsers = (partial(parse_count, fields[name], label=f"{label} {name}") for name in names if name in fields)
    return list(run_all(*parsers))


_PARSERS: Mapping[str, Callable[[Mapping[str, str], str], BatchSchedule]] = {
    "linear": _parse_linear,
    "noise": _parse_noise,
}
_FIELDS: Mapping[str, Mapping[str, bool]] = {  # and whether it has to be given
    "linear": {"from": True, "by": True, "over": True, "to": False},
    "noise": {"lambda": True, "from": False, "to": False, "by": False, "every": False},
}


def ramp_from_phases(
    phases: Sequence[Phase], seq_len: int, previous: BatchRamp | None = None, step: int = 0
) -> BatchRamp:
    """Return the batch of every step of a run: that of `previous` up to `step`, and from there on those of the phases.

    A phase begins with the first step before which its tokens have been seen, so no sample is taken twice and none is left
    out. Raises `InputError` for batches that are not whole sequences.

    >>> ramp_from_phases([(0, 4096), (10_000, 8192)], 1024)
    BatchRamp(values=((0, 4), (3, 8)))
    >>> ramp_from_phases([(0, 4096), (10_000, 8192)], 1024, previous=BatchRamp(((0, 2),)), step=1)
    BatchRamp(values=((0, 2), (1, 4), (3, 8)))
    """
    raise_problems([problem for _, batch in phases for problem in _sequence_problems(batch, seq_len)])
    ramp = previous if previous is not None and step else None
    tokens = ramp.first_sample(step) * seq_len if ramp else 0
    ends = [*(start for start, _ in phases[1:]), math.inf]
    for (_, batch), end in zip(phases, ends, strict=True):
        if tokens < end:
            sequences = batch // seq_len
            ramp = ramp.then(step, sequences) if ramp else BatchRamp(((step, sequences),))
            num_steps = 0 if end == math.inf else -(-(int(end) - tokens) // batch)
            step, tokens = step + num_steps, tokens + num_steps * batch
    assert ramp is not None
    return ramp


def _sequence_problems(batch: int, seq_len: int) -> Iterator[str]:
    if batch % seq_len:
        low = batch // seq_len * seq_len
        nearest = f"the nearest are {low:,} and {low + seq_len:,}" if low else f"the smallest is {seq_len:,}"
        yield f"{SCHEDULE_FLAG}: a batch of {batch:,} tokens is not a whole number of sequences of {seq_len:,}; {nearest} tokens"


def steps_per_phase(phases: Sequence[Phase], tokens: float, seq_len: int) -> tuple[tuple[int, float], ...]:
    """Return (batch_tokens, num_steps) for each phase of a run of so many tokens; the last step may be a fraction.

    >>> steps_per_phase([(0, 4096), (10_000, 8192)], 20_480, 1024)
    ((4096, 3.0), (8192, 1.0))
    """
    ramp, phase_steps, seen_tokens = ramp_from_phases(phases, seq_len), [], 0.0
    for (start, sequences), stop in zip(ramp.values, [*(start for start, _ in ramp.values[1:]), None], strict=True):
        batch = sequences * seq_len
        max_steps = math.inf if stop is None else stop - start
        num_steps = min(max_steps, max(tokens - seen_tokens, 0.0) / batch)
        seen_tokens += num_steps * batch
        if num_steps > 0:
            phase_steps.append((batch, float(num_steps)))
    return tuple(phase_steps)


BATCH_RAMP_KEY = "batch_ramp"  # in a checkpoint: pairs of a step and the sequences of the batch from it on


@dataclass(frozen=True, slots=True)
class BatchRamp:
    """Sequences of the global batch by step: `((0, 64), (1000, 128))` is 64 from step 0 and 128 from step 1000 on."""

    values: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.values]
        if not steps or steps[0] != 0 or any(b <= a for a, b in pairwise(steps)):
            raise InputError(f"batch: found a ramp from steps {steps}; steps that start at 0 and grow are required")
        if any(sequences < 1 for _, sequences in self.values):
            raise InputError(f"batch: found {self.values}; at least one sequence in each batch is required")

    def sequences(self, step: int) -> int:
        """Return the sequences of the global batch of a step."""
        return next(sequences for start, sequences in reversed(self.values) if start <= step)

    def first_sample(self, step: int) -> int:
        """Return the number of the first sample of a step: those of all steps before it."""
        if step < 0:
            raise InputError(f"step: found {step}; a step of at least 0 is required")
        stops = [start for start, _ in self.values[1:]]
        spans = zip(self.values, [*stops, step], strict=True)
        return sum(max(min(stop, step) - start, 0) * sequences for (start, sequences), stop in spans)

    def until(self, step: int) -> BatchRamp:
        """Return the ramp without the changes after `step`.

        >>> BatchRamp(((0, 64), (1000, 128), (2000, 256))).until(1000)
        BatchRamp(values=((0, 64), (1000, 128)))
        """
        return BatchRamp(tuple(change for change in self.values if change[0] <= step))

    def then(self, step: int, sequences: int) -> BatchRamp:
        """Return the same ramp before `step`, and from it on batches of so many sequences.

        >>> BatchRamp(((0, 64), (1000, 128))).then(500, 96)
        BatchRamp(values=((0, 64), (500, 96)))
        """
        earlier = tuple(change for change in self.values if change[0] < step)
        is_change = not earlier or earlier[-1][1] != sequences
        return BatchRamp((*earlier, (step, sequences)) if is_change else earlier)


def parse_batch_ramp(text: str, label: str) -> tuple[tuple[int, int], ...]:
    """Return pairs of a step and the sequences of the batch from it on. Raises `InputError`, which begins with `label`.

    >>> parse_batch_ramp("0:64,1000:128", "batch_ramp")
    ((0, 64), (1000, 128))
    """
    pairs: Sequence[tuple[str, str, str]] = [part.partition(":") for part in text.split(",") if part.strip()]
    if not all(colon for _, colon, _ in pairs):
        raise InputError(f"{label}: found {text!r}; STEP:SEQUENCES,... is required, such as 0:64,1000:128")
    return tuple(
        (parse_count(step, label=label, minimum=0), parse_count(sequences, label=label)) for step, _, sequences in pairs
    )
