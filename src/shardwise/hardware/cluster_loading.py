"""Clusters by name: a shorthand of chip and size, processes of this host, or a user's own file; with the constants of a
stack, and with fewer devices, as after the loss of hosts. Other sizes of a cluster of the catalogue have the same constants.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from shardwise.hardware.chips import LOCAL, load_chip
from shardwise.hardware.cluster import (
    Cluster,
    Shorthand,
    build_shorthand_topology,
    parse_shorthand,
    replace_chip,
    resize_tiers,
)
from shardwise.hardware.cluster_files import MeasuredCluster, read_cluster_file
from shardwise.hardware.network.switches import Switched, Tier
from shardwise.hardware.published_constants import with_calibration, with_published_constants
from shardwise.hardware.stacks import Stack, get_stack
from shardwise.values import InputError, MissingValueError


def is_cluster(text: str) -> bool:
    """Return True for a cluster's shorthand or file, False for the name of a bare chip."""
    return ":" in text or _is_file(text)


def _is_file(text: str) -> bool:
    return text.strip().lower().endswith(".toml")


def load_cluster(text: str, *, stack: str | None = None) -> Cluster:
    """Return a cluster from its shorthand (`tpu-v5p:16x20x28`, `h100:512`, `local:4`) or from a file (`my-cluster.toml`).

    `tpu-v5e:16x16*4`: four slices on the data-centre network; `tpu-v4:4x4x8_twisted`: a twisted torus; `local:N`: N processes
    that share the host of the catalogue's `cpu`. `stack` names a software stack (`shardwise show stacks`), whose constants
    come from published runs: step times are then predictions. Without one they are lower bounds.

    Raises `InputError` for a text that is neither, an unknown chip or stack, and a file that is wrong; `MissingValueError` for a
    value without a source.

    >>> cluster = load_cluster("tpu-v5e:16x16*4")
    >>> cluster.num_devices, cluster.chip.name, cluster.calibration
    (1024, 'tpu-v5e', None)
    >>> load_cluster("h100:512", stack="nemo-25").calibration.stack
    'nemo-25'
    """
    return apply_stack(load_measured_cluster(text), None if stack is None else get_stack(stack))


def apply_stack(cluster: MeasuredCluster, stack: Stack | None = None) -> Cluster:
    """Return the cluster with a stack's published constants, with its own calibration, or nominal without either.

    Raises `InputError` if there are both.
    """
    name, calibration = cluster.nominal.name, cluster.calibration
    if stack is not None:
        if calibration is not None:
            raise InputError(
                f"stack: found {stack.name} for {name}, which has a [calibration] of its own ({calibration.stack}); leave out "
                "one of the two"
            )
        return with_published_constants(cluster.nominal, stack)
    return cluster.nominal if calibration is None else with_calibration(cluster.nominal, calibration)


def load_measured_cluster(text: str) -> MeasuredCluster:
    """Return the cluster at nominal rates, and its measurements apart."""
    if _is_file(text):
        return read_cluster_file(text.strip())
    shorthand = parse_shorthand(text)
    if shorthand.chip == LOCAL:
        return MeasuredCluster(_local_cluster(text, shorthand), None)
    chip = load_chip(shorthand.chip)
    return MeasuredCluster(
        Cluster(name=text.strip().lower(), chip=chip, topology=build_shorthand_topology(shorthand, chip)), None
    )


def _local_cluster(text: str, shorthand: Shorthand) -> Cluster:
    """Return N processes that share one host: each has an equal part, and what one sends another reads from memory.

    Assumes: every byte sent is written once and read once, so half of the memory's bandwidth; no latency. A bound.
    """
    if len(shorthand.shape) != 1 or shorthand.twisted or shorthand.num_pods:
        raise InputError(f"cluster: found {text!r}; local:N with a number of processes is required, such as local:4")
    host, count = load_chip("cpu"), shorthand.shape[0]
    shared = f"an equal part, 1/{count}, of the catalogue's cpu: "
    chip = replace(
        host, name=LOCAL, base=None, peak_flops_per_s={dtype: peak / count for dtype, peak in host.peak_flops_per_s.items()},
        memory_bytes=host.memory_bytes / count, memory_bytes_per_s=host.memory_bytes_per_s / count,
        host_shape=(count,), sources={key: shared + source for key, source in host.sources.items()},
    )  # fmt: skip
    tier = Tier(
        name="shared memory", size=count, bytes_per_s=chip.memory_bytes_per_s / 2, fraction=1.0, hop_latency_s=0.0
    )
    return Cluster(name=text.strip().lower(), chip=chip, topology=Switched(tiers=(tier,)))


def resize_cluster(cluster: Cluster, num_devices: int) -> Cluster:
    """Return the cluster with another number of devices of the same hosts, at the measured rates if there are any.

    Raises `InputError` for a number that its network does not have, and for a torus, whose parts are slices with a shape.

    >>> resize_cluster(load_cluster("h100:64"), 56).name
    'h100:56'
    >>> resize_cluster(load_cluster("local:4"), 2).num_devices
    2
    """
    prefix = cluster.name.partition(":")[0]
    name = f"{prefix}:{num_devices}"
    if cluster.chip.name == LOCAL:
        return replace(load_cluster(name), calibration=cluster.calibration)
    network = (
        resize_tiers(cluster.topology, cluster.chip, num_devices) if isinstance(cluster.topology, Switched) else None
    )
    if network is None:
        raise InputError(
            f"cluster: {cluster.name} has no part of {num_devices} devices; whole hosts and leaves of a switched network are "
            "required, or a plan for the cluster that there is"
        )
    return replace(cluster, name=name, topology=network, levels=())


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
