"""What the engine issues conserves the derived bytes, apart from padding, from what travels with a tied embedding, and from what
of a unit only its forward pass reads (biases): a unit is gathered whole for its backward pass too."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.derive.derivation import derived_unit
from shardwise.layout.family import atomic_degrees
from shardwise.layout.layout import Layout
from shardwise.layout.legality import degrees_of
from shardwise.lowering.groups import ALIGNED
from shardwise.lowering.parameters import unit_paths
from shardwise.lowering.realisation import Realisation
from shardwise.lowering.realise import axis_group, realise
from shardwise.model.architecture import Architecture
from shardwise.model.program import Role
from shardwise.precision import PRECISIONS
from shardwise.sharding.collective import Issued, Kind
from shardwise.symbolic import Values

SMALL = Architecture(
    name="small", num_layers=3, d_model=24, d_ff=32, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=96
)
MODELS = {
    "dense": SMALL,
    "tied": replace(SMALL, tied_embeddings=True),
    "experts": replace(SMALL, num_experts=4, experts_per_token=2),
    "adapters": replace(SMALL, lora_rank=4, lora_targets=("qkv",)),
    "biased": replace(SMALL, norm="layer", norm_bias=True, bias=("qkv", "mlp"), mlp="gelu"),
}
Key = tuple[str, tuple[str, ...], str]


def derived_bytes(one: Realisation, num_micro_batches: int) -> Counter[Key]:
    """Bytes of weights and gradients by kind, axes and what they carry, unit by unit as derived."""
    found: Counter[Key] = Counter()
    sizes = Values({**one.architecture.dims, **atomic_degrees(one.architecture, degrees_of(one.layout))})
    for path, name in unit_paths(one.architecture):
        forward: dict[tuple[str, ...], int] = {}
        for each in realise(derived_unit(one.architecture.structure, one.family, name)):
            axes = tuple(axis for axis in one.several(each.axes))
            if not each.carries_weights or not axes:
                continue
            elements = int(each.payload.evaluate(sizes))
            if each.role is Role.WEIGHT and each.phase != "update":
                elements = forward.setdefault(each.axes, elements)
            if one.architecture.tied_embeddings and path == "embedding" and each.role is Role.WEIGHT_GRADIENT:
                continue  # one gradient, which the head's stands for
            if one.architecture.tied_embeddings and path == "embedding" and each.phase == "update":
                continue
            what = "weights" if each.role is Role.WEIGHT else "gradients"
            times = 1 if each.scope == "step" else num_micro_batches
            found[each.kind, tuple(sorted(axes)), what] += times * elements * 4
    return found


@given(
    model=st.sampled_from(sorted(MODELS)), dp=st.sampled_from([1, 2, 3]), fsdp=st.sampled_from([1, 2, 4]),
    stage=st.integers(0, 3), bucket=st.sampled_from([100.0, 5_000.0, 25e6]),
    reduction=st.sampled_from(["after", "per_parameter", "bucketed"]), num_micro_batches=st.integers(1, 4),
)  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_bytes_are_conserved(
    model: str, dp: int, fsdp: int, stage: int, bucket: float, reduction: str, num_micro_batches: int
) -> None:
    one = Realisation(
        architecture=MODELS[model], layout=Layout(dp=dp, fsdp=fsdp, zero_stage=stage), precision=PRECISIONS["fp32"],
        reduction=reduction, bucket_bytes=bucket,
    )  # fmt: skip
    issued: Counter[Key] = Counter()
    counts: Counter[Key] = Counter()
    for each, times in one.issued(num_micro_batches).items():
        if each.what in ("weights", "gradients"):
            issued[each.kind, tuple(sorted(each.axes)), each.what] += times * each.num_bytes
            counts[each.kind, tuple(sorted(each.axes)), each.what] += times
    derived = derived_bytes(one, num_micro_batches)
    assert set(issued) == set(derived)
    for key, num_bytes in issued.items():
        # a group is padded to a multiple of its shards, each parameter to its alignment, and a tied head's norm is gathered
        # with the embedding that it travels with
        members = sum(len(group.members) for group in one.groups) * 2 * num_micro_batches
        padding = (counts[key] * fsdp + members) * 4 * ALIGNED
        lent = num_micro_batches * 4 * 24 if MODELS[model].tied_embeddings and key[2] == "weights" else 0
        assert derived[key] <= num_bytes <= derived[key] + padding + lent, key


def test_buckets_hold_what_they_may_and_come_in_the_order_of_the_backward_pass() -> None:
    one = Realisation(architecture=SMALL, layout=Layout(dp=2), precision=PRECISIONS["fp32"], bucket_bytes=8_000)
    names = [member.parameter.name for group in one.groups for member in group.members]
    assert names == [parameter.name for parameter in reversed(one.parameters)]
    assert len(one.groups) > 3
    for group in one.groups:
        assert len(group.members) == 1 or 4 * sum(member.size for member in group.members) <= 8_000


def test_frozen_weights_do_not_cut_buckets() -> None:
    one = Realisation(architecture=MODELS["adapters"], layout=Layout(dp=2), precision=PRECISIONS["fp32"])
    assert [group.trained for group in one.groups].count(True) == 1


def test_what_is_decayed_is_a_matrix_of_the_model() -> None:
    """Heads and experts split biases, sinks and norms into several dims; they are none for it."""
    model = replace(
        MODELS["experts"], bias=("qkv", "router", "experts"), sinks=True, qk_norm=True, qk_norm_over="projection"
    )
    one = Realisation(architecture=model, layout=Layout(), precision=PRECISIONS["fp32"])
    matrices = {each.weight for each in one.parameters if each.is_matrix}
    others = {each.weight for each in one.parameters if not each.is_matrix}
    assert matrices == {
        "embedding", "wq", "wk", "wv", "wo", "router", "experts_gate", "experts_up", "experts_down", "head",
    }  # fmt: skip
    assert {"q_flat.bias", "v.bias", "sinks", "q_norm.weight", "experts_up.bias", "attention_norm.weight"} <= others


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_is_in_one_group(model: str) -> None:
    for stage in range(4):
        one = Realisation(
            architecture=MODELS[model], layout=Layout(fsdp=2, zero_stage=stage), precision=PRECISIONS["fp32"]
        )
        members = [member.parameter.name for group in one.groups for member in group.members]
        assert sorted(members) == sorted(parameter.name for parameter in one.parameters)


def test_members_begin_where_tensor_cores_may_read_and_shards_end_there() -> None:
    """By hand: D = 12 and two shards. Of a layer in the order of the forward pass 12, 8·12, 8·12, 8·12, 8·12, 12, 4·12, 4·12 and
    4·12 elements (norm, wq, wk, wv, wo, norm, gate, up, down), each from the next multiple of 8."""
    odd = replace(SMALL, num_layers=1, d_model=12, d_ff=4, num_heads=2, num_kv_heads=2, head_dim=4)
    one = Realisation(architecture=odd, layout=Layout(fsdp=2, zero_stage=3), precision=PRECISIONS["fp32"])
    (layer,) = (group for group in one.groups if group.paths == {"layers.0"})
    sizes = {member.parameter.weight: (member.start, member.size) for member in layer.members}
    assert sizes["attention_norm.weight"] == (0, 12)
    assert [start for start, _ in sizes.values()] == [0, 16, 112, 208, 304, 400, 416, 464, 512]
    assert (layer.shard_size, layer.padded_size) == (280, 560)  # 560 elements are 2·280, 280 = 8·35
    (head,) = (group for group in one.groups if group.paths == {"head"})
    # 12 of the norm, 4 that align, 96·12: 1168 are 2·584, and 584 = 8·73
    assert (head.members[-1].start, head.shard_size) == (16, 584)
    (ends,) = (
        group for group in replace(one, layout=Layout(fsdp=3, zero_stage=3)).groups if group.paths == {"layers.0"}
    )
    assert (ends.shard_size, ends.padded_size) == (192, 576)  # 560 over 3 are 187, and the next multiple of 8


def test_a_tied_models_step_by_hand() -> None:
    """ZeRO-3 over 4 with 2 micro-batches. One matrix V·D = 96·24 serves both ends, and the final norm's D = 24 travels with it:
    2,328 elements, gathered for the embedding and for the head, which keeps it, and scattered once. A layer has 24·(2·32 + 2·16 +
    3·32 + 2) = 4,656, gathered for both passes. Each of 4 shards ends at a multiple of 8: 2,336 and 4,672."""
    one = Realisation(architecture=MODELS["tied"], layout=Layout(fsdp=4, zero_stage=3), precision=PRECISIONS["fp32"])
    gather, scatter, reduce = Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE
    assert one.issued(2) == Counter({
        Issued(gather, ("fsdp",), "fp32", 4 * 2336, "weights"): 2 * 2,
        Issued(gather, ("fsdp",), "fp32", 4 * 4672, "weights"): 2 * 2 * 3,
        Issued(scatter, ("fsdp",), "fp32", 4 * 2336, "gradients"): 2,
        Issued(scatter, ("fsdp",), "fp32", 4 * 4672, "gradients"): 2 * 3,
        Issued(reduce, ("fsdp",), "fp32", 4, "loss"): 1,
        Issued(reduce, ("fsdp",), "fp32", 4, "norm"): 1,
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
    assert axis_group(axes) == group
