"""What the tables of a search hold while they are made."""

from __future__ import annotations

import weakref
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from shardwise.cluster.load import load_cluster
from shardwise.cost.rates import Work
from shardwise.cost.unit import UnitPricer
from shardwise.cost.unit_costs import ActivationCost
from shardwise.job import Job
from shardwise.layout.family import Family
from shardwise.model.load import load_model
from shardwise.network.placed import Links
from shardwise.search.search import search
from shardwise.search.space import Choices
from shardwise.symbolic import Values

MODEL, CLUSTER = load_model("tiny-moe-19m"), load_cluster("h100:8")
JOB = Job(global_batch_tokens=2**18, seq_len=512)


def test_what_kernels_do_is_not_kept_for_other_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search prices its arrays at one rate; all that kernels do there would be larger than the tables."""
    arrays: list[weakref.ref[Any]] = []
    work, activation = UnitPricer.work, UnitPricer.activation

    def seen(self: UnitPricer, *given: Any) -> Work:
        found = work(self, *given)
        arrays.append(weakref.ref(found.num_bytes))
        return found

    def priced(self: UnitPricer, *given: Any) -> ActivationCost:
        found = activation(self, *given)
        assert not [array for array in arrays if array() is not None]
        return found

    monkeypatch.setattr(UnitPricer, "work", seen)
    monkeypatch.setattr(UnitPricer, "activation", priced)
    assert search(MODEL, CLUSTER, JOB, choices=Choices(micro_batch_seqs=(1, 2))).num_layouts
    assert arrays


def test_what_depends_on_sizes_has_no_row_for_each_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all the modes that are compared only what moves is told apart by what it moves over."""
    activation, lengths = UnitPricer.activation, set()

    def priced(self: UnitPricer, name: str, family: Family, values: Values, links: Links) -> ActivationCost:
        found = activation(self, name, family, values, links)
        columns = [getattr(found, field.name) for field in fields(found)]
        of_sizes = {np.shape(column) for column in columns if not isinstance(column, dict)}
        moved = {np.shape(column) for traffic in columns if isinstance(traffic, dict) for column in traffic.values()}
        assert of_sizes <= {(), np.shape(values["micro_batch_seqs"])}
        assert moved <= {(), np.shape(links.sizes)}
        lengths.add((len(values["micro_batch_seqs"]), len(links.sizes)))
        return found

    monkeypatch.setattr(UnitPricer, "activation", priced)
    search(MODEL, load_cluster("h100:16"), JOB, choices=Choices(micro_batch_seqs=(1, 2)))
    assert all(num_sizes < num_rows for num_sizes, num_rows in lengths)
    assert lengths
