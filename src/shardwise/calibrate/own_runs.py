"""A user's own runs as observations on the user's own cluster, and why some are set aside."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from shardwise.calibrate.accuracy import SCORED
from shardwise.calibrate.published_runs.case import Case, Prediction, predict_cells, predict_on
from shardwise.calibrate.published_runs.facts import Facts, SkippedRow
from shardwise.calibrate.published_runs.machine import chip_named
from shardwise.calibrate.published_runs.rows import Row, row_from, weights
from shardwise.calibrate.published_runs.software import Software
from shardwise.calibrate.response import Observation, run_observation
from shardwise.cluster.chip import Chip
from shardwise.cluster.chips import catalogue_entry, load_chip, usual_clock
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.networks import links_of, tiers_over
from shardwise.cluster.own import Own
from shardwise.cluster.stacks import Stack, rated
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.network.topology import Pods, Switched, Topology, Torus
from shardwise.planning.abilities import as_run
from shardwise.units import parse_quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that counts: its name, its kind of model ("dense", "moe"), and what was observed."""

    id: str
    kind: str
    observation: Observation


class Usable(NamedTuple):
    """A row that can be priced, its time in seconds, and its case."""

    row: Row
    measured_s: float
    case: Case


class Runs(NamedTuple):
    """The runs, the stack of all of them (None without runs), and how many rows were set aside for which reason."""

    runs: tuple[Run, ...]
    stack: Stack | None
    aside: Counter[str]


def logged_run(
    name: str, model: Architecture, cluster: Cluster, job: Job, layout: Layout, stack: Stack, step_time_s: float
) -> Usable:
    """A run by its launch and its log, of which nothing has to be guessed."""
    software = Software(stack=stack, fused_attention=not stack.unfused_attention, synchronises=True, clock=1.0)
    case = Case(
        architecture=model, cluster=rated(cluster), job=job, layout=as_run(stack, layout), software=software,
        recomputes=(layout.recompute,), approximations=(),
    )  # fmt: skip
    return Usable(row_from(1, {"id": name, "dup_group": name}), step_time_s, case)


def own_runs(rows: Sequence[Row], own: Own, stack: Stack | None, logged: Sequence[Usable] = ()) -> Runs:
    """The rows, and the runs by their logs, that say something about a cluster. `stack`: what all ran with; None: what most of
    them say."""
    usable: list[Usable] = []
    aside: Counter[str] = Counter()
    for found in (*logged, *(_usable(row, own) for row in rows)):
        if isinstance(found, Usable) and found.case.cluster.chip.catalogued != own.nominal.chip.catalogued:
            found = f"of another chip, {found.case.cluster.chip.name}"
        if isinstance(found, Usable):
            usable.append(found)
        else:
            aside[found] += 1
    if stack is None and usable:
        name = Counter(one.case.software.stack.name for one in usable).most_common(1)[0][0]
        stack = next(one.case.software.stack for one in usable if one.case.software.stack.name == name)
        others = [one for one in usable if one.case.software.stack != stack]
        aside.update(f"of another stack, {one.case.software.stack.name}" for one in others)
        usable = [one for one in usable if one not in others]
    counted = weights(one.row for one in usable)
    runs = tuple(_run(one, own, stack, counted[one.row.dup_group]) for one in usable if stack)
    return Runs(runs, stack, aside)


def _usable(row: Row, own: Own) -> Usable | str:
    """The row and its case, or why it is set aside."""
    mine = own.nominal if own.nominal.chip.base is None else None
    try:
        chip = row.cell("chip") if mine and row.cell("chip") else chip_named(row.cell("chip"))
    except SkippedRow as skipped:
        return skipped.kind
    if chip.lower() != own.nominal.chip.catalogued.lower():
        return f"of another chip, {chip}"
    if row.step_time_s is None:
        return "without a measured step time"
    if row.quality not in SCORED:
        return f"of quality {row.quality}: it does not say all that its time depends on"
    found = predict_cells(row.inputs) if mine is None else predict_on(Facts(dict(row.inputs)), mine)
    return Usable(row, row.step_time_s, found.case) if isinstance(found, Prediction) else found.kind


def _run(one: Usable, own: Own, stack: Stack, weight: float) -> Run:
    stated = Facts(dict(one.row.inputs)).flag("flash_attn")
    software = replace(
        one.case.software, stack=stack, fused_attention=not stack.unfused_attention if stated is None else stated,
        clock=usual_clock(own.nominal.chip) if one.case.software.clock == 1.0 else one.case.software.clock,
    )  # fmt: skip
    case = replace(one.case, software=software, cluster=replace(
        one.case.cluster, chip=_own_chip(one.case.cluster.chip, own), topology=_own_network(one.case.cluster.topology, own)
    ))  # fmt: skip
    kind = "moe" if case.architecture.num_experts else "dense"
    return Run(id=one.row.id, kind=kind, observation=run_observation(case, one.measured_s, weight))


def _own_chip(stated: Chip, own: Own) -> Chip:
    """The chip of the cluster, but for what a row states otherwise than the catalogue, where that has the chip."""
    if own.nominal.chip.base is None:
        return own.nominal.chip
    usual = load_chip(own.nominal.chip.catalogued)
    differs = {one.name: getattr(stated, one.name) for one in fields(Chip)}
    differs = {name: value for name, value in differs.items() if value != getattr(usual, name)}
    return replace(own.nominal.chip, **differs)


def _own_network(stated: Topology, own: Own) -> Topology:
    """The network of a row at the cluster's rates, but for a rate that the row states otherwise than the catalogue, where that
    has the chip: of another chip it is a network that the cluster, a plan or the row says."""
    if own.nominal.chip.base is None:
        return stated
    topology, entry = own.nominal.topology, catalogue_entry(own.nominal.chip.catalogued)
    if isinstance(stated, Switched) and isinstance(topology, Switched):
        return _own_tiers(stated, topology, own.nominal.chip, parse_quantity(entry["tiers"][-1]["bytes_per_s"]))
    if isinstance(stated, Switched) or isinstance(topology, Switched):
        return stated
    torus = topology.torus if isinstance(topology, Pods) else topology
    usual = links_of(entry["torus"], torus.shape)
    if isinstance(stated, Pods):
        rate = topology.bytes_per_s if isinstance(topology, Pods) else stated.bytes_per_s
        return replace(stated, torus=_own_links(stated.torus, torus, usual), bytes_per_s=rate)
    return _own_links(stated, torus, usual)


def _own_links(stated: Torus, own: Torus, usual: Torus) -> Torus:
    if stated.bytes_per_s != usual.bytes_per_s:
        return stated
    return replace(stated, bytes_per_s=own.bytes_per_s, hop_latency_s=own.hop_latency_s)


def _own_tiers(stated: Switched, own: Switched, chip: Chip, usual_bytes_per_s: float) -> Switched:
    """The cluster's tiers over the row's devices, or the row's own where these do not come out even."""
    network = tiers_over(own, chip, math.prod(tier.size for tier in stated.tiers))
    if network is None or len(own.tiers) == 1 < len(stated.tiers):
        return stated
    if stated.tiers[-1].bytes_per_s != usual_bytes_per_s:
        outermost = replace(network.tiers[-1], bytes_per_s=stated.tiers[-1].bytes_per_s)
        return Switched(tiers=(*network.tiers[:-1], outermost))
    return network
