"""Other sizes of a cluster of the catalogue: more devices or fewer, the nearest first, with the same constants."""

import itertools
import math
from collections.abc import Iterator

from shardwise.hardware.catalog_networks import replace_chip
from shardwise.hardware.cluster import Cluster, Shorthand, parse_shorthand
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.published_constants import with_calibration
from shardwise.values import InputError, MissingValueError

MAX_GROWTH = 64  # times the devices


def iterate_sizes(cluster: Cluster, growth: float) -> Iterator[Cluster]:
    """Yield clusters of at least (below 1: at most) `growth` times the devices, the nearest first; none for users' own
    clusters.

    Switched clusters grow in quarters of their size, a torus by whole multiples of its axes, pods by number. All shrink by
    halves.
    """
    try:
        shorthand = parse_shorthand(cluster.name)
        if shorthand.chip == "local" or _load_like(cluster, cluster.name).topology != cluster.topology:
            return
    except (InputError, MissingValueError):
        return  # a user's own cluster has no rule for other sizes
    for text in _shorthands(shorthand, growth):
        try:
            resized = _load_like(cluster, text)
        except (InputError, MissingValueError):
            continue  # not whole hosts, or larger than a pod
        yield replace_chip(resized, cluster.chip)


def _load_like(cluster: Cluster, text: str) -> Cluster:
    """Return another cluster of the catalogue with the constants of this one."""
    loaded = load_cluster(text)
    return loaded if cluster.calibration is None else with_calibration(loaded, cluster.calibration)


def _shorthands(shorthand: Shorthand, growth: float) -> Iterator[str]:
    """Yield shorthands of other sizes. With several pods their number changes, and each pod stays as it is."""
    if shorthand.num_pods is None:
        for shape in _larger_shapes(shorthand.shape, growth) if growth >= 1 else _halved_shapes(shorthand.shape):
            yield f"{shorthand.chip}:{'x'.join(map(str, shape))}"
        return
    pod = f"{shorthand.chip}:{'x'.join(map(str, shorthand.shape))}{'_twisted' if shorthand.twisted else ''}"
    counts = range(
        max(math.ceil(shorthand.num_pods * growth), shorthand.num_pods + 1), shorthand.num_pods * MAX_GROWTH + 1
    )
    for (num_pods,) in ((n,) for n in counts) if growth >= 1 else _halved_shapes((shorthand.num_pods,)):
        yield f"{pod}*{num_pods}"


def _larger_shapes(shape: tuple[int, ...], growth: float) -> Iterator[tuple[int, ...]]:
    count = math.prod(shape)
    if len(shape) == 1:
        quarters = range(max(5, math.ceil(4 * growth)), 4 * MAX_GROWTH + 1)
        yield from ((count * quarter // 4,) for quarter in quarters if count * quarter % 4 == 0)
        return
    multiples = itertools.product(range(1, 9), repeat=len(shape))
    shapes = {tuple(size * factor for size, factor in zip(shape, factors, strict=True)) for factors in multiples}
    large_enough = (larger for larger in shapes if count * growth <= math.prod(larger) and math.prod(larger) > count)
    yield from sorted(large_enough, key=lambda larger: (math.prod(larger), max(larger), larger))


def _halved_shapes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield shapes with half the devices each time: the longest axis is halved."""
    while max(shape) > 1 and max(shape) % 2 == 0:
        longest = shape.index(max(shape))
        shape = (*shape[:longest], shape[longest] // 2, *shape[longest + 1 :])
        yield shape


def double_cluster(cluster: Cluster) -> Cluster | None:
    """Return the cluster with twice the devices, or None if the catalogue has none.

    >>> import shardwise as sw
    >>> double_cluster(sw.load_cluster("h100:64")).name, double_cluster(sw.load_cluster("tpu-v5p:4x4x4")).name
    ('h100:128', 'tpu-v5p:4x4x8')
    """
    doubled = next(iterate_sizes(cluster, 2.0), None)
    return doubled if doubled and doubled.num_devices == 2 * cluster.num_devices else None
