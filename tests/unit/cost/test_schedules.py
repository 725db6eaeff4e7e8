"""Time and memory of a step under each pipeline schedule, against sums by hand."""

from __future__ import annotations

import dataclasses

import pytest
from schemes import scheme_of

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.network.topology import GroupLinks
from shardwise.layout.layout import Layout
from shardwise.layout.placement import cuts_by_axis, default_placement
from shardwise.layout.sharding_scheme import atomic_degrees
from shardwise.model.job import OVERLAP_CONVENTIONS, Job, OverlapConvention
from shardwise.model.load import load_model
from shardwise.pipeline.registry import min_virtual_stages, pipeline_schedule_names
from shardwise.price import Problem
from shardwise.price.device_memory import DeviceMemory
from shardwise.price.estimate import Estimate, estimate
from shardwise.price.estimate_terms import MEMORY
from shardwise.price.layout_pricer import Pricing, UnitCosts
from shardwise.price.overlap import HIDEABLE_TOGETHER, exposed_by_axis, exposed_s
from shardwise.price.roofline import chip_rates
from shardwise.price.unit_cost import UnitPricer
from shardwise.price.unit_values import unit_values
from shardwise.values.precision import get_precision

MODEL = load_model("llama-3-8b")
JOB = Job(global_batch_tokens=32 * 16 * 8192, seq_len=8192)  # 16 micro-batches of one sequence over 32 replicas
CLUSTER = load_cluster("h100:512")
FEW = Job(global_batch_tokens=32 * 1024, seq_len=1024)


def layout(schedule: str, **changes: object) -> Layout:
    """A layout with the fewest virtual stages that the schedule allows."""
    virtual = min_virtual_stages(schedule, 8)
    usual = Layout(dp=32, tp=2, pp=8, sequence_parallel=True, schedule=schedule, num_virtual_stages=virtual)
    return dataclasses.replace(usual, **changes)  # type: ignore[arg-type]


def estimate_schedule(schedule: str, overlap: OverlapConvention = "per_axis", **changes: object) -> Estimate:
    return estimate(Problem(MODEL, CLUSTER, dataclasses.replace(JOB, overlap=overlap)), layout(schedule, **changes))


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt-3-175b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_weights_part_of_the_backward_pass_is_a_product_for_each_weight(name: str, recompute: str) -> None:
    """As many FLOPs as the forward products, which are the forward pass without attention."""
    model = load_model(name)
    pricer = UnitPricer(chip_rates(CLUSTER.chip, None), get_precision("bf16"))
    values = unit_values(model, 4096, atomic_degrees(model, {**dict.fromkeys(("dp", "fsdp", "tp", "cp", "pp", "ep"), 1),
                                                            "micro_batch_seqs": 2}))  # fmt: skip
    parts = pricer.parts(scheme_of(model.structure, recompute=recompute), "block")
    kernels = [kernel for kernel in parts.kernels if kernel.phase in ("forward", "backward")]
    done = sum(kernel.flops.evaluate(values) for kernel in kernels if kernel.makes_weight_grads)
    products = sum(k.flops.evaluate(values) for k in kernels if k.phase == "forward" and k.kind == "contract")
    assert done == pytest.approx(products, rel=1e-12)
    assert {kernel.kind for kernel in kernels if kernel.makes_weight_grads} == {"contract"}


def test_tensors_that_wait_for_the_weights_part_equal_the_papers_count() -> None:
    """Qi et al. 2023, table 1: 32 bytes for each token and each of D, with four heads' widths and F = 4D in two bytes."""
    model = load_model("gpt-3-175b")
    assert (model.d_ff, model.num_heads * model.head_dim) == (4 * model.d_model, model.d_model)
    pricing = Pricing(Problem(model, CLUSTER, JOB), Layout(dp=64, pp=8, schedule="zb_h1"))
    block = pricing.unit_costs()[0]["block"]
    assert block.waiting_bytes == 32 * JOB.seq_len * model.d_model


def test_the_weights_part_takes_no_more_than_the_backward_pass() -> None:
    activation, _ = Pricing(Problem(MODEL, CLUSTER, JOB), layout("zb_h1")).unit_costs()
    for unit, cost in activation.items():
        assert 0 <= cost.weight_s <= cost.backward_s, unit
    assert 0.3 < activation["block"].weight_s / activation["block"].backward_s < 0.5  # attention has none


@pytest.mark.parametrize("overlap", OVERLAP_CONVENTIONS)
@pytest.mark.parametrize("schedule", pipeline_schedule_names())
def test_terms_add_up(schedule: str, overlap: OverlapConvention) -> None:
    priced_step = estimate_schedule(schedule, overlap)
    assert sum(priced_step.time.values()) == pytest.approx(priced_step.step_time_s, rel=1e-12)
    assert sum(priced_step.memory.values()) == pytest.approx(priced_step.memory_bytes, rel=1e-12)
    assert min(*priced_step.time.values(), *priced_step.memory.values(), *priced_step.hidden.values()) >= 0


def passes(schedule: str, stage: int) -> tuple[float, float, float, float]:
    """F, B and W of a stage with exposed traffic, and F and B together, by hand."""
    pricing = Pricing(Problem(MODEL, CLUSTER, JOB), layout(schedule))
    cost = pricing.step(pricing.stages()[stage])
    open_f = cost.forward_communication_s["tp"] + cost.forward_communication_s["pp"]
    open_b = cost.backward_communication_s["tp"] + cost.backward_communication_s["pp"]
    paired = cost.forward_s + cost.backward_s + cost.forward_communication_s["tp"] + cost.backward_communication_s["tp"]
    return cost.forward_s + open_f, cost.backward_s + open_b, cost.weight_s, paired


@pytest.mark.parametrize(("schedule", "parts"), [("afab", 0), ("1f1b", 0), ("zb_h1", 2), ("zb_h2", 3)])
def test_bubbles_by_hand(schedule: str, parts: int) -> None:
    """(p - 1)(F + B) less two or three times W, of the stage that takes longest with it."""
    ends_and_bubbles = []
    for stage in range(8):
        forward, backward, weight, _ = passes(schedule, stage)
        assert (weight > 0) == (parts > 0)
        bubble = 7 * (forward + backward - parts * weight)
        ends_and_bubbles.append((16 * (forward + backward) + bubble, bubble))
    assert estimate_schedule(schedule).time["bubble"] == pytest.approx(max(ends_and_bubbles)[1], rel=1e-12)


def test_dualpipe_by_hand() -> None:
    """A device has two stages: its passes are the mean of both's. Of 16 micro-batches 7 run in pairs. The gradients are
    exchanged with the device that holds the same weights."""
    pricing = Pricing(Problem(MODEL, CLUSTER, JOB), layout("dualpipe"))
    _, state = pricing.unit_costs()
    expected = []
    for device in range(4):
        forward, backward, weight, paired = (value / 2 for value in passes("dualpipe", device))
        bubble = 3 * (paired + backward - 3 * weight)
        copies = pricing.counts(device).weight_copies
        exchange = sum(count * state[unit].exchange_s for unit, count in copies.items() if count)
        update = sum(count * state[unit].update_s for unit, count in copies.items() if count)
        expected.append((7 * paired + 9 * (forward + backward) + bubble + exchange + update, bubble))
        assert exchange > 0
    priced_step = estimate_schedule("dualpipe")
    seconds, bubble = max(expected)
    assert priced_step.time["bubble"] == pytest.approx(bubble, rel=1e-12)
    assert priced_step.step_time_s - priced_step.time["dp"] - priced_step.time["control"] == pytest.approx(
        seconds, rel=1e-12
    )


@pytest.mark.parametrize(
    ("schedule", "tied", "stage", "blocks", "vocabulary"),
    [
        # DualPipe with pp = 4: device 0 has the stages 0 and 3, so 2 blocks, embedding and head; device 1 has 2 blocks.
        ("dualpipe", False, 0, 2, 2), ("dualpipe", False, 1, 2, 0),
        # Tied, both ends have the one matrix twice already: it counts once, as the head.
        ("dualpipe", True, 0, 2, 1),
        # 1F1B: the first and the last stage of a tied model exchange the matrix; other models exchange nothing.
        ("1f1b", True, 0, 0, 1), ("1f1b", True, 1, 0, 0), ("1f1b", True, 3, 0, 1), ("1f1b", False, 0, 0, 0),
    ],
)  # fmt: skip
def test_time_of_gradients_exchanged_over_pp(
    schedule: str, tied: bool, stage: int, blocks: int, vocabulary: int
) -> None:
    """The last micro-batch sends, with the hidden states' gradients, those of weights that two devices have, in bf16.

    Llama-3-8B with tp = 2: a block has 2·D·N·H + 2·D·K·H + 3·D·F over 2, and 2 norms; embedding and head V·D over 2; the final
    norm belongs to the head where DualPipe sends it. ZeRO-1 over fsdp = 4: each device has reduced a quarter of that."""
    model = dataclasses.replace(MODEL, num_layers=4, tied_embeddings=tied)
    job = Job(global_batch_tokens=4 * 8 * 1024, seq_len=1024)
    chosen = Layout(fsdp=4, tp=2, pp=4, zero_stage=1, sequence_parallel=True, schedule=schedule)
    pricing = Pricing(Problem(model, load_cluster("h100:32"), job), chosen)
    cost = pricing.step(pricing.stages()[stage])
    block = (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) / 2 + 2 * 4096
    final_norm = 4096 if blocks and vocabulary else 0
    num_bytes = 2 * (blocks * block + vocabulary * 128256 * 4096 / 2 + final_norm) / 4
    topology = pricing.topology
    links = GroupLinks(topology, cuts_by_axis(topology, default_placement(topology), pricing.degrees))
    exchange_s = cost.last_backward_communication_s["pp"] - cost.backward_communication_s["pp"]
    num_messages = blocks + vocabulary  # priced unit by unit
    link = links.neighbour_link(("pp",))
    assert link.additive
    assert exchange_s == pytest.approx(
        num_bytes * link.seconds_per_byte + num_messages * link.latency_s, rel=1e-9, abs=1e-15
    )


def test_dualpipe_hides_the_experts_traffic_of_pairs() -> None:
    """Of 32 micro-batches on 8 stages, 23 run in pairs: their AllToAlls hide, and those of the other 9 do not."""
    model, job = load_model("qwen3-30b-a3b"), Job(global_batch_tokens=8 * 32 * 4096, seq_len=4096)
    shape = Layout(fsdp=8, ep=8, pp=8, zero_stage=1, schedule="1f1b")
    plain = estimate(Problem(model, load_cluster("h100:64"), job), shape)
    dualpipe = estimate(Problem(model, load_cluster("h100:64"), job), dataclasses.replace(shape, schedule="dualpipe"))
    assert dualpipe.time["ep"] == pytest.approx(9 / 32 * plain.time["ep"], rel=0.1)
    assert dualpipe.hidden["ep"] == pytest.approx(23 / 32 * plain.time["ep"], rel=0.1)
    assert "ep" not in plain.hidden


def test_paired_passes_hide_traffic_that_a_single_pass_exposes() -> None:
    traffic = {"tp": 1.0, "ep": 3.0, "pp": 0.5, "fsdp": 2.0}
    assert exposed_s("per_axis", 4.0, traffic) == 4.5
    assert exposed_s("per_axis", 4.0, traffic, HIDEABLE_TOGETHER) == 1.0 + 1.5
    by_axis = exposed_by_axis("per_axis", 4.0, traffic, HIDEABLE_TOGETHER)
    assert by_axis["tp"] == 1.0
    assert by_axis["ep"] == pytest.approx(1.5 * 3 / 5.5)
    assert sum(by_axis.values()) == pytest.approx(2.5)


def test_a_device_holds_a_stage_and_its_mirror_image() -> None:
    one_way, both_ways = (Pricing(Problem(MODEL, CLUSTER, JOB), layout(schedule)) for schedule in ("1f1b", "dualpipe"))
    costs = one_way.unit_costs()
    single, double = (memories(pricing, costs) for pricing in (one_way, both_ways))
    for stage, memory in enumerate(double):
        for term in ("parameters", "gradients", "master", "optimizer"):
            assert memory[term] == pytest.approx(single[stage][term] + single[7 - stage][term], rel=1e-12), term
        assert both_ways.counts(stage).layers == both_ways.counts(7 - stage).layers


def test_the_first_rank_of_a_v_schedule_holds_both_ends_of_the_model() -> None:
    """Its two virtual stages hand over as all others do; a tied embedding is a single tensor there and is not exchanged."""
    pricing = Pricing(Problem(MODEL, CLUSTER, JOB), layout("zb_v"))
    first, *later_ranks = (pricing.counts(rank) for rank in range(8))
    assert (first.embedding, first.head, first.copies, first.carries, first.layers["block"]) == (1, 1, 1, 2, 4)
    assert {(counts.embedding, counts.head, counts.carries, counts.layers["block"]) for counts in later_ranks} == {
        (0, 0, 2, 4)
    }
    tied = Pricing(Problem(dataclasses.replace(MODEL, tied_embeddings=True), CLUSTER, JOB), layout("dualpipe_v"))
    assert [(stage.counts.copies, stage.counts.exchanges) for stage in tied.stages()] == [(0, 0)] * 8
    step = tied.step(tied.stages()[0])
    assert step.last_backward_communication_s["pp"] == step.backward_communication_s["pp"]


def test_interleaved_zb_by_hand() -> None:
    """Seven passes of a virtual stage, of the stage that takes longest with them."""
    pricing = Pricing(Problem(MODEL, CLUSTER, JOB), layout("interleaved_zb"))
    ends_and_bubbles = []
    for stage in range(8):
        forward, backward, weight, _ = passes("interleaved_zb", stage)
        bubble = 7 / 2 * max(forward, backward - weight, forward + backward - 2 * weight)
        ends_and_bubbles.append((16 * (forward + backward) + bubble, bubble))
    assert pricing.layout.num_virtual_stages == 2
    assert estimate_schedule("interleaved_zb").time["bubble"] == pytest.approx(max(ends_and_bubbles)[1], rel=1e-12)


def test_dualpipe_v_by_hand() -> None:
    """Of 16 micro-batches 7.5 run in pairs, each through both virtual stages; no weights have two copies."""
    pricing = Pricing(Problem(MODEL, CLUSTER, JOB), layout("dualpipe_v"))
    steps = [pricing.step(stage) for stage in pricing.stages()]
    expected = []
    for step in steps:
        forward, backward, weight, paired = step.steady
        bubble = 7 / 2 * max(paired + forward - 2 * weight, paired + backward - 3 * weight - forward / 7)
        expected.append((7.5 * paired + 8.5 * (forward + backward) + bubble, bubble))
    priced_step = estimate_schedule("dualpipe_v")
    seconds, bubble = max(expected)
    assert priced_step.time["bubble"] == pytest.approx(bubble, rel=1e-12)
    other_terms = {"dp", "control", "optimizer"}
    assert priced_step.step_time_s - sum(priced_step.time[term] for term in other_terms) == pytest.approx(
        seconds, rel=1e-9
    )


def memories(pricing: Pricing, costs: UnitCosts | None = None) -> list[dict[str, float]]:
    """Bytes of a device of each stage, by term; `costs` replaces the costs of units."""
    return [MEMORY.values(memory) for memory in pricing.memories(pricing.stages(costs))]


def by_stage(schedule: str, **changes: object) -> list[float]:
    pricing = Pricing(Problem(MODEL, CLUSTER, JOB), layout(schedule, **changes))
    activation, _ = pricing.unit_costs()
    block = activation["block"].saved_bytes
    head = activation["head"].saved_bytes
    in_flight = []
    for stage, memory in enumerate(memories(pricing)):
        counts = pricing.counts(stage)
        block_bytes = memory["activations"] - pricing.pipeline.in_flight_at_end * counts.head * head
        in_flight.append(block_bytes / block / counts.layers["block"])
    return in_flight


def test_micro_batches_in_flight_on_each_stage() -> None:
    """Qi et al.: p and 2p - 1; DeepSeek: p + 1, half as many for either of a device's two stages."""
    assert by_stage("1f1b") == pytest.approx([8, 7, 6, 5, 4, 3, 2, 1])
    assert by_stage("afab") == pytest.approx([16] * 8)
    assert by_stage("zb_h1") == pytest.approx([8] * 8)
    assert by_stage("zb_h2") == pytest.approx([15] * 8)
    assert by_stage("dualpipe", layers_per_stage=(4,) * 8) == pytest.approx([4.5] * 8)
    assert by_stage("interleaved_zb") == pytest.approx([8] * 8)
    assert by_stage("interleaved_breadth_first") == pytest.approx([(31 - 2 * i) / 2 for i in range(8)])
    assert by_stage("zb_v") == pytest.approx([8] * 8)
    assert by_stage("dualpipe_v") == pytest.approx([8.5] * 8)


def test_waiting_tensors_count_where_they_exceed_the_saved_ones() -> None:
    """With full recomputation only the input is saved, and W waits for all operands of the products: (p - i) M_B + i M_W, and the
    workspace of a backward pass, or the bytes that wait for W after it where these are more."""
    for schedule, in_flight, waiting in (("zb_h1", 8, 1), ("zb_h2", 15, 2)):
        pricing = Pricing(Problem(MODEL, CLUSTER, JOB), layout(schedule, recompute="full"))
        block, head = (pricing.unit_costs()[0][unit] for unit in ("block", "head"))
        assert block.waiting_bytes > 5 * block.saved_bytes
        for i, memory in enumerate(pricing.memories(pricing.stages())):
            counts, waits = pricing.counts(i), waiting * i
            saved, waiting_bytes = (
                counts.layers["block"] * num_bytes for num_bytes in (block.saved_bytes, block.waiting_bytes)
            )
            expected = (in_flight - waits) * saved + waits * waiting_bytes + counts.head * head.saved_bytes
            assert memory.activations == pytest.approx(
                expected + beyond_workspace(memory, waiting_bytes - saved), rel=1e-12
            )


def beyond_workspace(memory: DeviceMemory, waiting_bytes: float) -> float:
    """Bytes that wait for W beyond the workspace of the pass."""
    return float(max(waiting_bytes - memory.peak.workspace - memory.peak.logits, 0.0))


def test_layers_per_stage_can_be_set() -> None:
    """The stage with the most layers sets time and memory; the imbalance is stated."""
    layers = (2, 4, 4, 4, 4, 4, 4, 6)
    even, uneven = (
        estimate_schedule("1f1b", layers_per_stage=(4,) * 8),
        estimate_schedule("1f1b", layers_per_stage=layers),
    )
    assert uneven.waste["stages"] > even.waste["stages"] > 0  # the head's, which no other stage has
    pricing = Pricing(Problem(MODEL, CLUSTER, JOB), layout("1f1b", layers_per_stage=layers))
    assert [pricing.counts(stage).layers["block"] for stage in range(8)] == list(layers)
    activation, _ = pricing.unit_costs()
    busy = {
        unit: sum(getattr(activation[unit], name) for name in ("forward_s", "backward_s", "recompute_s"))
        for unit in ("embedding", "block", "head", "carry")
    }
    total_s = 32 * busy["block"] + busy["embedding"] + busy["head"] + 8 * busy["carry"]
    last = 6 * busy["block"] + busy["head"] + busy["carry"]
    assert uneven.waste["stages"] == pytest.approx(1 - total_s / (8 * last))
    seconds = 6 * activation["block"].forward_s + activation["head"].forward_s
    assert uneven.time["forward"] == pytest.approx(16 * seconds, rel=1e-12)
    assert uneven.memory["parameters"] > even.memory["parameters"]


def test_dense_layers_come_first_for_any_split_into_stages() -> None:
    model = dataclasses.replace(
        MODEL, num_layers=8, num_experts=8, experts_per_token=2, num_dense_layers=3, dense_d_ff=4096
    )
    shape = Layout(pp=4, schedule="1f1b", layers_per_stage=(1, 4, 2, 1))
    pricing = Pricing(Problem(model, load_cluster("h100:4"), FEW), shape)
    dense = [pricing.counts(stage).layers["dense_block"] for stage in range(4)]
    assert dense == [1, 2, 0, 0]
    assert [pricing.counts(stage).layers["block"] for stage in range(4)] == [0, 2, 2, 1]


def test_waiting_tensors_have_the_format_of_the_products() -> None:
    """In fp8 a byte per element and the scales of tiles instead of two bytes; in recipes that do not save casts, two bytes."""

    def waiting(precision: str) -> float:
        pricing = Pricing(Problem(MODEL, CLUSTER, dataclasses.replace(JOB, precision=precision)), layout("zb_h1"))
        return float(pricing.unit_costs()[0]["block"].waiting_bytes)

    recipe = get_precision("fp8_deepseek_v3")
    assert waiting("fp8_deepseek_v3") == pytest.approx(waiting("bf16") * recipe.cast_bytes() / 2, rel=1e-12)
    assert waiting("fp8_torchao") == waiting("bf16")


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2", "dualpipe"])
def test_activations_fetched_from_the_host_stay_until_weight_gradients_are_computed(schedule: str) -> None:
    """The device has the activations of two layers, and all that wait: most on the last stage, or in the middle from both
    ends."""
    pricing = Pricing(Problem(MODEL, CLUSTER, JOB), layout(schedule, offload="activations"))
    block = pricing.unit_costs()[0]["block"]
    num_copies = 2 if schedule == "dualpipe" else 1
    for stage in (1, 3, 6):
        memory = pricing.memories(pricing.stages())[stage]
        waits = {"zb_h1": stage, "zb_h2": 2 * stage, "dualpipe": min(stage, 7 - stage) / 2}[schedule]
        waiting_bytes = (
            pricing.layers[stage] + (pricing.layers[7 - stage] if num_copies == 2 else 0)
        ) * block.waiting_bytes
        expected = 2 * block.saved_bytes + waits * waiting_bytes + beyond_workspace(memory, waiting_bytes / num_copies)
        assert memory.activations == pytest.approx(expected, rel=1e-12)


def test_transfers_to_the_host_overlap_each_part_of_a_schedule() -> None:
    """A slow link to the host makes every pass as long as its transfers; together they go both ways at once."""
    chip = dataclasses.replace(CLUSTER.chip, pcie_bytes_per_s=1e9)
    slow = dataclasses.replace(CLUSTER, chip=chip)
    for schedule, times in {"1f1b": 2 * 16, "zb_h1": 2 * 16, "dualpipe": 2 * 8 - (16 - 8 - 1) / 2}.items():
        pricing = Pricing(Problem(MODEL, slow, JOB), layout(schedule, offload="activations"))  # type: ignore[arg-type]
        step = pricing.step(pricing.stages()[3])
        assert step.total_s - step.bubble_s - step.update_s == pytest.approx(times * step.host_s, rel=1e-12)
