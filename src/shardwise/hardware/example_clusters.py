"""Shorthands of clusters that the catalogue's chips are sold as: a host or node, a large pod, a twisted slice, several pods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.hardware.chips import chip_names, get_catalog_entry


def cluster_examples() -> tuple[str, ...]:
    """Return shorthands of each chip: of one host or node, and of the largest that has one shape.

    >>> [name for name in cluster_examples() if name.startswith("tpu-v5e")]
    ['tpu-v5e:4x2', 'tpu-v5e:16x16', 'tpu-v5e:16x16*2']
    """
    return (*(cluster for name in chip_names() for cluster in _clusters_of_chip(name)), "local:4")


def _clusters_of_chip(name: str) -> Iterator[str]:
    entry = get_catalog_entry(name)
    if "torus" in entry:
        pod = [entry["torus"]["pod"]] if "pod" in entry["torus"] else []
        yield from _shorthands(name, [entry["host_shape"], *pod])
        yield from _special_slices(name, entry)
    else:
        sizes = [tier["size"] for tier in entry["tiers"] if "size" in tier]
        shapes = [sizes] if sizes else [[1]]
        shapes += [[8 * shapes[0][0]]] if len(entry["tiers"]) > len(sizes) else []
        yield from _shorthands(name, shapes)


def _shorthands(name: str, shapes: Sequence[Sequence[int]]) -> tuple[str, ...]:
    return tuple(f"{name}:{'x'.join(map(str, shape))}" for shape in shapes)


def _special_slices(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield the smallest twisted slice, and two whole pods, where the chip has them."""
    torus = entry["torus"]
    if torus.get("twists"):
        yield f"{name}:4x4x8_twisted"
    if "pod" in torus and "dcn_bytes_per_s_per_host" in entry:
        yield f"{_shorthands(name, [torus['pod']])[0]}*2"
