"""Issued collectives conserve the derived bytes, apart from padding and from weights that only a forward pass reads (biases): a
unit is gathered whole for its backward pass too. Prices count the issued collectives."""

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


def derived_bytes(program: RankProgram, num_micro_batches: int) -> Counter[Key]:
    """Bytes of weights and gradients by kind, axes and payload, derived unit by unit; a pass gathers a unit whole, except for the
    weights that it borrows."""
    num_bytes: Counter[Key] = Counter()
    tied = program.architecture.tied_embeddings
    for _, name in unit_paths(program.architecture):
        forward: dict[tuple[tuple[str, ...], str], int] = {}
        lent = program.unit(name).forward.program.borrowed
        head = {"head", "head'", program.unit(name).gradients.get("head")} if tied else set()
        for phase, steps in program.unit(name).phases().items():
            gathered: Counter[tuple[tuple[str, ...], str]] = Counter()
            for step in steps:
                if not isinstance(step, CollectiveStep) or step.tensor.role not in WEIGHT_ROLES:
                    continue
                collective, axes = step.collective, program.drop_single_device_axes(step.collective.axes)
                if not axes or collective.kind is CollectiveKind.SLICE:
                    continue
                elements = int(collective.payload_elements.evaluate(program.values))
                gathers = step.tensor.role is Role.WEIGHT and phase != "update"
                if step.tensor.name in head and (not gathers or (lent and phase == "forward")):
                    continue  # one gradient and one state, the embedding's, and one gather where both are used
                if gathers:
                    gathered[collective.axes, step.tensor.name if step.tensor.name in lent else ""] += elements
                    continue
                payload = "weights" if step.tensor.role is Role.WEIGHT else "gradients"
                times = 1 if phase == "update" else num_micro_batches
                num_bytes[collective.kind, tuple(sorted(axes)), payload] += times * elements * 4
            for (over, borrowed), elements in gathered.items():
                elements = forward.setdefault((over, borrowed), elements)
                num_bytes[
                    CollectiveKind.ALL_GATHER, tuple(sorted(program.drop_single_device_axes(over))), "weights"
                ] += num_micro_batches * elements * 4
    return num_bytes


@given(
    model=st.sampled_from(sorted(MODELS)), dp=st.sampled_from([1, 2, 3]), fsdp=st.sampled_from([1, 2, 4]),
    stage=st.integers(0, 3), bucket=st.sampled_from([100.0, 5_000.0, 25e6]),
    reduction=st.sampled_from(["after", "per_parameter", "bucketed"]), num_micro_batches=st.integers(1, 4),
)  # fmt: skip
def test_bytes_are_conserved(
    model: str, dp: int, fsdp: int, stage: int, bucket: float, reduction: str, num_micro_batches: int
) -> None:
    program = RankProgram(
        architecture=MODELS[model], layout=Layout(dp=dp, fsdp=fsdp, zero_stage=stage), precision=PRECISIONS["fp32"],
        policy=IssuePolicy(reduction=reduction, bucket_bytes=bucket),  # type: ignore[arg-type]
    )  # fmt: skip
    issued: Counter[Key] = Counter()
    counts: Counter[Key] = Counter()
    for collective, times in count_collectives(program, num_micro_batches).items():
        if collective.what in ("weights", "gradients"):
            issued[collective.kind, tuple(sorted(collective.axes)), collective.what] += times * collective.num_bytes
            counts[collective.kind, tuple(sorted(collective.axes)), collective.what] += times
    derived = derived_bytes(program, num_micro_batches)
    assert set(issued) == set(derived)
    for key, num_bytes in issued.items():
        # an array is padded to a multiple of its shards, each parameter to its alignment
        members = sum(len(group.members) for group in program.groups) * 2 * num_micro_batches
        padding = (counts[key] * fsdp + members) * 4 * ALIGNMENT
        assert derived[key] <= num_bytes <= derived[key] + padding, key


LAYOUTS = st.builds(
    Layout, dp=st.sampled_from([1, 2, 3]), fsdp=st.sampled_from([1, 2, 4]), cp=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2, 4]), sequence_parallel=st.booleans(), zero_stage=st.integers(0, 3),
    recompute=st.sampled_from(["none", "selective", "full"]),
)  # fmt: skip


@given(model=st.sampled_from(sorted(MODELS)), layout=LAYOUTS, bucket=st.sampled_from([100.0, 5_000.0, 25e6]))
def test_priced_collectives_equal_issued_ones(model: str, layout: Layout, bucket: float) -> None:
    """For every unit and layout, the price has as many arrays and elements as the engine."""
    program = RankProgram(
        architecture=MODELS[model], layout=layout, precision=PRECISIONS["fp32"], policy=IssuePolicy(bucket_bytes=bucket)
    )
    arrays: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for group in program.groups:
        arrays[group.path] += 1
        elements[group.path] += group.padded_size
    tied = MODELS[model].tied_embeddings
    for path, name in unit_paths(program.architecture):
        extents = [
            group.arrays.evaluate(program.values, program.max_bucket_elements)
            for group in weight_groups(program.unit(name))
            if not (tied and group.weights == ("head",))
            and not set(group.weights) & {*program.unit(name).forward.program.borrowed}
        ]
        assert sum(extent.count for extent in extents) == arrays[path], path
        assert sum(extent.elements for extent in extents) == elements[path], path
        for group in weight_groups(program.unit(name)):
            array_sizes = group.arrays.array_sizes(program.values, program.max_bucket_elements)
            assert group.arrays.evaluate(program.values, program.max_bucket_elements) == (
                len(array_sizes),
                sum(array_sizes),
            )


def test_the_executed_scheme_equals_the_priced_one() -> None:
    """With experts, an update by Muon, and scales of FP8 that ranks share."""
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


def test_buckets_stay_within_their_size_in_the_order_of_the_backward_pass() -> None:
    program = RankProgram(
        architecture=SMALL, layout=Layout(dp=2), precision=PRECISIONS["fp32"], policy=IssuePolicy(bucket_bytes=8_000)
    )
    names = [member.parameter.name for group in program.groups for member in group.members]
    assert names == [parameter.name for parameter in reversed(program.parameters)]
    assert len(program.groups) > 3
    for group in program.groups:
        assert len(group.members) == 1 or 4 * sum(member.size for member in group.members) <= 8_000
        assert len({member.parameter.path for member in group.members}) == 1  # a bucket ends with its unit


def test_gradients_of_a_shared_matrix_are_complete_in_the_first_module_that_uses_it() -> None:
    """The backward pass comes to the head first, then to the last module and at last to the first one."""
    program = RankProgram(
        architecture=MODELS["predicting"], layout=Layout(fsdp=2, zero_stage=3), precision=PRECISIONS["fp32"]
    )
    order = [group.path if len(group.members) > 1 else group.members[0].parameter.name for group in program.groups]
    assert order[:4] == ["head.final_norm_weight", "predict.1", "head.head", "predict.0"]
    assert order[4:] == ["layers.2", "layers.1", "layers.0", "embedding.embedding"]


def test_frozen_weights_do_not_cut_buckets() -> None:
    program = RankProgram(architecture=MODELS["adapters"], layout=Layout(dp=2), precision=PRECISIONS["fp32"])
    trained = [group for group in program.groups if group.trained]
    assert [group.path for group in trained] == ["layers.2", "layers.1", "layers.0"]


def test_only_matrices_of_the_model_are_decayed() -> None:
    """Biases, sinks and norms are not matrices, although heads and experts split them into several dims."""
    model = replace(
        MODELS["experts"], bias=("qkv", "router", "experts"), sinks=True, qk_norm=True, qk_norm_over="projection"
    )
    program = RankProgram(architecture=model, layout=Layout(), precision=PRECISIONS["fp32"])
    matrices = {parameter.weight for parameter in program.parameters if parameter.is_matrix}
    undecayed = {parameter.weight for parameter in program.parameters if not parameter.is_matrix}
    assert matrices == {
        "embedding", "wq", "wk", "wv", "wo", "router", "experts_gate", "experts_up", "experts_down", "head",
    }  # fmt: skip
    assert {"q_flat.bias", "v.bias", "sinks", "q_norm.weight", "experts_up.bias", "attention_norm.weight"} <= undecayed


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_is_in_exactly_one_group(model: str) -> None:
    for stage in range(4):
        program = RankProgram(
            architecture=MODELS[model], layout=Layout(fsdp=2, zero_stage=stage), precision=PRECISIONS["fp32"]
        )
        members = [member.parameter.name for group in program.groups for member in group.members]
        assert sorted(members) == sorted(parameter.name for parameter in program.parameters)


def test_members_and_shards_are_aligned_for_tensor_cores() -> None:
    """By hand: D = 12 and two shards. A layer has, in the order of the backward pass, 4·12, 4·12, 4·12, 12, 8·12, 8·12, 8·12,
    8·12 and 12 elements (down, up, gate, norm, wo, wv, wk, wq, norm), each starting at a multiple of 8."""
    odd = replace(SMALL, num_layers=1, d_model=12, d_ff=4, num_heads=2, num_kv_heads=2, head_dim=4)
    program = RankProgram(architecture=odd, layout=Layout(fsdp=2, zero_stage=3), precision=PRECISIONS["fp32"])
    (layer,) = (group for group in program.groups if group.path == "layers.0")
    sizes = {member.parameter.weight: (member.start, member.size) for member in layer.members}
    assert sizes["mlp_norm.weight"] == (144, 12)
    assert [start for start, _ in sizes.values()] == [0, 48, 96, 144, 160, 256, 352, 448, 544]
    assert (layer.shard_size, layer.padded_size) == (280, 560)  # 560 elements are 2·280, 280 = 8·35
    head, norm = (group for group in program.groups if group.path == "head")
    assert (head.shard_size, norm.shard_size) == (576, 8)  # 96·12 = 2·576; half of 12 is 6, and the next multiple of 8
    (ends,) = (
        group for group in replace(program, layout=Layout(fsdp=3, zero_stage=3)).groups if group.path == "layers.0"
    )
    assert (ends.shard_size, ends.padded_size) == (192, 576)  # 560 over 3 are 187, and the next multiple of 8


def test_a_tied_models_step_by_hand() -> None:
    """ZeRO-3 over 4 with 2 micro-batches. One matrix V·D = 96·24 = 2,304 serves both ends: gathered for the embedding and for the
    head, which keeps it, and scattered once. The final norm's D = 24 is gathered for the head. A layer has
    24·(2·32 + 2·16 + 3·32 + 2) = 4,656, gathered for both passes. Each of 4 shards
    ends at a multiple of 8: 2,304, 32 and 4,672."""
    program = RankProgram(
        architecture=MODELS["tied"], layout=Layout(fsdp=4, zero_stage=3), precision=PRECISIONS["fp32"]
    )
    gather, scatter, reduce = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE
    assert count_collectives(program, 2) == Counter({
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
    """The slowest links are those of the outer axes. Parts of tp count as tp; rows of experts count as ep in any combination."""
    assert charged_axis(axes) == group


@pytest.mark.parametrize(("limit", "layers"), [(1, {0, 2}), (2, {0, 1, 2}), (None, {0, 1, 2})])
def test_the_first_layers_of_each_rank_recompute(limit: int | None, layers: set[int]) -> None:
    """Two stages, of two layers and of one."""
    layout = Layout(pp=2, schedule="1f1b", layers_per_stage=(2, 1), recompute="full", recompute_layers=limit)
    program = RankProgram(architecture=SMALL, layout=layout, precision=PRECISIONS["bf16"])
    recomputing = {path for path, unit in unit_paths(SMALL) if program.recompute(path, unit) == "full"}
    assert recomputing == {f"layers.{number}" for number in layers}
    num_saved = {
        path: len(program.unit_instructions(path, unit).unit.saved)
        for path, unit in unit_paths(SMALL)
        if is_layer(unit)
    }
    assert {path for path in num_saved if num_saved[path] == min(num_saved.values())} == recomputing
    assert len(set(num_saved.values())) == (1 if limit is None or limit > 1 else 2)
