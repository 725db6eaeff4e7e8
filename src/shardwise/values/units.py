"""Quantities as people write them: "4Mi", "15T", "3.35 TB/s".

Decimal prefixes are powers of 1000, binary ones (Ki, Mi, Gi, Ti) powers of 1024. GB is decimal, GiB binary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from shardwise.values.errors import InputError

_PREFIXES = {
    "": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
}  # fmt: skip
SECONDS_PER_DAY = 86400.0
_DURATIONS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": SECONDS_PER_DAY, "w": 7 * SECONDS_PER_DAY}
_QUANTITY = re.compile(r"^\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)\s*$")
# Units as written, and the unit that is meant. Longer ones first, as they are matched as suffixes.
_UNITS = {"FLOP/s": "FLOP/s", "FLOPs/s": "FLOP/s", "B/s": "B/s", "FLOP": "FLOP", "B": "B"}
EXAMPLE_QUANTITIES = {"": "4Mi or 15T", "B": "80 GB", "B/s": "3.35 TB/s", "FLOP": "2 PFLOP", "FLOP/s": "989 TFLOP/s"}


# A bare number below these, for a chip or a network, was meant in GB, GB/s or TFLOP/s. The smallest values of the catalogue are
# a thousand times as large.
SMALLEST_PLAUSIBLE: Mapping[str, float] = {"B": 1e6, "B/s": 1e6, "FLOP/s": 1e9}


def unit_from_name(name: str) -> str:
    """Return the unit that a value's name implies ("memory_bytes" is "B"); "" for counts, shares and names with another unit."""
    for part, unit in (("flops_per_s", "FLOP/s"), ("bytes_per_s", "B/s"), ("bytes", "B")):
        if name.endswith((part, f"{part}_per_host", f"{part}_per_device")):
            return unit
    return ""


def parse_quantity(text: str | float, *, label: str = "quantity", unit: str | None = None) -> float:
    """Return the number of a quantity with an optional prefix and unit ("4Mi" is 4194304, "3.35 TB/s" is 3.35e12).

    "B" right after a number means billion, as in "70B"; after a space or a prefix it means bytes, as in "5 B" or "96GB".
    `unit` is the one that may be written ("": none; None: any), and the one of a bare number. Raises `InputError`, which
    begins with `label`, for a text that is no finite quantity or has another unit.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        number = float(text)
    else:
        match = _QUANTITY.match(str(text))
        suffix = _parse_suffix(match.group(2), after_space=match.start(2) > match.end(1)) if match else None
        if match is None or suffix is None:
            examples = "4Mi, 15T or 3.35 TB/s" if unit is None else EXAMPLE_QUANTITIES[unit]
            raise InputError(f"{label}: found {text!r}; a number with a prefix is required, such as {examples}")
        scale, symbol = suffix
        if symbol and unit is not None and symbol != unit:
            required = f"a number in {unit} is" if unit else "a number without a unit is"
            raise InputError(
                f"{label}: found {text!r}, which is in {symbol}; {required} required, such as {EXAMPLE_QUANTITIES[unit]}"
            )
        number = float(match.group(1)) * scale
    if not math.isfinite(number):
        raise InputError(f"{label}: found {str(text)[:60]!r}; a finite number is required")
    return number


def lacks_unit(raw: object, number: float, unit: str) -> bool:
    """Return True if a chip's or network's value was written as a bare number, too small to be meant in the base unit.

    >>> lacks_unit("96", 96.0, "B"), lacks_unit("96GB", 96e9, "B"), lacks_unit(9.6e10, 9.6e10, "B"), lacks_unit("0", 0.0, "B")
    (True, False, False, False)
    """
    bare = not isinstance(raw, str) or not raw.strip()[-1:].isalpha()
    return bare and 0 < number < SMALLEST_PLAUSIBLE.get(unit, 0.0)


MAX_COUNT = 10**18  # of anything that is counted: above any training's tokens


def parse_count(text: str | float, *, label: str, minimum: int = 1) -> int:
    """Return a whole quantity of at least `minimum` ("4Mi" is 4194304). Raises `InputError` otherwise."""
    number = parse_quantity(text, label=label, unit="")
    if number < minimum or number != int(number):
        raise InputError(f"{label}: found {str(text)[:60]!r}; a whole number of at least {minimum} is required")
    if number > MAX_COUNT:
        raise InputError(f"{label}: found {str(text)[:40]!r}; a whole number of at most {MAX_COUNT:g} is required")
    return int(number)


def parse_at_least(text: str | float, *, label: str, minimum: float) -> float:
    """Return a finite number of at least `minimum`. Raises `InputError` otherwise.

    >>> parse_at_least("1.5", label="contention", minimum=1.0)
    1.5
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not minimum <= number < math.inf:
        raise InputError(
            f"{label}: found {text!r}; a number of at least {minimum:g} is required, such as {minimum + 0.5:g}"
        )
    return number


def parse_duration(text: str, *, label: str) -> float:
    """Return the seconds of a duration with a unit ("30d", "12h", "2w", "90min"). Raises `InputError` for none above 0."""
    match = _QUANTITY.match(text)
    seconds = float(match.group(1)) * _DURATIONS.get(match.group(2), math.nan) if match else math.nan
    if not 0 < seconds < math.inf:
        raise InputError(
            f"{label}: found {text!r}; a time above 0 with s, min, h, d or w is required, such as 30d or 12h"
        )
    return seconds


def parse_usd(text: str, *, label: str) -> float:
    """Return US dollars ("2M", "500k", "$1.5M", "2M USD"). Raises `InputError` for no amount above 0."""
    bare = text.strip().removeprefix("$").removesuffix("USD").strip()
    try:
        amount = parse_quantity(bare, label=label, unit="")
    except InputError:
        amount = math.nan
    if not amount > 0:
        raise InputError(f"{label}: found {text!r}; dollars above 0 are required, such as 2M or 500k")
    return amount


def _parse_suffix(suffix: str, *, after_space: bool) -> tuple[float, str] | None:
    """Return the factor of a prefix and the unit after it ("" for none), or None if it is neither."""
    if suffix in _PREFIXES and not (after_space and suffix == "B"):
        return _PREFIXES[suffix], ""
    for symbol, unit in _UNITS.items():
        if suffix.endswith(symbol) and suffix[: -len(symbol)] in _PREFIXES:
            return _PREFIXES[suffix[: -len(symbol)]], unit
    return None


def format_quantity(value: float, unit: str = "", *, digits: int = 3) -> str:
    """Format a number with a decimal prefix: 3.35e12 and "B/s" give "3.35 TB/s"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}".strip()
    for prefix in ("E", "P", "T", "G", "M", "k"):
        if abs(value) >= _PREFIXES[prefix] * 0.9995:
            return f"{value / _PREFIXES[prefix]:.{digits}g} {prefix}{unit}".strip()
    return f"{value:.{digits}g} {unit}".strip()


def format_count(value: float) -> str:
    """Format a count of parameters or tokens: 70.6e9 gives "70.6B", 15e12 gives "15T"."""
    for prefix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= scale * 0.9995:
            return f"{value / scale:.3g}{prefix}"
    return f"{value:.3g}"


def read_as_binary(value: int) -> tuple[int, str] | None:
    """Return the number with its decimal prefix read as a binary one, and its text; None if it has no short binary form.

    >>> read_as_binary(4_000_000), read_as_binary(1_500_000), read_as_binary(8000), read_as_binary(5001)
    ((4194304, '4Mi'), (1572864, '1.5Mi'), (8192, '8Ki'), None)
    """
    prefix = next((name for name in ("T", "G", "M", "k") if value >= _PREFIXES[name]), None)
    if prefix is None:
        return None
    count, binary = value / _PREFIXES[prefix], _PREFIXES[f"{prefix.upper()}i"]
    return (int(count * binary), f"{count:g}{prefix.upper()}i") if (count * binary).is_integer() else None


def format_binary(value: int) -> str:
    """Format an integer with the largest binary prefix that divides it.

    >>> format_binary(4194304), format_binary(3000)
    ('4Mi', '3000')
    """
    prefixes = ("Ti", "Gi", "Mi", "Ki")
    prefix = next((prefix for prefix in prefixes if value and value % int(_PREFIXES[prefix]) == 0), "")
    return f"{value // int(_PREFIXES[prefix])}{prefix}"


def pluralize(number: int, noun: str) -> str:
    """Format a count of things: "1 step", "1,024 steps", "2 batches"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def format_bytes(value: float) -> str:
    """Format bytes with a decimal prefix: 81.6e9 gives "81.6 GB"."""
    return format_quantity(value, "B")


def format_percent(fraction: float) -> str:
    """Format a fraction as a percentage: 0.42 gives "42%", 0.000123 gives "0.0123%"."""
    return f"{100 * fraction:.3g}%"


def format_usd(value: float) -> str:
    """Format dollars: 5.1e6 gives "$5.1M", 930 gives "$930"."""
    return f"${format_count(value)}" if value >= 1e3 else f"${value:.3g}"


def format_energy(mwh: float) -> str:
    """Format energy given in MWh: 2,789 gives "2.79 GWh"."""
    return format_quantity(mwh * 1e6, "Wh")


def format_days(days: float) -> str:
    """Format a run's length: in days, or in hours, minutes or less if it is shorter than one."""
    return f"{days:.1f} days" if days >= 1 else format_seconds(days * 86400.0)


def format_seconds(value: float) -> str:
    """Format a duration in a fitting unit: 0.00123 gives "1.23 ms", 3.8e6 gives "44.0 days"."""
    for scale, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "min")):
        if value >= 2 * scale:
            return f"{value / scale:.1f} {name}"
    if value == 0:
        return "0 s"
    for scale, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= scale:
            return f"{value / scale:.3g} {name}"
    return f"{value / 1e-6:.3g} µs"
