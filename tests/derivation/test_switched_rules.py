"""Rules beyond one node: collectives of derived programs, priced on levels of switches, are compute-bound where the rules say.

Source: Austin et al., How to Scale Your Model, chapter 12 (GPUs); where a level inside the node binds, the rules have it too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from book_mlp import derive_mlp

from shardwise.book_formulas import rules
from shardwise.derive.sharded_program import ComputeStep, ShardedProgram
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.network.links import Cut
from shardwise.hardware.network.switches import Switched, all_to_all_seconds_per_byte
from shardwise.hardware.network.topology import GroupLinks, collective_s
from shardwise.layout.layout import Layout
from shardwise.layout.placement import cuts_by_axis, default_placement
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.pipeline.actions import FORWARD
from shardwise.pipeline.clock import run_clock
from shardwise.pipeline.registry import build_actions
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.sharding.collectives import CollectiveKind
from shardwise.values.symbolic import SymbolValues

SUPERPOD = str(Path(__file__).parents[2] / "examples" / "clusters" / "dgx-h100-superpod.toml")
CLUSTER = load_cluster(SUPERPOD)
PEAK, NODE, NODE_RATE, CHIP_RATE = 989e12, 8, 400e9, 450e9


def network() -> Switched:
    assert isinstance(CLUSTER.topology, Switched)
    return CLUSTER.topology


def links_of(**degrees: int) -> GroupLinks:
    """Links of X (outside) and Y (inside) of 1,024 devices, or fewer, filled from the inside out."""
    axes = {"tp_kv": degrees.get("Y", 1), "tp_rep": 1, "cp": 1, "ep": 1, "fsdp": degrees.get("X", 1), "dp": 1, "pp": 1}
    axes["pp"] = CLUSTER.num_devices // (axes["tp_kv"] * axes["fsdp"])
    cuts = cuts_by_axis(network(), default_placement(network()), axes)
    return GroupLinks(network(), {"Y": cuts["tp_kv"], "X": cuts["fsdp"]})


def seconds(program: ShardedProgram, sizes: dict[str, int], links: GroupLinks) -> tuple[float, float]:
    """Seconds of a derived program's products at the peak, and of its collectives in bf16."""
    values = SymbolValues(sizes)
    flops = sum(s.operation.flops(s.placed).evaluate(values) for s in program.steps if isinstance(s, ComputeStep))
    moved = (s.collective for s in program.communication if s.collective.kind is not CollectiveKind.SLICE)
    return flops / PEAK, sum(
        collective_s(c.kind, c.axes, 2.0 * c.payload_elements.evaluate(values), links) for c in moved
    )


@pytest.mark.parametrize("tp", [16, 32, 64, 128, 256])
def test_tensor_parallelism_over_nodes(tp: int) -> None:
    bound = rules.tp_min_d_ff_across_nodes(PEAK, tp, NODE, NODE_RATE, CHIP_RATE)
    d_ff = round(bound / tp) * tp
    math_s, comms_s = seconds(
        derive_mlp("TP").forward, {"B": 2**20, "D": 8192, "F": d_ff, "X": 1, "Y": tp}, links_of(Y=tp)
    )
    assert comms_s / math_s == pytest.approx(bound / d_ff, rel=1e-9)


def test_the_books_width_counts_the_network_alone() -> None:
    """F > 2475·(Y - 8): NVLink asks for more up to 40 ways."""
    alpha = PEAK / NODE_RATE
    between = {tp: alpha * (tp - 8) for tp in (16, 32, 40, 64)}
    exact = {tp: rules.tp_min_d_ff_across_nodes(PEAK, tp, NODE, NODE_RATE, CHIP_RATE) for tp in between}
    assert [exact[tp] > between[tp] * 1.001 for tp in between] == [True, True, False, False]
    assert exact[64] == pytest.approx(between[64])


def ratio_to_bound(strategy: str, dp: int, model_parallel: int) -> float:
    """Communication over compute, over what the rule says: chips of a replica each have 1/Y of its FLOPs and gradients."""
    bound = rules.dp_min_tokens_across_nodes(PEAK, dp, model_parallel, NODE, NODE_RATE, CHIP_RATE)
    tokens_per_chip = 1024
    sizes = {"B": tokens_per_chip * dp * model_parallel, "D": 8192, "F": 2**20, "X": dp, "Y": 1}
    passes = derive_mlp(strategy)
    program = passes.backward if strategy == "DP" else passes.forward
    math_s, comms_s = seconds(program, sizes, links_of(X=dp, Y=model_parallel))
    return comms_s / math_s / (bound / tokens_per_chip)


@pytest.mark.parametrize("strategy", ["DP", "FSDP"])
@pytest.mark.parametrize(("dp", "model_parallel"), [(16, 1), (256, 1), (64, 2), (16, 8), (2, 8), (4, 64), (2, 128)])
def test_data_parallelism_beside_model_parallelism(strategy: str, dp: int, model_parallel: int) -> None:
    assert ratio_to_bound(strategy, dp, model_parallel) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize(("dp", "model_parallel"), [(1024, 1), (128, 8), (16, 64)])
def test_a_group_that_crosses_two_levels_has_the_degrees_of_each(dp: int, model_parallel: int) -> None:
    """Its rings are of 32 nodes and of 4 units: (D - 1)/D of the larger, where the rule has that of all."""
    nodes = dp * model_parallel // NODE // max(1, model_parallel // NODE)
    inner = nodes // 4
    assert ratio_to_bound("DP", dp, model_parallel) == pytest.approx((1 - 1 / inner) / (1 - 1 / nodes), rel=1e-9)


def test_pipelining_multiplies_the_bandwidth_of_gradients_by_the_nodes_it_spans() -> None:
    """Quiz 5, question 2: 8-way tensor times 8-way pipeline parallelism takes 2,475 tokens per GPU down to 309."""
    tensor_only, piped = (
        rules.dp_min_tokens_across_nodes(990e12, 10**6, chips, NODE, NODE_RATE, CHIP_RATE) for chips in (8, 64)
    )
    assert (tensor_only, piped) == (pytest.approx(2475, rel=1e-4), pytest.approx(309.4, rel=1e-4))


@pytest.mark.parametrize("ep", [16, 64, 256])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_experts_over_nodes(ep: int, k: int) -> None:
    """Forward: 4·B·k·D·F/Z FLOPs, and two AllToAlls of k rows for each token, of which a node gets each token once."""
    bound = rules.ep_min_d_ff_across_nodes(PEAK, ep, k, NODE, NODE_RATE)
    tokens, d_model = 2**20, 4096
    cuts = GroupLinks(network(), {"Z": (Cut(NODE, 1), Cut(min(ep // NODE, 32), 1), Cut(1, 1))}).group_cuts(("Z",))
    array_bytes = 2.0 * tokens * k * d_model
    comms_s = 2 * array_bytes * all_to_all_seconds_per_byte(network(), cuts, k)
    math_s = 4.0 * tokens * k * d_model * bound / ep / PEAK
    assert comms_s / math_s == pytest.approx(1.0, rel=1e-9)
    book = PEAK / NODE_RATE * (ep - NODE) / k * min(NODE * k / ep, 1.0)
    assert 0.63 * book < bound <= book * (1 + 1e-9)


@pytest.mark.parametrize("ep", [1, 8, 64])
def test_experts_over_nodes_multiply_the_bandwidth_of_their_gradients(ep: int) -> None:
    """What 64 more experts add to an estimate over 256 GPUs: their weights move three times, over the nodes that ep spans."""
    topology = Switched(
        tiers=tuple(replace(tier, size=size) for tier, size in zip(network().tiers, (8, 32, 1), strict=True))
    )
    cluster, mixtral = replace(CLUSTER, topology=topology, levels=()), replace(load_model("mixtral-8x7b"), num_layers=1)
    job, layout = (
        Job(global_batch_tokens=256 * 4096, seq_len=4096, overlap="sum"),
        Layout(fsdp=256, ep=ep, zero_stage=3),
    )
    fewer, more = (
        estimate(Problem(replace(mixtral, num_experts=count), cluster, job), layout).time for count in (64, 128)
    )
    # What is hidden by compute or exchanges is missing from fsdp and part of those.
    added_s = sum(more[term] - fewer[term] for term in ("fsdp", "ep", "forward", "backward"))
    added_bytes = 64 * 3 * mixtral.d_model * mixtral.d_ff * 2.0
    per_byte = rules.dp_min_tokens_across_nodes(1.0, 256 / ep, ep, NODE, NODE_RATE, CHIP_RATE)  # at 1 FLOP/s: s/byte
    assert added_s == pytest.approx(3 * added_bytes * per_byte, rel=1e-3)


@pytest.mark.parametrize("k", [1, 2, 6])
def test_routed_rows_of_a_derived_mixture_take_what_the_rule_counts(k: int) -> None:
    """An estimate's exchanges over 64 GPUs against the rule's: there and back, forward and backward."""
    model = replace(load_model("mixtral-8x7b"), num_layers=1, num_experts=64, experts_per_token=k)
    topology = Switched(
        tiers=tuple(replace(tier, size=size) for tier, size in zip(network().tiers, (8, 8, 1), strict=True))
    )
    cluster, tokens = replace(CLUSTER, topology=topology, levels=()), 64 * 4096
    layout = Layout(fsdp=64, ep=64, zero_stage=3)
    time = estimate(Problem(model, cluster, Job(global_batch_tokens=tokens, seq_len=4096)), layout).time
    bound = rules.ep_min_d_ff_across_nodes(PEAK, 64, k, NODE, NODE_RATE)
    forward_s = 4.0 * tokens * k * model.d_model * bound / 64 / PEAK
    assert time["ep"] == pytest.approx(2 * forward_s, rel=1e-4)  # the counts of rows on top


def test_messages_of_a_pipeline_take_its_hops_with_warm_up() -> None:
    """A hop carries one micro-batch at a time: p - 1 hops in a row are a pipeline of p - 1 stages of which a pass is a hop."""
    pp, num_micro_batches, tokens, d_model = 8, 16, 2**20, 8192
    expected = rules.pp_transfer_s(tokens, d_model, pp, num_micro_batches, NODE_RATE)
    cuts = {"pp": (Cut(1, 8), Cut(8, 1), Cut(1, 1))}  # a stage is a node, each GPU of which sends its eighth
    payload = 2.0 * tokens * d_model / num_micro_batches / NODE
    hop_s = collective_s(CollectiveKind.SEND_RECV, ("pp",), payload, GroupLinks(network(), cuts))
    actions = build_actions("afab", pp - 1, num_micro_batches)
    hops = [[hop_s if slot[0].kind == FORWARD else 0.0 for slot in slots] for slots in actions.order]
    assert max(run_clock(actions, hops, 0.0).ends[-1]) == pytest.approx(expected, rel=1e-9)
