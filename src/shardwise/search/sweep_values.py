"""A sweep: a name and its values, as people write them (`gpus=64:4096:x2`), and the points of one or two sweeps."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardwise.layout.choices import NAMED, NUMERIC, PINNABLE, pinned_like
from shardwise.values.errors import InputError, collect, require, unknown
from shardwise.values.overrides import convert
from shardwise.values.units import binary_reading, parse_count

Value = int | bool | str
JOB = ("gpus", "seq_len", "batch", "model")  # of the cluster, the job and the model; the others are what --pin takes
FIELDS = {"seq_len": "seq_len", "batch": "global_batch_tokens"}  # of a job, by what is swept
SWEEPABLE = (*JOB, *PINNABLE)
COUNTS = ("gpus", "seq_len", "batch", *NUMERIC, "recompute_layers")  # what a range can be of, and what has an order
MOST_POINTS = 1000  # a point takes about a second
MOST_SWEEPS = 2  # a grid is drawn on paper
FORMS = "FROM:TO:xFACTOR, FROM:TO:+STEP or a list such as 64,128,384"
_SHAPE = re.compile(r"\d+(x\d+)+(_twisted)?(\*\d+)?")  # of a slice of a torus, as in tpu-v5p:4x4x8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A name and the values that it takes, in the order given; no value twice."""

    name: str
    values: tuple[Value, ...]

    @property
    def ordered(self) -> bool:
        """Whether the values are counts that rise or fall: a line between points means something."""
        if self.name not in COUNTS:
            return False
        counts = [value if isinstance(value, int) else _num_devices(value) for value in self.values]
        return counts in (sorted(counts), sorted(counts, reverse=True))


def _num_devices(shape: str) -> int:
    """Devices of a torus's shape, such as 4x4x8, or of pods of it, 4x4x8*2."""
    return math.prod(map(int, re.findall(r"\d+", shape)))


def sized(cluster: str, size: Value) -> str:
    """A cluster's shorthand with another size. Raises `InputError` for a user's own cluster, which has one.

    >>> sized("h100:64", 128), sized("tpu-v5p:4x4x4", "4x4x8")
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
        raise InputError(f"{flag}: {unknown(name, SWEEPABLE)}")
    what = f"{flag} {name}"
    found = tuple(_range(values, name, what) if ":" in values else _listed(values, name, what))
    twice = sorted({str(value) for value in found if found.count(value) > 1})
    if twice:
        raise InputError(f"{what}: found {', '.join(twice)} more than once; each value once is required")
    return Sweep(name=name, values=found)


def parse_sweeps(texts: Sequence[str], flag: str = "--sweep") -> tuple[Sweep, ...]:
    """One sweep, or two that make a grid. Raises `InputError` with everything that is wrong with them."""
    if not texts:
        raise InputError(f"{flag}: found none; NAME=VALUES is required, such as gpus=64:4096:x2")
    sweeps: tuple[Sweep, ...] = tuple(collect(*(partial(parse_sweep, text, flag) for text in texts)))
    names = [sweep.name for sweep in sweeps]
    problems = [
        f"{flag}: found {name} twice; each name once is required" for name in set(names) if names.count(name) > 1
    ]
    if len(sweeps) > MOST_SWEEPS:
        problems.append(
            f"{flag}: found {len(sweeps)} of them ({', '.join(names)}); one, or two for a grid, is required"
        )
    if math.prod(len(sweep.values) for sweep in sweeps) > MOST_POINTS:
        problems.append(
            f"{flag}: found more than {MOST_POINTS:,} points, about a second each; fewer values, or a larger step, are required"
        )
    require(problems)
    return sweeps


def grid(sweeps: Sequence[Sweep]) -> Iterator[Mapping[str, Value]]:
    """The points: every combination of values, the first sweep's outermost.

    >>> [dict(at) for at in grid([Sweep(name="tp", values=(1, 2)), Sweep(name="recompute", values=("full",))])]
    [{'tp': 1, 'recompute': 'full'}, {'tp': 2, 'recompute': 'full'}]
    """
    names = [sweep.name for sweep in sweeps]
    for values in itertools.product(*(sweep.values for sweep in sweeps)):
        yield dict(zip(names, values, strict=True))


def shown(value: Value) -> str:
    """A value as reports write it: 4,096, full, true."""
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else value


def _listed(text: str, name: str, what: str) -> Iterator[Value]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise InputError(f"{what}: found {text!r}, in which a value is missing; {FORMS} is required")
    yield from (_value(word, name, what) for word in words)


def _value(word: str, name: str, what: str) -> Value:
    """A value of the kind that the name has; the shape of a torus stays as text."""
    if name == "model" or (name == "gpus" and _SHAPE.fullmatch(word)):
        return word
    if name in JOB:
        return parse_count(word, what=what)
    found: Any = convert(word, pinned_like(name), what)
    if name in NAMED and found not in NAMED[name]:
        raise InputError(f"{what}: {unknown(found, NAMED[name])}")
    return found  # type: ignore[no-any-return]


def _range(text: str, name: str, what: str) -> Iterator[int]:
    """The counts of FROM:TO:xFACTOR or FROM:TO:+STEP; TO is among them where it is met."""
    if name not in COUNTS:
        raise InputError(
            f"{what}: found the range {text!r}; {name} is not a count: a list such as {_example(name)} is required"
        )
    first, last, step = _ends(text, what)
    multiplied = step[0] == "x"
    by = _step(step, what)
    least = 0 if name == "zero_stage" and not multiplied else 1
    low, high = (parse_count(end, what=what, least=least) for end in (first, last))
    _require_one_kind(first, last, what)
    if low > high:
        raise InputError(f"{what}: found {text!r}, which goes down; {last}:{first}:{step} is required")
    yield from itertools.takewhile(lambda value: value <= high, _steps(low, by, multiplied))


def _ends(text: str, what: str) -> tuple[str, str, str]:
    parts = [part.strip() for part in text.split(":")]
    if len(parts) != 3 or not all(parts) or parts[2][0] not in "x+":
        raise InputError(f"{what}: found {text!r}; {FORMS} is required")
    return parts[0], parts[1], parts[2]


def _step(step: str, what: str) -> int:
    """The factor (a whole number of at least 2) or the increment (at least 1) between values."""
    least, example = (2, "x2") if step[0] == "x" else (1, "+64")
    try:
        return parse_count(step[1:].strip(), what=what, least=least)
    except InputError:
        raise InputError(
            f"{what}: found the step {step!r}, which leads nowhere; a whole number of at least {least} is required, such as "
            f"{example}"
        ) from None


def _steps(low: int, by: int, multiplied: bool) -> Iterator[int]:
    value = low
    for _ in range(MOST_POINTS + 1):
        yield value
        value = value * by if multiplied else value + by


def _require_one_kind(first: str, last: str, what: str) -> None:
    """Raise for a range from a binary to a decimal unit, or the reverse: no step leads from one to the other."""
    with_unit = [end for end in (first, last) if end[-1].isalpha()]
    binary = [end for end in with_unit if end.endswith("i")]
    decimal = [end for end in with_unit if not end.endswith("i")]
    if binary and decimal:
        meant = binary_reading(parse_count(decimal[0], what=what))
        raise InputError(
            f"{what}: found {binary[0]} in binary and {decimal[0]} in decimal units; one kind is required"
            + (f", such as {meant[1]} for {decimal[0]}" if meant else "")
        )


def _example(name: str) -> str:
    if name == "model":
        return "llama-3-8b,llama-3-70b"
    return ",".join(list(NAMED[name])[:2]) if name in NAMED else "true,false"
