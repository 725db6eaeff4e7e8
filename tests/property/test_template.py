"""A template evaluated at the degrees of a layout is the list of that layout: collectives in count, bytes and seconds."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.network.topology import GroupLinks
from shardwise.hardware.stacks import get_stack
from shardwise.layout.layout import Layout
from shardwise.layout.placement import cuts_by_axis, default_placement
from shardwise.layout.rules.table import violations
from shardwise.model.decoder import units_of_structure
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.price import Problem
from shardwise.price.layout_pricer import Pricing
from shardwise.price.unit_inputs import UnitCostInputs
from shardwise.step.instructions import UnitCollective
from shardwise.step.unit_instructions import lower_unit

MODELS = (
    "llama-3-8b", "gpt-3-6.7b", "gpt-neox-20b", "falcon-40b", "gemma-2-2b", "qwen2.5-7b", "olmo-2-7b", "mixtral-8x7b",
    "qwen1.5-moe-a2.7b", "qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b",
)  # fmt: skip
SEQ_LEN = 4096
LAYOUTS = st.builds(
    dict, dp=st.sampled_from([1, 2]), fsdp=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2, 4]), cp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]), ep=st.sampled_from([1, 2, 4]), zero_stage=st.integers(0, 3), sequence_parallel=st.booleans(),
    recompute=st.sampled_from(["none", "selective", "full"]), cp_variant=st.sampled_from(["all_gather", "zigzag", "ulysses"]),
)  # fmt: skip
Key = tuple[str, str, tuple[str, ...]]


def legal(model: str, choices: dict[str, object]) -> tuple[Pricing, GroupLinks] | None:
    """The pricing of a layout under a stack with buckets, if it is legal."""
    architecture = load_model(model)
    layout = Layout(**choices, micro_batch_seqs=1)  # type: ignore[arg-type]
    devices = layout.num_devices
    cluster = load_cluster(f"h100:{devices}", stack="torchtitan")
    job = Job(global_batch_tokens=SEQ_LEN * layout.num_replicas * 2 * layout.pp, seq_len=SEQ_LEN)
    if violations(architecture, job, devices, layout):
        return None
    pricing = Pricing(Problem(architecture, cluster, job), layout)
    placed = cuts_by_axis(pricing.topology, default_placement(pricing.topology), pricing.degrees)
    return pricing, GroupLinks(pricing.topology, placed)


def totals(
    pricing: Pricing, links: GroupLinks, parts: UnitCostInputs, traffic: tuple[UnitCollective, ...]
) -> dict[Key, tuple[float, float, float]]:
    """Count, bytes and seconds by pass, kind and axes of more than one device."""
    rows: dict[Key, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for collective in traffic:
        axes = tuple(axis for axis in collective.axes if pricing.degrees[axis] > 1)
        count, elements = collective.extent(pricing.values, pricing.pricer.max_bucket_elements)
        if axes and count:
            num_bytes = elements * pricing.pricer.formats.collective_width(collective, parts.products)
            seconds = pricing.pricer.collective_s(collective, parts, pricing.values, links)
            row = rows[collective.phase, str(collective.kind), axes]
            rows[collective.phase, str(collective.kind), axes] = [
                a + b for a, b in zip(row, (count, num_bytes, seconds), strict=True)
            ]
    return {key: (row[0], row[1], row[2]) for key, row in rows.items()}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("model", MODELS)
@given(choices=LAYOUTS)
@settings(suppress_health_check=[HealthCheck.filter_too_much])
def test_a_template_at_some_degrees_is_the_list_of_the_layout(model: str, choices: dict[str, object]) -> None:
    has_experts = bool(load_model(model).num_experts)
    pricing_and_links = legal(model, choices | {"ep": choices["ep"] if has_experts else 1})
    assume(pricing_and_links is not None)
    assert pricing_and_links
    pricing, links = pricing_and_links
    scheme = pricing.scheme
    single = frozenset(axis for axis, degree in pricing.degrees.items() if degree == 1)
    policy = get_stack("torchtitan").policy
    for name in (*units_of_structure(scheme.structure), "carry"):
        general, exact = (lower_unit(scheme, name, policy, single_axes) for single_axes in (frozenset[str](), single))
        parts = pricing.pricer.parts(scheme, name)
        priced = totals(pricing, links, parts, general.collectives)
        issued = totals(pricing, links, parts, exact.collectives)
        assert priced.keys() == issued.keys(), name
        for key, row in issued.items():
            assert priced[key][:2] == row[:2], (name, key)
            assert priced[key][2] == pytest.approx(row[2], rel=1e-9), (name, key)
        assert general.kernels == exact.kernels
        assert all(not single.issuperset(collective.axes) for collective in exact.collectives)
