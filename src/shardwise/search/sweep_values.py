"""Parse sweeps: a name and its values, such as `gpus=64:4096:x2`, and the points of one or two sweeps."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardwise.layout.choices import NAMED_CHOICES, NUMERIC_CHOICES, PINNABLE_CHOICES, example_value
from shardwise.values import InputError, describe_unknown, parse_count, parse_like, raise_problems, run_all
from shardwise.values.input_texts import parse_integer
from shardwise.values.units import read_as_binary

SweepValue = int | bool | str
JOB_SWEEPS = ("gpus", "seq_len", "batch", "model")  # of cluster, job and model; the others are what --pin takes
JOB_FIELDS = {"seq_len": "seq_len", "batch": "global_batch_tokens"}  # of a job, by what is swept
SWEEPABLE = (*JOB_SWEEPS, *PINNABLE_CHOICES)
COUNT_NAMES = ("gpus", "seq_len", "batch", *NUMERIC_CHOICES, "recompute_layers")  # have an order, and can be a range
MAX_POINTS = 1000  # a point takes about a second
MAX_SWEEPS = 2  # a grid is drawn on paper
SWEEP_FORMS = "FROM:TO:xFACTOR, FROM:TO:+STEP or a list such as 64,128,384"
_SHAPE = re.compile(r"\d+(x\d+)+(_twisted)?(\*\d+)?")  # of a slice of a torus, as in tpu-v5p:4x4x8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A name and the values that it takes, in the order given; no value twice."""

    name: str
    values: tuple[SweepValue, ...]

    @property
    def is_ordered(self) -> bool:
        """True if the values are counts that rise or fall, so that a line between points means something."""
        if self.name not in COUNT_NAMES:
            return False
        # Devices of a torus's shape, such as 4x4x8, or of pods of it, 4x4x8*2.
        counts = [
            v if isinstance(v, int) else math.prod(map(parse_integer, re.findall(r"\d+", v))) for v in self.values
        ]
        return counts in (sorted(counts), sorted(counts, reverse=True))


def resize_shorthand(cluster: str, size: SweepValue) -> str:
    """Return a cluster's shorthand with another size. Raises `InputError` for a cluster file, which has one size.

    >>> resize_shorthand("h100:64", 128), resize_shorthand("tpu-v5p:4x4x4", "4x4x8")
    ('h100:128', 'tpu-v5p:4x4x8')
    """
    if cluster.strip().casefold().endswith(".toml"):
        raise InputError(
            f"gpus: found the cluster {cluster}, a file that has one size; CHIP:COUNT is required, such as h100:64"
        )
    return f"{cluster.partition(':')[0]}:{size}"


def parse_sweep(text: str, flag: str = "--sweep") -> Sweep:
    """Parse NAME=VALUES; `flag` names the option in errors. Raises `InputError`.

    >>> parse_sweep("gpus=64:512:x2")
    Sweep(name='gpus', values=(64, 128, 256, 512))
    >>> parse_sweep("recompute=none,full").values
    ('none', 'full')
    """
    name, equals, spec = (part.strip() for part in text.partition("="))
    if not (name and equals and spec):
        raise InputError(f"{flag}: found {text!r}; NAME=VALUES is required, such as gpus=64:4096:x2")
    if name not in SWEEPABLE:
        raise InputError(f"{flag}: {describe_unknown(name, SWEEPABLE)}")
    label = f"{flag} {name}"
    parsed = tuple(_parse_range(spec, name, label) if ":" in spec else _parse_list(spec, name, label))
    repeated = sorted({str(value) for value in parsed if parsed.count(value) > 1})
    if repeated:
        raise InputError(f"{label}: found {', '.join(repeated)} more than once; each value once is required")
    return Sweep(name=name, values=parsed)


def parse_sweeps(texts: Sequence[str], flag: str = "--sweep") -> tuple[Sweep, ...]:
    """Parse one sweep, or two that make a grid. Raises `InputError` with every problem."""
    if not texts:
        raise InputError(f"{flag}: found none; NAME=VALUES is required, such as gpus=64:4096:x2")
    sweeps: tuple[Sweep, ...] = tuple(run_all(*(partial(parse_sweep, text, flag) for text in texts)))
    names = [sweep.name for sweep in sweeps]
    problems = [
        f"{flag}: found {name} twice; each name once is required" for name in set(names) if names.count(name) > 1
    ]
    if len(sweeps) > MAX_SWEEPS:
        problems.append(
            f"{flag}: found {len(sweeps)} of them ({', '.join(names)}); one, or two for a grid, is required"
        )
    if math.prod(len(sweep.values) for sweep in sweeps) > MAX_POINTS:
        problems.append(
            f"{flag}: found more than {MAX_POINTS:,} points, about a second each; fewer values, or a larger step, are required"
        )
    raise_problems(problems)
    return sweeps


def grid_points(sweeps: Sequence[Sweep]) -> Iterator[Mapping[str, SweepValue]]:
    """Yield the points, every combination of values; the first sweep is the outermost loop.

    >>> [dict(at) for at in grid_points([Sweep(name="tp", values=(1, 2)), Sweep(name="recompute", values=("full",))])]
    [{'tp': 1, 'recompute': 'full'}, {'tp': 2, 'recompute': 'full'}]
    """
    names = [sweep.name for sweep in sweeps]
    for values in itertools.product(*(sweep.values for sweep in sweeps)):
        yield dict(zip(names, values, strict=True))


def format_value(value: SweepValue) -> str:
    """Format a value as reports write it: 4,096, full, true."""
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else value


def _parse_list(text: str, name: str, label: str) -> Iterator[SweepValue]:
    value_texts = [value_text.strip() for value_text in text.split(",")]
    if not all(value_texts):
        raise InputError(f"{label}: found {text!r}, in which a value is missing; {SWEEP_FORMS} is required")
    yield from (_parse_value(value_text, name, label) for value_text in value_texts)


def _parse_value(value_text: str, name: str, label: str) -> SweepValue:
    """Parse a value of the kind that the name has; the shape of a torus stays text."""
    if name == "model" or (name == "gpus" and _SHAPE.fullmatch(value_text)):
        return value_text
    if name in JOB_SWEEPS:
        return parse_count(value_text, label=label)
    parsed: Any = parse_like(value_text, example_value(name), label)
    if name in NAMED_CHOICES and parsed not in NAMED_CHOICES[name]:
        raise InputError(f"{label}: {describe_unknown(parsed, NAMED_CHOICES[name])}")
    return parsed  # type: ignore[no-any-return]


def _parse_range(text: str, name: str, label: str) -> Iterator[int]:
    """Yield the counts of FROM:TO:xFACTOR or FROM:TO:+STEP, up to TO."""
    if name not in COUNT_NAMES:
        raise InputError(
            f"{label}: found the range {text!r}; {name} is not a count: a list such as {_example_list(name)} is required"
        )
    first, last, step = _split_range(text, label)
    multiplied = step[0] == "x"
    increment = _parse_step(step, label)
    minimum = 0 if name == "zero_stage" and not multiplied else 1
    low, high = (parse_count(end, label=label, minimum=minimum) for end in (first, last))
    _require_same_kind(first, last, label)
    if low > high:
        raise InputError(f"{label}: found {text!r}, which goes down; {last}:{first}:{step} is required")
    yield from itertools.takewhile(lambda value: value <= high, _range_counts(low, increment, multiplied))


def _split_range(text: str, label: str) -> tuple[str, str, str]:
    parts = [part.strip() for part in text.split(":")]
    if len(parts) != 3 or not all(parts) or parts[2][0] not in "x+":
        raise InputError(f"{label}: found {text!r}; {SWEEP_FORMS} is required")
    return parts[0], parts[1], parts[2]


def _parse_step(step: str, label: str) -> int:
    """Parse the factor (a whole number of at least 2) or the increment (at least 1) between values."""
    minimum, example = (2, "x2") if step[0] == "x" else (1, "+64")
    try:
        return parse_count(step[1:].strip(), label=label, minimum=minimum)
    except InputError:
        raise InputError(
            f"{label}: found the step {step!r}, which leads nowhere; a whole number of at least {minimum} is required, such as "
            f"{example}"
        ) from None


def _range_counts(low: int, increment: int, multiplied: bool) -> Iterator[int]:
    value = low
    for _ in range(MAX_POINTS + 1):
        yield value
        value = value * increment if multiplied else value + increment


def _require_same_kind(first: str, last: str, label: str) -> None:
    """Raise for a range from a binary to a decimal unit, or the reverse: no step leads from one to the other."""
    with_unit = [end for end in (first, last) if end[-1].isalpha()]
    binary = [end for end in with_unit if end.endswith("i")]
    decimal = [end for end in with_unit if not end.endswith("i")]
    if binary and decimal:
        binary_reading = read_as_binary(parse_count(decimal[0], label=label))
        raise InputError(
            f"{label}: found {binary[0]} in binary and {decimal[0]} in decimal units; one kind is required"
            + (f", such as {binary_reading[1]} for {decimal[0]}" if binary_reading else "")
        )


def _example_list(name: str) -> str:
    if name == "model":
        return "llama-3-8b,llama-3-70b"
    return ",".join(list(NAMED_CHOICES[name])[:2]) if name in NAMED_CHOICES else "true,false"
