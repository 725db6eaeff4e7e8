"""Shorthand of a cluster that a text in another form probably means: 256xH100, tpu-v5p-512, a torus by its number of chips."""

from __future__ import annotations

import itertools
import math
import re

from shardwise.hardware.chips import chip_names, get_catalog_entry
from shardwise.values import find_nearest_names
from shardwise.values.input_texts import parse_integer

_SEPARATED = re.compile(r"^(?P<chip>[a-z][a-z0-9.\-]*?)[\s:_x*-]+(?P<count>[0-9]+)(?:\s*gpus?)?$")
_COUNT_FIRST = re.compile(r"^(?P<count>[0-9]+)\s*[x*-]?\s*(?P<chip>[a-z][a-z0-9.\-]*)$")
# The name of each chip's slices, and what one chip adds to the number behind it: some generations count both of their cores.
# Sources: Google Cloud TPU documentation, "Accelerator types" (v4-8 is 4 chips, v5p-8 is 4 chips, v5litepod-8 is 8); MaxText,
# docs/run_maxtext/run_maxtext_via_xpk.md and utils/accelerator_to_spec_map.py.
SLICE_NAMES = {
    "tpu-v3": ("v3", 2), "tpu-v4": ("v4", 2), "tpu-v5e": ("v5litepod", 1), "tpu-v5p": ("v5p", 2), "tpu-v6e": ("v6e", 1),
    "tpu-v7x": ("tpu7x", 2),
}  # fmt: skip
MAX_COUNT_DIGITS = 7


def nearest_shorthand(text: str) -> str | None:
    """Return the shorthand that a text probably means; None if none is near.

    >>> nearest_shorthand("256xH100"), nearest_shorthand("tpu-v5p-512"), nearest_shorthand("tpu-v5e:256")
    ('h100:256', 'tpu-v5p:4x8x8', 'tpu-v5e:16x16')
    """
    lower = text.strip().lower()
    match = _COUNT_FIRST.match(lower) or _SEPARATED.match(lower)
    if match is None:
        name = _exact_chip_name(lower.rstrip(":"))
        return None if name is None else _shorthand(name, 8)
    name = _chip_name(match["chip"])
    if name is None or len(match["count"]) > MAX_COUNT_DIGITS:
        return None
    # The name of a slice (v5p-512) counts cores; a number behind a colon or before the chip counts chips.
    is_slice_name = lower.startswith(match["chip"] + "-") and match.re is _SEPARATED
    count = parse_integer(match["count"])
    return _shorthand(name, count // SLICE_NAMES.get(name, ("", 1))[1] if is_slice_name else count)


def _exact_chip_name(text: str) -> str | None:
    """Return the chip that a text names, by one of its names."""
    plain = text.removeprefix("tpu-")
    chips_by_slice = {slice_name: chip for chip, (slice_name, _) in SLICE_NAMES.items()}
    candidates = (
        text,
        f"tpu-{text}",
        chips_by_slice.get(text),
        chips_by_slice.get(plain),
        chips_by_slice.get(f"tpu{plain}"),
    )
    return next((candidate for candidate in candidates if candidate in chip_names()), None)


def _chip_name(text: str) -> str | None:
    """Return the chip that a text names, or the nearest one."""
    return _exact_chip_name(text) or next(iter(find_nearest_names(text, chip_names())), None)


def _shorthand(name: str, count: int) -> str | None:
    """Return the shorthand of a number of chips: on a torus the shape of the smallest surface; None if the pod has none."""
    entry = get_catalog_entry(name)
    if "torus" not in entry:
        return f"{name}:{count}" if count else None
    limits = sorted(entry["torus"].get("pod", ()))
    shapes = (
        shape for shape in _shapes(count, entry["torus"]["num_axes"])
        if not limits or all(size <= limit for size, limit in zip(shape, limits, strict=True))
    )  # fmt: skip
    best = min(shapes, key=sum, default=None)
    return None if best is None else f"{name}:{'x'.join(map(str, best))}"


def _shapes(count: int, num_axes: int) -> list[tuple[int, ...]]:
    divisors = [size for size in range(1, math.isqrt(max(count, 0)) + 1) if count % size == 0]
    divisors = sorted({*divisors, *(count // size for size in divisors)})
    return [shape for shape in itertools.combinations_with_replacement(divisors, num_axes) if math.prod(shape) == count]
