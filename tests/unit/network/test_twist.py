"""Twisted tori: distances counted by walking the graph, and the paper's gain of an AllToAll."""

from __future__ import annotations

import itertools
import math
from collections import deque
from functools import partial

import numpy as np
import pytest

import shardwise as sw
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.network.compare_collective_algorithms import collective_report
from shardwise.hardware.network.links import Cut
from shardwise.hardware.network.torus import Torus, all_to_all_link, hop_distances, is_twistable, twisted_subtori
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.search.plan_file import parse_plan, plan_payload
from shardwise.values.errors import InputError

from .topologies import load_topology

SHAPES = [(4, 4, 8), (4, 8, 8), (8, 4, 4), (8, 8, 4), (8, 8, 16)]


torus = partial(load_topology, kind=Torus)


def neighbours(shape: tuple[int, ...], place: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """Axis and device of every link, by hand: a step off the end of a short axis comes back half of each long one later."""
    short, links = min(shape), []
    for axis, step in itertools.product(range(len(shape)), (1, -1)):
        device = list(place)
        device[axis] += step
        if not 0 <= device[axis] < shape[axis] and shape[axis] == short:
            device = [x + short if size == 2 * short else x for x, size in zip(device, shape, strict=True)]
        links.append((axis, tuple(x % size for x, size in zip(device, shape, strict=True))))
    return links


def walk_graph(shape: tuple[int, ...]) -> tuple[dict[tuple[int, ...], int], list[float]]:
    """Breadth-first from one device: hops to each, and the load of each axis when all shortest ways carry the same.

    The load counts hops along the axis, over all targets: every edge's share of the shortest ways that use it.
    """
    start = (0,) * len(shape)
    num_hops, num_paths, order, queue = {start: 0}, {start: 1}, [start], deque([start])
    while queue:
        device = queue.popleft()
        for _, neighbour in neighbours(shape, device):
            if neighbour not in num_hops:
                num_hops[neighbour], num_paths[neighbour] = num_hops[device] + 1, 0
                order.append(neighbour)
                queue.append(neighbour)
            if num_hops[neighbour] == num_hops[device] + 1:
                num_paths[neighbour] += num_paths[device]
    load, share_of_paths = [0.0] * len(shape), dict.fromkeys(order, 0.0)
    for neighbour in reversed(order[1:]):
        share_of_paths[neighbour] += 1.0
        for axis, device in neighbours(shape, neighbour):
            if num_hops[device] == num_hops[neighbour] - 1:
                share = share_of_paths[neighbour] * num_paths[device] / num_paths[neighbour]
                share_of_paths[device] += share
                load[axis] += share
    return num_hops, load


@pytest.mark.parametrize("shape", [*SHAPES, (4, 8)])
def test_distances_equal_those_of_the_graph(shape: tuple[int, ...]) -> None:
    far, _ = walk_graph(shape)
    distances, count = hop_distances(shape), math.prod(shape)
    assert len(far) == count
    assert distances.mean == pytest.approx(sum(far.values()) / count)
    assert distances.diameter == max(far.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_all_axes_carry_equal_loads(shape: tuple[int, ...]) -> None:
    """An equal part by each shortest vector loads every axis alike, so no way of sending can take less: the mean over 3 axes.
    Sharing by single edges instead comes close."""
    distances, (_, load) = hop_distances(shape), walk_graph(shape)
    assert distances.mean_hops == pytest.approx([distances.mean / 3] * 3)
    assert max(load) / math.prod(shape) == pytest.approx(distances.mean / 3, rel=0.12)


@pytest.mark.parametrize(("shape", "measured"), [("4x4x8", 1.63), ("4x8x8", 1.31)])
def test_the_gain_of_an_all_to_all_equals_the_papers(shape: str, measured: float) -> None:
    """Jouppi et al., ISCA 2023: 1.63 and 1.31 times the throughput on 4x4x8 and 4x8x8; the graph bounds it by 1.75 and 1.39."""
    plain, twisted = torus(f"tpu-v4:{shape}"), torus(f"tpu-v4:{shape}_twisted")
    cuts = [Cut(size, 1) for size in plain.shape]
    gain = all_to_all_link(plain, cuts).seconds_per_byte / all_to_all_link(twisted, cuts).seconds_per_byte
    assert measured < gain < 1.08 * measured
    assert twisted.gather_link(cuts).latency_s < plain.gather_link(cuts).latency_s
    assert twisted.gather_link(cuts).seconds_per_byte == plain.gather_link(cuts).seconds_per_byte
    assert twisted.permute_link(cuts).latency_s == hop_distances(plain.shape).diameter * 1e-6


def test_groups_that_form_a_ring() -> None:
    """A ring around a short axis ends at a shifted device, unless the group has the whole axis of the shift."""
    twisted = torus("tpu-v4:4x4x8_twisted")
    assert twisted.ring_axes([Cut(4, 1), Cut(1, 1), Cut(1, 1)]) == (False, False, False)
    assert twisted.ring_axes([Cut(1, 1), Cut(1, 1), Cut(8, 1)]) == (False, False, True)
    assert twisted.ring_axes([Cut(4, 1), Cut(4, 1), Cut(1, 1)]) == (False, False, False)
    assert twisted.ring_axes([Cut(4, 1), Cut(1, 1), Cut(8, 1)]) == (True, False, True)
    assert twisted.ring_axes([Cut(4, 1), Cut(4, 1), Cut(8, 1)]) == (True, True, True)
    assert list(twisted_subtori((4, 4, 8))) == [(0, 2), (1, 2), (0, 1, 2)]
    assert list(twisted_subtori((8, 4, 8))) == [(0, 1, 2)]


def test_a_plane_of_a_twisted_torus_is_a_twisted_torus() -> None:
    twisted, plain = torus("tpu-v4:4x4x8_twisted"), torus("tpu-v4:4x4x8")
    plane = [Cut(4, 1), Cut(1, 1), Cut(8, 1)]
    gain = all_to_all_link(plain, plane).seconds_per_byte / all_to_all_link(twisted, plane).seconds_per_byte
    assert gain == pytest.approx(2.0 / max(hop_distances((4, 8)).mean_hops))
    part = [Cut(2, 1), Cut(4, 1), Cut(8, 1)]
    assert all_to_all_link(twisted, part).seconds_per_byte >= all_to_all_link(plain, part).seconds_per_byte


def test_arrays_of_cuts_equal_single_cuts() -> None:
    twisted = torus("tpu-v4:4x4x8_twisted")
    rows = [(4, 4, 8), (4, 1, 8), (2, 4, 8), (4, 4, 1), (1, 1, 8)]
    arrays = [Cut(np.array(sizes), np.ones(len(rows), dtype=int)) for sizes in zip(*rows, strict=True)]
    for link_of in (twisted.gather_link, twisted.permute_link, lambda cuts: all_to_all_link(twisted, cuts)):
        batched = link_of(arrays)
        for index, row in enumerate(rows):
            single = link_of([Cut(size, 1) for size in row])
            assert batched.seconds_per_byte[index] == pytest.approx(single.seconds_per_byte, rel=1e-14)
            assert batched.latency_s[index] == pytest.approx(single.latency_s, rel=1e-14)


@pytest.mark.parametrize("shape", [(4, 4, 4), (4, 4, 16), (2, 2, 4), (6, 6, 12), (4, 8), (4, 8, 16), (5, 5, 10)])
def test_impossible_twists_are_refused(shape: tuple[int, ...]) -> None:
    assert not is_twistable(shape)
    assert all(map(is_twistable, SHAPES))


def test_the_report_states_the_gain_of_the_twist() -> None:
    twisted = torus("tpu-v4:4x4x8_twisted")
    report = collective_report("all_to_all", 1e9, twisted, [Cut(4, 1), Cut(4, 1), Cut(8, 1)])
    times = {alternative.name: alternative.time_s for alternative in report.alternatives}
    assert (report.algorithm, report.hops) == ("twisted", 6)
    assert times["ring"] / report.time_s == pytest.approx(2.0 / (3.4375 / 3))


def test_a_plan_on_a_twisted_slice_keeps_its_file_and_another_shape_is_refused() -> None:
    plan = sw.plan(
        load_model("qwen3-30b-a3b"), load_cluster("tpu-v5p:4x4x8_twisted"), Job(global_batch_tokens=2**20, seq_len=4096)
    )
    payload = plan_payload(plan)
    assert parse_plan(payload) == plan
    payload["cluster"]["topology"]["shape"] = (4, 8, 4)
    assert parse_plan(payload).cluster.num_devices == 128
    payload["cluster"]["topology"]["shape"] = (4, 4, 12)
    with pytest.raises(InputError, match=r"found a twisted torus of shape .*; KxKx2K or Kx2Kx2K in any order"):
        parse_plan(payload)
