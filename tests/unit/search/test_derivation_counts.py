"""Number of derivations in a search of a model with several kinds of layers, which does not depend on the machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from shardwise.derive import sharded_unit
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.choices import Choices
from shardwise.layout.layout import Layout
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.price import Problem, unit_inputs
from shardwise.price.estimate import estimate
from shardwise.price.unit_inputs import UnitCostInputs
from shardwise.search.vectorised.search_layouts import search_layouts
from shardwise.values.engine_policies import IssuePolicy

HYBRID = replace(
    load_model("llama-3-8b"), name="hybrid", layer_pattern=("window*3", "block"),
    layer_kinds={"window": {"sliding_window": 1024, "num_heads": 16, "num_kv_heads": 4, "positions": "none"}},
)  # fmt: skip
RECOMPUTE = ("none", "full")


def test_a_hybrid_derives_each_kind_in_the_modes_that_layouts_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below ZeRO-3 no pass gathers weights, so a kind is derived with recomputation under ZeRO-3 only. Modes without layouts,
    such as asynchronous tensor parallelism without sequence parallelism, are not derived."""
    derived: list[tuple[str, ShardingScheme]] = []
    derive = unit_inputs.derive_cost_inputs

    def counting(scheme: ShardingScheme, name: str, policy: IssuePolicy) -> UnitCostInputs:
        derived.append((name, scheme))
        return derive(scheme, name, policy)

    monkeypatch.setattr(unit_inputs, "derive_cost_inputs", counting)
    for cached in (unit_inputs._cached_cost_inputs, sharded_unit._derive_cached, sharded_unit._derive_update):
        cached.cache_clear()
    problem = Problem(HYBRID, load_cluster("h100:16"), Job(global_batch_tokens=2**19, seq_len=4096))
    search_layouts(problem, choices=Choices(recompute=RECOMPUTE))
    assert len(derived) == len(set(derived))
    assert not [scheme for _, scheme in derived if scheme.async_tp and not scheme.sequence_parallel]
    counts = Counter(name for name, _ in derived)
    modes = {(scheme.sequence_parallel, scheme.cp_variant, scheme.async_tp) for _, scheme in derived}
    for kind in ("window", "block"):
        under_zero_3 = [scheme for name, scheme in derived if name == kind and scheme.zero_stage == 3]
        assert len(under_zero_3) <= len(modes) * len(RECOMPUTE)
        assert counts[kind] <= len(modes) * (len(RECOMPUTE) + 3)
    # the update of a kind depends on the ZeRO stage and on the specs of its gradients, not on what is recomputed
    assert sharded_unit._derive_update.cache_info().misses <= len(derived) // 2


def test_kinds_that_differ_in_sizes_share_a_derivation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices are the same to the last digit as with a derivation for each kind."""
    kinds = {
        "window": {"sliding_window": 1024}, "wide": {"d_ff": 28672, "num_kv_heads": 4}, "mlp": {"mixer": "none"},
        "narrow_mlp": {"mixer": "none", "d_ff": 7168},
    }  # fmt: skip
    model = replace(
        load_model("llama-3-8b"),
        name="alike",
        layer_kinds=kinds,
        layer_pattern=("window", "wide", "mlp", "narrow_mlp", "block", "mlp", "wide", "block") * 4,
    )
    units = (*model.structure.layer_units, "embedding", "head")
    assert [unit_inputs.first_alike(model.structure, unit) for unit in units] == [
        "window", "window", "mlp", "mlp", "window", "embedding", "head",
    ]  # fmt: skip
    problem = Problem(model, load_cluster("h100:16"), Job(global_batch_tokens=2**19, seq_len=4096))
    layouts = [Layout.parse(text) for text in ("fsdp=8 tp=2 zero_stage=3", "fsdp=4 pp=4 zero_stage=1 recompute=full")]
    shared = [estimate(problem, layout) for layout in layouts]
    monkeypatch.setattr(unit_inputs, "first_alike", lambda structure, unit: unit)
    for layout, of_shared in zip(layouts, shared, strict=True):
        of_each = estimate(problem, layout)
        assert of_each.time == of_shared.time
        assert of_each.memory == of_shared.memory
