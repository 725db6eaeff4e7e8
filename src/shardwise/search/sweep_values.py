"""A sweep: a name and its values, as people write them (`gpus=64:4096:x2`), and the points of one or two sweeps."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardwise.layout.choices import NAMED_CHOICES, NUMERIC_CHOICES, PINNABLE_CHOICES, example_value
from shardwise.values.errors import InputError, describe_unknown, raise_problems, run_all
from shardwise.values.overrides import parse_like
from shardwise.values.units import parse_count, read_as_binary

SweepValue = int | bool | str
JOB_SWEEPS = (
    "gpus",
    "seq_len",
    "batch",
    "model",
)  # of the cluster, the job and the model; the others are what --pin takes
JOB_FIELDS = {"seq_len": "seq_len", "batch": "global_batch_tokens"}  # of a job, by what is swept
SWEEPABLE = (*JOB_SWEEPS, *PINNABLE_CHOICES)
COUNT_NAMES = (
    "gpus",
    "seq_len",
    "batch",
    *NUMERIC_CHOICES,
    "recompute_layers",
)  # what a range can be of, and what has an order
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
        """Whether the values are counts that rise or fall: a line between points means something."""
        if self.name not in COUNT_NAMES:
            return False
        counts = [value if isinstance(value, int) else _num_devices(value) for value in self.values]
        return counts in (sorted(counts), sorted(counts, reverse=True))


def _num_devices(shape: str) -> int:
    """Devices of a torus's shape, such as 4x4x8, or of pods of it, 4x4x8*2."""
    return math.prod(map(int, re.findall(r"\d+", shape)))


def resize_shorthand(cluster: str, size: SweepValue) -> str:
    """A cluster's shorthand with another size. Raises `InputError` for a user's own cluster, which has one.

    >>> resize_shorthand("h100:64", 128), resize_shorthand("tpu-v5p:4x4x4", "4x4x8")
    ('h100:128', 'tpu-v5p:4x4x8')
    """
    if cluster.strip().casefold().endswith(".toml"):
        raise InputError(
            f"gpus: found the cluster {cluster}, a file that has one size; CHIP:COUNT is required, such as h100:64"
        )
    return f"{cluster.partition(':')[0]}:{size}"


def parse_sweep(text: str, flag: str = "--sweep") -> Sweep:
    """The sweep of NAME=VALUES; `flag` names the option in an error. Raises `InputError`.

    >>> parse_sweep("gpus=64:512:x2")
    Sweep(name='gpus', values=(64, 128, 256, 512))
    >>> parse_sweep("recompute=none,full").values
    ('none', 'full')
    """
    name, equals, values = (part.strip() for part in text.partition("="))
    if not (name and equals and values):
        raise InputError(f"{flag}: found {text!r}; NAME=VALUES is required, such as gpus=64:4096:x2")
    if name not in SWEEPABLE:
        raise InputError(f"{flag}: {describe_unknown(name, SWEEPABLE)}")
    what = f"{flag} {name}"
    found = tuple(_parse_range(values, name, what) if ":" in values else _parse_list(values, name, what))
    twice = sorted({str(value) for value in found if found.count(value) > 1})
    if twice:
        raise InputError(f"{what}: found {', '.join(twice)} more than once; each value once is required")
    return Sweep(name=name, values=found)


def parse_sweeps(texts: Sequence[str], flag: str = "--sweep") -> tuple[Sweep, ...]:
    """One sweep, or two that make a grid. Raises `InputError` with everything that is wrong with them."""
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
    """The points: every combination of values, the first sweep's outermost.

    >>> [dict(at) for at in grid_points([Sweep(name="tp", values=(1, 2)), Sweep(name="recompute", values=("full",))])]
    [{'tp': 1, 'recompute': 'full'}, {'tp': 2, 'recompute': 'full'}]
    """
    names = [sweep.name for sweep in sweeps]
    for values in itertools.product(*(sweep.values for sweep in sweeps)):
        yield dict(zip(names, values, strict=True))


def format_value(value: SweepValue) -> str:
    """A value as reports write it: 4,096, full, true."""
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else value


def _parse_list(text: str, name: str, what: str) -> Iterator[SweepValue]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise InputError(f"{what}: found {text!r}, in which a value is missing; {SWEEP_FORMS} is required")
    yield from (_parse_value(word, name, what) for word in words)


def _parse_value(word: str, name: str, what: str) -> SweepValue:
    """A value of the kind that the name has; the shape of a torus stays as text."""
    if name == "model" or (name == "gpus" and _SHAPE.fullmatch(word)):
        return word
    if name in JOB_SWEEPS:
        return parse_count(word, what=what)
    found: Any = parse_like(word, example_value(name), what)
    if name in NAMED_CHOICES and found not in NAMED_CHOICES[name]:
        raise InputError(f"{what}: {describe_unknown(found, NAMED_CHOICES[name])}")
    return found  # type: ignore[no-any-return]


def _parse_range(text: str, name: str, what: str) -> Iterator[int]:
    """The counts of FROM:TO:xFACTOR or FROM:TO:+STEP; TO is among them where it is met."""
    if name not in COUNT_NAMES:
        raise InputError(
            f"{what}: found the range {text!r}; {name} is not a count: a list such as {_example_list(name)} is required"
        )
    first, last, step = _split_range(text, what)
    multiplied = step[0] == "x"
    by = _parse_step(step, what)
    least = 0 if name == "zero_stage" and not multiplied else 1
    low, high = (parse_count(end, what=what, least=least) for end in (first, last))
    _require_one_kind(first, last, what)
    if low > high:
        raise InputError(f"{what}: found {text!r}, which goes down; {last}:{first}:{step} is required")
    yield from itertools.takewhile(lambda value: value <= high, _range_counts(low, by, multiplied))


def _split_range(text: str, what: str) -> tuple[str, str, str]:
    parts = [part.strip() for part in text.split(":")]
    if len(parts) != 3 or not all(parts) or parts[2][0] not in "x+":
        raise InputError(f"{what}: found {text!r}; {SWEEP_FORMS} is required")
    return parts[0], parts[1], parts[2]


def _parse_step(step: str, what: str) -> int:
    """The factor (a whole number of at least 2) or the increment (at least 1) between values."""
    least, example = (2, "x2") if step[0] == "x" else (1, "+64")
    try:
        return parse_count(step[1:].strip(), what=what, least=least)
    except InputError:
        raise InputError(
            f"{what}: found the step {step!r}, which leads nowhere; a whole number of at least {least} is required, such as "
            f"{example}"
        ) from None


def _range_counts(low: int, by: int, multiplied: bool) -> Iterator[int]:
    value = low
    for _ in range(MAX_POINTS + 1):
        yield value
        value = value * by if multiplied else value + by


def _require_one_kind(first: str, last: str, what: str) -> None:
    """Raise for a range from a binary to a decimal unit, or the reverse: no step leads from one to the other."""
    with_unit = [end for end in (first, last) if end[-1].isalpha()]
    binary = [end for end in with_unit if end.endswith("i")]
    decimal = [end for end in with_unit if not end.endswith("i")]
    if binary and decimal:
        meant = read_as_binary(parse_count(decimal[0], what=what))
        raise InputError(
            f"{what}: found {binary[0]} in binary and {decimal[0]} in decimal units; one kind is required"
            + (f", such as {meant[1]} for {decimal[0]}" if meant else "")
        )


def _example_list(name: str) -> str:
    if name == "model":
        return "llama-3-8b,llama-3-70b"
    return ",".join(list(NAMED_CHOICES[name])[:2]) if name in NAMED_CHOICES else "true,false"
