"""Contents of a search's tables while they are built."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.network.topology import GroupLinks, collective_s
from shardwise.layout.choices import Choices
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.price import Problem, unit_cost
from shardwise.price.roofline import KernelWork
from shardwise.price.unit_cost import ActivationCost, UnitPricer
from shardwise.price.unit_inputs import UnitCostInputs
from shardwise.search.vectorised.search_layouts import search_layouts
from shardwise.sharding.collectives import CollectiveKind
from shardwise.sharding.spec import Axes
from shardwise.step.instructions import Kernel
from shardwise.values.symbolic import SymbolValues, Value

MODEL, CLUSTER = load_model("tiny-moe-19m"), load_cluster("h100:8")
JOB = Job(global_batch_tokens=2**18, seq_len=512)


def test_work_of_kernels_is_not_kept_after_pricing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search prices its arrays at a single rate; the work of all kernels would be larger than the tables."""
    arrays: list[weakref.ref[Any]] = []
    work, activation = UnitPricer.work, UnitPricer.activation

    def recorded_work(self: UnitPricer, *arguments: Any) -> KernelWork:
        kernel_work = work(self, *arguments)
        arrays.append(weakref.ref(kernel_work.num_bytes))
        return kernel_work

    def priced(self: UnitPricer, *arguments: Any) -> ActivationCost:
        cost = activation(self, *arguments)
        assert not [array for array in arrays if array() is not None]
        return cost

    monkeypatch.setattr(UnitPricer, "work", recorded_work)
    monkeypatch.setattr(UnitPricer, "activation", priced)
    assert search_layouts(Problem(MODEL, CLUSTER, JOB), choices=Choices(micro_batch_seqs=(1, 2))).num_layouts
    assert arrays


def test_columns_of_sizes_have_no_row_for_each_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only traffic depends on the links, for all modes of the search."""
    activation, lengths = UnitPricer.activation, set()

    def priced(
        self: UnitPricer, name: str, scheme: ShardingScheme, values: SymbolValues, links: GroupLinks
    ) -> ActivationCost:
        cost = activation(self, name, scheme, values, links)
        columns = [getattr(cost, field.name) for field in fields(cost)]
        compute_shapes = {np.shape(column) for column in columns if not isinstance(column, dict)}
        traffic_shapes = {
            np.shape(column) for traffic in columns if isinstance(traffic, dict) for column in traffic.values()
        }
        assert compute_shapes <= {(), np.shape(values["micro_batch_seqs"])}
        assert traffic_shapes <= {(), np.shape(links.sizes)}
        lengths.add((len(values["micro_batch_seqs"]), len(links.sizes)))
        return cost

    monkeypatch.setattr(UnitPricer, "activation", priced)
    search_layouts(Problem(MODEL, load_cluster("h100:16"), JOB), choices=Choices(micro_batch_seqs=(1, 2)))
    assert all(num_sizes < num_rows for num_sizes, num_rows in lengths)
    assert lengths


def test_work_shared_by_families_is_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel at the same values, and a collective of the same bytes over the same links, in any number of schemes."""
    kernels: Counter[Hashable] = Counter()
    collectives: Counter[Hashable] = Counter()
    requests: Counter[str] = Counter()
    alive: list[object] = []  # so that identities are not reused
    work, kernel_s, of_unit = UnitPricer.work, UnitPricer.kernel_s, UnitPricer.collective_s

    def worked_out(self: UnitPricer, kernel: Kernel, parts: UnitCostInputs, values: SymbolValues) -> KernelWork:
        alive.extend((kernel, values))
        kernels[id(kernel), parts.products.narrow, id(values)] += 1
        return work(self, kernel, parts, values)

    def moved(kind: CollectiveKind, axes: Axes, num_bytes: Value, links: GroupLinks, copies: Value) -> Value:
        alive.extend((num_bytes, links))
        collectives[kind, axes, np.asarray(num_bytes).tobytes(), id(links), copies] += 1
        return collective_s(kind, axes, num_bytes, links, copies)

    def counted(name: str, usual: Callable[..., Value]) -> Callable[..., Value]:
        return lambda *arguments: requests.update([name]) or usual(*arguments)

    monkeypatch.setattr(UnitPricer, "work", worked_out)
    monkeypatch.setattr(unit_cost, "collective_s", moved)
    monkeypatch.setattr(UnitPricer, "kernel_s", counted("kernels", kernel_s))
    monkeypatch.setattr(UnitPricer, "collective_s", counted("collectives", of_unit))
    search_layouts(Problem(MODEL, CLUSTER, JOB), choices=Choices(micro_batch_seqs=(1, 2)))
    assert set(kernels.values()) == {1}
    assert requests["kernels"] > 5 * len(kernels)
    assert requests["collectives"] > 3 * collectives.total()
