"""Sizes that a slider has: divisors, doublings, clusters of a chip."""

from __future__ import annotations

import math

from shardwise.hardware import get_catalog_entry
from shardwise.hardware.cluster import parse_shorthand
from shardwise.values import ShardwiseError

MOST_OPTIONS = 24  # of a slider
MOST_SLIDER = 1 << 14  # devices, and what else doubles


def divisors(whole: int, own: int, most: int) -> list[int]:
    """The divisors of a number, at most so large; and the one taken."""
    found = [number for number in range(1, min(whole, most, MOST_SLIDER) + 1) if whole % number == 0]
    return sorted({*found[:MOST_OPTIONS], own})


def doublings(own: int, least: int, most: int) -> list[int]:
    """Powers of two between two numbers, the number taken, and its halves and doubles."""
    powers = {1 << exponent for exponent in range(40) if least <= 1 << exponent <= most}
    near = {own * 2**step for step in range(3)} | {own // 2**step for step in range(3) if own % 2**step == 0}
    return sorted({*powers, own} | {number for number in near if least <= number <= most})[: 2 * MOST_OPTIONS]


def has_shorthand(cluster: str) -> bool:
    try:
        parse_shorthand(cluster)
    except ShardwiseError:
        return False
    return True


def num_devices_of(cluster: str) -> int:
    found = parse_shorthand(cluster)
    return math.prod(found.shape) * (found.num_pods or 1)


def other_sizes(cluster: str) -> list[str]:
    """The cluster in other sizes: counts for switched chips, shapes that double their smallest dim for a torus."""
    found = parse_shorthand(cluster)
    if len(found.shape) == 1:
        return [f"{found.chip}:{size}" for size in doublings(found.shape[0], 8, MOST_SLIDER)]
    shapes, shape = [], [4] * len(found.shape)
    while math.prod(shape) <= MOST_SLIDER:
        shapes.append(tuple(shape))
        shape[shape.index(min(shape))] *= 2
    every = sorted({*(tuple(sorted(one)) for one in shapes), found.shape}, key=math.prod)
    return [f"{found.chip}:{'x'.join(map(str, one))}" for one in every]


def on_chip(name: str, most: int) -> str:
    """A cluster of a chip with about so many devices: as many of switched chips, of a torus the largest shape within them."""
    entry = get_catalog_entry(name)
    if "torus" not in entry:
        return f"{name}:{most}"
    smallest = f"{name}:{'x'.join(['4'] * entry['torus']['num_axes'])}"
    return [smallest, *(one for one in other_sizes(smallest) if num_devices_of(one) <= most)][-1]
