"""A cluster of the catalogue with other sizes: more devices or fewer, the nearest first, with the same constants."""

import itertools
import math
from collections.abc import Iterator

from shardwise.hardware.catalog_networks import replace_chip
from shardwise.hardware.cluster import Cluster, Shorthand, parse_shorthand
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.published_constants import with_calibration
from shardwise.values.errors import InputError, MissingValueError

MAX_GROWTH = 64  # as many devices


def iterate_sizes(cluster: Cluster, times: float) -> Iterator[Cluster]:
    """Clusters of at least (below 1: at most) so many times the devices, the nearest first; only for clusters of the
    catalogue.

    Switched clusters grow in quarters of their size, a torus by whole multiples of its axes, pods by number. All shrink by
    halves.
    """
    try:
        written = parse_shorthand(cluster.name)
        if written.chip == "local" or _load_like(cluster, cluster.name).topology != cluster.topology:
            return
    except (InputError, MissingValueError):
        return  # a user's own cluster has no rule by which it grows
    for text in _shorthands(written, times):
        try:
            sized = _load_like(cluster, text)
        except (InputError, MissingValueError):
            continue  # not whole hosts, or larger than a pod
        yield replace_chip(sized, cluster.chip)


def _load_like(cluster: Cluster, text: str) -> Cluster:
    """Another cluster of the catalogue, with the constants of this one."""
    found = load_cluster(text)
    return found if cluster.calibration is None else with_calibration(found, cluster.calibration)


def _shorthands(written: Shorthand, times: float) -> Iterator[str]:
    """Shorthands of other sizes. Of several pods the number changes, and each pod stays as it is."""
    if written.num_pods is None:
        for shape in _larger_shapes(written.shape, times) if times >= 1 else _halved_shapes(written.shape):
            yield f"{written.chip}:{'x'.join(map(str, shape))}"
        return
    pod = f"{written.chip}:{'x'.join(map(str, written.shape))}{'_twisted' if written.twisted else ''}"
    counts = range(max(math.ceil(written.num_pods * times), written.num_pods + 1), written.num_pods * MAX_GROWTH + 1)
    for (num_pods,) in ((n,) for n in counts) if times >= 1 else _halved_shapes((written.num_pods,)):
        yield f"{pod}*{num_pods}"


def _larger_shapes(shape: tuple[int, ...], times: float) -> Iterator[tuple[int, ...]]:
    whole = math.prod(shape)
    if len(shape) == 1:
        quarters = range(max(5, math.ceil(4 * times)), 4 * MAX_GROWTH + 1)
        yield from ((whole * quarter // 4,) for quarter in quarters if whole * quarter % 4 == 0)
        return
    factors = itertools.product(range(1, 9), repeat=len(shape))
    shapes = {tuple(size * factor for size, factor in zip(shape, by, strict=True)) for by in factors}
    enough = (other for other in shapes if whole * times <= math.prod(other) and math.prod(other) > whole)
    yield from sorted(enough, key=lambda other: (math.prod(other), max(other), other))


def _halved_shapes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Half the devices, repeatedly: the longest axis is halved."""
    while max(shape) > 1 and max(shape) % 2 == 0:
        longest = shape.index(max(shape))
        shape = (*shape[:longest], shape[longest] // 2, *shape[longest + 1 :])
        yield shape


def double_cluster(cluster: Cluster) -> Cluster | None:
    """The cluster with twice the devices; None where the catalogue has none.

    >>> import shardwise as sw
    >>> double_cluster(sw.load_cluster("h100:64")).name, double_cluster(sw.load_cluster("tpu-v5p:4x4x4")).name
    ('h100:128', 'tpu-v5p:4x4x8')
    """
    found = next(iterate_sizes(cluster, 2.0), None)
    return found if found and found.num_devices == 2 * cluster.num_devices else None
