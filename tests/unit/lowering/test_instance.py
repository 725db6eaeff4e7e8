"""What the engine issues conserves the derived bytes, apart from padding, and from what of a unit only its forward pass reads
(biases): a unit is gathered whole for its backward pass too. What is priced is what is issued."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.derive.sharded_program import CollectiveStep
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.layer_pattern import is_layer
from shardwise.model.load import load_model
from shardwise.model.program import Role
from shardwise.model.recurrent_mixers import RecurrentMixer
from shardwise.price.layout_pricer import Pricing
from shardwise.price.problem import Problem
from shardwise.sharding.collectives import CollectiveKind, IssuedCollective
from shardwise.step.flat_arrays import ALIGNMENT, WEIGHT_ROLES, weight_groups
from shardwise.step.instructions import charged_axis
from shardwise.step.issued_collectives import count_collectives
from shardwise.step.parameters import unit_paths
from shardwise.step.rank_program import RankProgram
from shardwise.values.engine_policies import IssuePolicy
from shardwise.values.precision import PRECISIONS, get_precision

SMALL = Architecture(
    name="small", num_layers=3, d_model=24, d_ff=32, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=96
)
BLOCK = {"mixer": "attention", "feed_forward": "mlp", "shared_block": True, "adapted_parts": "mlp"}
MODELS = {
    "dense": SMALL,
    "tied": replace(SMALL, tied_embeddings=True),
    "experts": replace(SMALL, num_experts=4, experts_per_token=2),
    "adapters": replace(SMALL, lora_rank=4, lora_targets=("qkv",)),
    "biased": replace(SMALL, norm="layer", norm_bias=True, bias=("qkv", "mlp"), mlp="gelu"),
    "predicting": replace(SMALL, num_experts=4, experts_per_token=2, num_predict_layers=2),
    "sharing": replace(
        SMALL,
        num_layers=4,
        mixer="none",
        feed_forward="none",
        carried_embedding=True,
        adapter_rank=4,
        recurrence=RecurrentMixer(kind="mamba2", num_heads=8, head_dim=16, key_dim=8, conv_width=4),
        layer_kinds={"first": BLOCK, "again": {**BLOCK, "weights_of": "first"}},
        layer_pattern=("first", "block", "again*2"),
    ),
    "tied predicting": replace(SMALL, tied_embeddings=True, num_predict_layers=2),
}
Key = tuple[str, tuple[str, ...], str]


def derived_bytes(one: RankProgram, num_micro_batches: int) -> Counter[Key]:
    """Bytes of weights and gradients by kind, axes and what they carry, unit by unit as derived; a pass gathers a unit whole, but
    for what it borrows."""
    found: Counter[Key] = Counter()
    tied = one.architecture.tied_embeddings
    for _, name in unit_paths(one.architecture):
        forward: dict[tuple[tuple[str, ...], str], int] = {}
        lent = one.unit(name).forward.program.borrowed
        head = {"head", "head'", one.unit(name).gradients.get("head")} if tied else set()
        for phase, steps in one.unit(name).phases().items():
            again: Counter[tuple[tuple[str, ...], str]] = Counter()
            for step in steps:
                if not isinstance(step, CollectiveStep) or step.tensor.role not in WEIGHT_ROLES:
                    continue
                collective, axes = step.collective, one.drop_single_device_axes(step.collective.axes)
                if not axes or collective.kind is CollectiveKind.SLICE:
                    continue
                elements = int(collective.payload_elements.evaluate(one.values))
                gathers = step.tensor.role is Role.WEIGHT and phase != "update"
                if step.tensor.name in head and (not gathers or (lent and phase == "forward")):
                    continue  # one gradient and one state, the embedding's, and one gather where both are used
                if gathers:
                    again[collective.axes, step.tensor.name if step.tensor.name in lent else ""] += elements
                    continue
                what = "weights" if step.tensor.role is Role.WEIGHT else "gradients"
                times = 1 if phase == "update" else num_micro_batches
                found[collective.kind, tuple(sorted(axes)), what] += times * elements * 4
            for (over, borrowed), elements in again.items():
                elements = forward.setdefault((over, borrowed), elements)
                found[CollectiveKind.ALL_GATHER, tuple(sorted(one.drop_single_device_axes(over))), "weights"] += (
                    num_micro_batches * elements * 4
                )
    return found


@given(
    model=st.sampled_from(sorted(MODELS)), dp=st.sampled_from([1, 2, 3]), fsdp=st.sampled_from([1, 2, 4]),
    stage=st.integers(0, 3), bucket=st.sampled_from([100.0, 5_000.0, 25e6]),
    reduction=st.sampled_from(["after", "per_parameter", "bucketed"]), num_micro_batches=st.integers(1, 4),
)  # fmt: skip
def test_bytes_are_conserved(
    model: str, dp: int, fsdp: int, stage: int, bucket: float, reduction: str, num_micro_batches: int
) -> None:
    one = RankProgram(
        architecture=MODELS[model], layout=Layout(dp=dp, fsdp=fsdp, zero_stage=stage), precision=PRECISIONS["fp32"],
        policy=IssuePolicy(reduction=reduction, bucket_bytes=bucket),  # type: ignore[arg-type]
    )  # fmt: skip
    issued: Counter[Key] = Counter()
    counts: Counter[Key] = Counter()
    for each, times in count_collectives(one, num_micro_batches).items():
        if each.what in ("weights", "gradients"):
            issued[each.kind, tuple(sorted(each.axes)), each.what] += times * each.num_bytes
            counts[each.kind, tuple(sorted(each.axes)), each.what] += times
    derived = derived_bytes(one, num_micro_batches)
    assert set(issued) == set(derived)
    for key, num_bytes in issued.items():
        # an array is padded to a multiple of its shards, each parameter to its alignment
        members = sum(len(group.members) for group in one.groups) * 2 * num_micro_batches
        padding = (counts[key] * fsdp + members) * 4 * ALIGNMENT
        assert derived[key] <= num_bytes <= derived[key] + padding, key


LAYOUTS = st.builds(
    Layout, dp=st.sampled_from([1, 2, 3]), fsdp=st.sampled_from([1, 2, 4]), cp=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2, 4]), sequence_parallel=st.booleans(), zero_stage=st.integers(0, 3),
    recompute=st.sampled_from(["none", "selective", "full"]),
)  # fmt: skip


@given(model=st.sampled_from(sorted(MODELS)), layout=LAYOUTS, bucket=st.sampled_from([100.0, 5_000.0, 25e6]))
def test_priced_and_issued_are_one(model: str, layout: Layout, bucket: float) -> None:
    """Of every unit the price has as many collectives of as many bytes as the engine's arrays are, whatever the layout."""
    one = RankProgram(
        architecture=MODELS[model], layout=layout, precision=PRECISIONS["fp32"], policy=IssuePolicy(bucket_bytes=bucket)
    )
    arrays: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for group in one.groups:
        arrays[group.path] += 1
        elements[group.path] += group.padded_size
    tied = MODELS[model].tied_embeddings
    for path, name in unit_paths(one.architecture):
        extents = [
            each.arrays.evaluate(one.values, one.max_bucket_elements)
            for each in weight_groups(one.unit(name))
            if not (tied and each.weights == ("head",))
            and not set(each.weights) & {*one.unit(name).forward.program.borrowed}
        ]
        assert sum(extent.count for extent in extents) == arrays[path], path
        assert sum(extent.elements for extent in extents) == elements[path], path
        for each in weight_groups(one.unit(name)):
            found = each.arrays.array_sizes(one.values, one.max_bucket_elements)
            assert each.arrays.evaluate(one.values, one.max_bucket_elements) == (len(found), sum(found))


def test_what_runs_has_the_scheme_that_is_priced() -> None:
    """With all that the model and the job say: it has experts, Muon updates them, and ranks share the scales of FP8."""
    job = Job(global_batch_tokens=2**20, seq_len=4096, optimizer="muon", precision="fp8_delayed")
    problem = Problem(load_model("mixtral-8x7b"), load_cluster("h100:64"), job)
    layout = Layout.parse("fsdp=16 ep=4 tp=4 zero_stage=1 recompute=full")
    priced = Pricing(problem, layout).scheme
    precision = get_precision(job.precision)
    program = RankProgram(
        architecture=problem.architecture, layout=layout, precision=precision, optimizer=job.optimizer
    )
    assert program.scheme == priced
    assert (priced.structure.experts, priced.optimizer, priced.shares_amax) == (True, "muon", True)
    assert program.batch_axes == ("fsdp", "ep")


def test_buckets_hold_what_they_may_and_come_in_the_order_of_the_backward_pass() -> None:
    one = RankProgram(
        architecture=SMALL, layout=Layout(dp=2), precision=PRECISIONS["fp32"], policy=IssuePolicy(bucket_bytes=8_000)
    )
    names = [member.parameter.name for group in one.groups for member in group.members]
    assert names == [parameter.name for parameter in reversed(one.parameters)]
    assert len(one.groups) > 3
    for group in one.groups:
        assert len(group.members) == 1 or 4 * sum(member.size for member in group.members) <= 8_000
        assert len({member.parameter.path for member in group.members}) == 1  # a bucket ends with its unit


def test_a_lent_matrix_is_ready_in_the_first_module_that_uses_it() -> None:
    """The backward pass comes to the head first, then to the last module and at last to the first one."""
    one = RankProgram(
        architecture=MODELS["predicting"], layout=Layout(fsdp=2, zero_stage=3), precision=PRECISIONS["fp32"]
    )
    found = [group.path if len(group.members) > 1 else group.members[0].parameter.name for group in one.groups]
    assert found[:4] == ["head.final_norm_weight", "predict.1", "head.head", "predict.0"]
    assert found[4:] == ["layers.2", "layers.1", "layers.0", "embedding.embedding"]


def test_frozen_weights_do_not_cut_buckets() -> None:
    one = RankProgram(architecture=MODELS["adapters"], layout=Layout(dp=2), precision=PRECISIONS["fp32"])
    trained = [group for group in one.groups if group.trained]
    assert [group.path for group in trained] == ["layers.2", "layers.1", "layers.0"]


def test_what_is_decayed_is_a_matrix_of_the_model() -> None:
    """Heads and experts split biases, sinks and norms into several dims; they are none for it."""
    model = replace(
        MODELS["experts"], bias=("qkv", "router", "experts"), sinks=True, qk_norm=True, qk_norm_over="projection"
    )
    one = RankProgram(architecture=model, layout=Layout(), precision=PRECISIONS["fp32"])
    matrices = {each.weight for each in one.parameters if each.is_matrix}
    others = {each.weight for each in one.parameters if not each.is_matrix}
    assert matrices == {
        "embedding", "wq", "wk", "wv", "wo", "router", "experts_gate", "experts_up", "experts_down", "head",
    }  # fmt: skip
    assert {"q_flat.bias", "v.bias", "sinks", "q_norm.weight", "experts_up.bias", "attention_norm.weight"} <= others


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_is_in_one_group(model: str) -> None:
    for stage in range(4):
        one = RankProgram(
            architecture=MODELS[model], layout=Layout(fsdp=2, zero_stage=stage), precision=PRECISIONS["fp32"]
        )
        members = [member.parameter.name for group in one.groups for member in group.members]
        assert sorted(members) == sorted(parameter.name for parameter in one.parameters)


def test_members_begin_where_tensor_cores_may_read_and_shards_end_there() -> None:
    """By hand: D = 12 and two shards. Of a layer in the order of the backward pass 4·12, 4·12, 4·12, 12, 8·12, 8·12, 8·12, 8·12
    and 12 elements (down, up, gate, norm, wo, wv, wk, wq, norm), each from the next multiple of 8."""
    odd = replace(SMALL, num_layers=1, d_model=12, d_ff=4, num_heads=2, num_kv_heads=2, head_dim=4)
    one = RankProgram(architecture=odd, layout=Layout(fsdp=2, zero_stage=3), precision=PRECISIONS["fp32"])
    (layer,) = (group for group in one.groups if group.path == "layers.0")
    sizes = {member.parameter.weight: (member.start, member.size) for member in layer.members}
    assert sizes["mlp_norm.weight"] == (144, 12)
    assert [start for start, _ in sizes.values()] == [0, 48, 96, 144, 160, 256, 352, 448, 544]
    assert (layer.shard_size, layer.padded_size) == (280, 560)  # 560 elements are 2·280, 280 = 8·35
    head, norm = (group for group in one.groups if group.path == "head")
    assert (head.shard_size, norm.shard_size) == (576, 8)  # 96·12 = 2·576; half of 12 is 6, and the next multiple of 8
    (ends,) = (group for group in replace(one, layout=Layout(fsdp=3, zero_stage=3)).groups if group.path == "layers.0")
    assert (ends.shard_size, ends.padded_size) == (192, 576)  # 560 over 3 are 187, and the next multiple of 8


def test_a_tied_models_step_by_hand() -> None:
    """ZeRO-3 over 4 with 2 micro-batches. One matrix V·D = 96·24 = 2,304 serves both ends: gathered for the embedding and for the
    head, which keeps it, and scattered once. The final norm's D = 24 is gathered for the head. A layer has
    24·(2·32 + 2·16 + 3·32 + 2) = 4,656, gathered for both passes. Each of 4 shards
    ends at a multiple of 8: 2,304, 32 and 4,672."""
    one = RankProgram(architecture=MODELS["tied"], layout=Layout(fsdp=4, zero_stage=3), precision=PRECISIONS["fp32"])
    gather, scatter, reduce = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE
    assert count_collectives(one, 2) == Counter({
        IssuedCollective(gather, ("fsdp",), "fp32", 4 * 2304, "weights"): 2 * 2,
        IssuedCollective(gather, ("fsdp",), "fp32", 4 * 32, "weights"): 2,
        IssuedCollective(gather, ("fsdp",), "fp32", 4 * 4672, "weights"): 2 * 2 * 3,
        IssuedCollective(scatter, ("fsdp",), "fp32", 4 * 2304, "gradients"): 2,
        IssuedCollective(scatter, ("fsdp",), "fp32", 4 * 32, "gradients"): 2,
        IssuedCollective(scatter, ("fsdp",), "fp32", 4 * 4672, "gradients"): 2 * 3,
        IssuedCollective(reduce, ("fsdp",), "fp32", 4, "loss"): 1,
        IssuedCollective(reduce, ("fsdp",), "fp32", 4, "norm"): 1,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("axes", "group"),
    [
        (("dp",), "dp"), (("dp", "tp_rep"), "dp"), (("dp", "fsdp", "cp"), "dp"), (("fsdp", "ep", "cp"), "fsdp"),
        (("fsdp", "cp"), "fsdp"), (("cp",), "cp"), (("pp",), "pp"), (("ep",), "ep"), (("tp_kv", "tp_rep", "ep"), "ep"),
        (("tp_kv", "tp_rep"), "tp"), (("tp_rep",), "tp"),
    ],
)  # fmt: skip
def test_traffic_is_charged_to_its_outermost_axis(axes: tuple[str, ...], group: str) -> None:
    """The slowest links are those of the outer axes. The parts of tp are tp; experts' rows go over ep, whatever goes with it."""
    assert charged_axis(axes) == group


@pytest.mark.parametrize(("most", "layers"), [(1, {0, 2}), (2, {0, 1, 2}), (None, {0, 1, 2})])
def test_so_many_first_layers_of_a_rank_recompute(most: int | None, layers: set[int]) -> None:
    """Two stages, of two layers and of one."""
    layout = Layout(pp=2, schedule="1f1b", layers_per_stage=(2, 1), recompute="full", recompute_layers=most)
    one = RankProgram(architecture=SMALL, layout=layout, precision=PRECISIONS["bf16"])
    found = {path for path, unit in unit_paths(SMALL) if one.recompute(path, unit) == "full"}
    assert found == {f"layers.{number}" for number in layers}
    held = {
        path: len(one.unit_instructions(path, unit).unit.saved) for path, unit in unit_paths(SMALL) if is_layer(unit)
    }
    assert {path for path in held if held[path] == min(held.values())} == found
    assert len(set(held.values())) == (1 if most is None or most > 1 else 2)
