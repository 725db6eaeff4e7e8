"""Effects of an fp8 recipe on a unit: which products, the time of their casts, what is cast, moved and saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from schemes import scheme_of

from shardwise.derive.sharded_unit import ShardedUnit, derived_unit
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.model.optimizer_program import bytes_per_parameter, moment_bytes
from shardwise.model.optimizers.definition import get_optimizer
from shardwise.model.program import Role
from shardwise.price import Problem
from shardwise.price.estimate import Estimate, estimate, mfu_format
from shardwise.price.instruction_prices import InstructionPricer
from shardwise.price.layout_pricer import Pricing
from shardwise.price.tensor_formats import ProductOperands, TensorFormats, read_products
from shardwise.sharding.collectives import CollectiveKind
from shardwise.step.collectives import list_unit_collectives
from shardwise.step.kernel_fusion import list_kernels
from shardwise.values.engine_policies import IssuePolicy
from shardwise.values.errors import MissingValueError
from shardwise.values.precision import PRECISIONS, Precision, get_precision

DENSE = load_model("llama-3-8b")
JOB = Job(global_batch_tokens=64 * 8192, seq_len=8192)
FP8 = [name for name, recipe in PRECISIONS.items() if recipe.matmul == "fp8"]


def unit_of(model: str, name: str = "block", *, sp: bool = False, recompute: str = "none") -> ShardedUnit:
    architecture = load_model(model)
    scheme = scheme_of(
        architecture.structure,
        3,
        sp,
        recompute,
    )
    return derived_unit(scheme, name)


def copies(recipe: Precision, products: ProductOperands, phase: str) -> Mapping[str, float]:
    """Bytes written for an element of each operand that is cast in a phase, its reads taken off."""
    formats = TensorFormats(recipe)
    written_bytes = {}
    for operand, num_bytes in formats.casts(phase, products):
        width = formats.weight_in_use(products) if operand.is_weight else formats.roles[operand.role]
        written_bytes[operand.name] = num_bytes - recipe.cast_reads * width
    return written_bytes


# S1's table of FP8 recipes: master, accumulated gradients, weights, gradients, two moments
TABLE = {
    "bf16_fp32_gradients": (4, 4, 2, 2, 4, 4), "bf16": (4, 0, 2, 2, 4, 4), "fp8_transformer_engine": (0, 0, 4, 4, 4, 4),
    "fp8_lm_o3": (2, 2, 1, 1, 1, 2), "fp8_deepseek_v3": (4, 4, 1, 2, 2, 2), "fp8_nanotron": (2, 4, 1, 1, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_bytes_per_parameter_equal_the_table(name: str) -> None:
    recipe, parts = get_precision(name), TABLE[name]
    assert bytes_per_parameter(recipe) == sum(parts)
    assert recipe.master_bytes == parts[0]
    assert moment_bytes(recipe, get_optimizer("adamw")) == parts[4] + parts[5]
    assert moment_bytes(recipe, get_optimizer("lion")) == parts[4]
    assert recipe.gradient_bytes == parts[1] + parts[3]


def test_scales_of_tiles_equal_deepseeks() -> None:
    """An activation [4096, 7168] has 229,376 scales and a weight [7168, 2048] 896; MXFP8 has a byte for 32 elements."""
    recipe = get_precision("fp8_deepseek_v3")
    assert (recipe.cast_bytes() - 1) * 4096 * 7168 / recipe.scale_bytes == 229_376
    assert (recipe.cast_bytes(weight=True) - 1) * 7168 * 2048 / recipe.scale_bytes == 896
    assert get_precision("mxfp8").cast_bytes() == 1 + 1 / 32
    assert get_precision("fp8_delayed").cast_bytes() == 1
    assert get_precision("bf16").cast_bytes(weight=True) == 2


def test_only_products_with_a_blocks_weights_are_cast() -> None:
    """Seven products of a gated block forward and twice as many backward; no router, no attention, no head."""
    block = [k for k in list_kernels(unit_of("llama-3-8b")) if k.operand_elements]
    assert len([k for k in block if k.phase == "forward"]) == 7
    assert len([k for k in block if k.phase == "backward"]) == 14
    assert {k.kind for k in block} == {"contract"}
    assert not [k for k in list_kernels(unit_of("llama-3-8b", "head")) if k.operand_elements]
    experts = [k for k in list_kernels(unit_of("qwen3-30b-a3b")) if k.operand_elements and k.phase == "forward"]
    assert "experts_up_out" in {name for k in experts for name in k.outputs}
    assert "router_logits" not in {name for k in experts for name in k.outputs}
    router = [k for k in list_kernels(unit_of("qwen3-30b-a3b")) if "router" in k.inputs and k.kind == "contract"]
    assert router
    assert not any(k.operand_elements for k in router)


def test_an_operand_is_cast_once_for_each_order_that_is_needed() -> None:
    """Inputs in two orders in the forward pass (the second for the weight's gradient), weights in one in each pass."""
    products = read_products(unit_of("llama-3-8b"), IssuePolicy())
    recipe = get_precision("fp8_delayed")
    forward, backward = copies(recipe, products, "forward"), copies(recipe, products, "backward")
    assert forward["attention_norm.out"] == forward["act"] == forward["attended"] == 2
    assert forward["w_up"] == backward["w_up"] == 1
    gradients = {name: n for name, n in backward.items() if name.startswith("d.")}
    assert len(gradients) == 7
    assert set(gradients.values()) == {2}  # for the input's gradient and for the weight's
    assert "attention_norm.out" not in backward  # its cast copy was kept
    without_transposes = replace(recipe, transposed_copies=False)
    assert copies(without_transposes, products, "forward")["act"] == 1


def test_scales_of_rows_take_a_cast_of_each_order_and_a_kernel_after_each_backward_product() -> None:
    """torchao, rowwise: the maxima of rows and of columns are read apart, and 14 results are read and written again in bf16."""
    products = read_products(unit_of("llama-3-8b"), IssuePolicy())
    recipe = get_precision("fp8_torchao_rowwise")
    gradient = next(
        operand for operand in products.operands if operand.name.startswith("d.") and len(operand.orders) == 2
    )
    casts = {
        name: dict(TensorFormats(get_precision(name)).casts("backward", products))
        for name in (recipe.name, "fp8_torchao")
    }
    assert casts[recipe.name][gradient] == 2 * (2 * 2 + 1)  # two casts, each reads bf16 twice and writes fp8
    assert casts["fp8_torchao"][gradient] == 2 * 2 + 2 * 1
    priced = Pricing(Problem(DENSE, load_cluster("h100:8"), JOB), Layout(fsdp=8, zero_stage=3))
    kernels = [
        k for k in priced.pricer.parts(priced.scheme, "block").kernels if k.operand_elements and k.phase == "backward"
    ]
    tokens = priced.values["B"] * 8192
    of_inputs, of_weights = tokens * (6 * 4096 + 14336), 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    moved = TensorFormats(recipe).rescale_bytes("backward", kernels, priced.values)
    assert moved == pytest.approx(2 * 2.0 * (of_inputs + of_weights))
    assert TensorFormats(recipe).rescale_bytes("forward", kernels, priced.values) == 0.0
    assert TensorFormats(get_precision("fp8_torchao")).rescale_bytes("backward", kernels, priced.values) == 0.0


def test_without_saved_casts_inputs_are_cast_again() -> None:
    products = read_products(unit_of("llama-3-8b"), IssuePolicy())
    recipe = get_precision("fp8_torchao")
    assert copies(recipe, products, "forward")["act"] == 1
    assert copies(recipe, products, "backward")["act"] == 1
    assert "w_up" not in copies(recipe, products, "forward")  # gathered in fp8
    assert copies(recipe, products, "backward")["w_up"] == 1  # the transposed copy


def test_saved_formats_follow_their_readers() -> None:
    """Inputs of products are saved in fp8, those of elementwise operations and attention in bf16, the attention's result in
    both."""
    products = read_products(unit_of("llama-3-8b"), IssuePolicy())
    saved = {(tensor.num_orders, tensor.also_read) for tensor in products.saved if tensor.role is Role.ACTIVATION}
    assert saved == {(1, False), (0, True), (1, True)}
    widths = {(tensor.num_orders, tensor.also_read): TensorFormats(get_precision("fp8_delayed")).saved_as(tensor).width
              for tensor in products.saved if tensor.role is Role.ACTIVATION}  # fmt: skip
    assert widths == {(1, False): 1, (0, True): 2, (1, True): 3}


def test_gathers_that_only_products_read_move_fp8() -> None:
    """With sequence parallelism only products read the gathered result of the norm; the scatters stay in bf16."""
    unit = unit_of("llama-3-8b", sp=True)
    collectives = {
        (collective.kind, collective.for_products)
        for collective in list_unit_collectives(unit, IssuePolicy())
        if collective.stream == "tp"
    }
    assert (CollectiveKind.ALL_GATHER, True) in collectives
    assert (CollectiveKind.REDUCE_SCATTER, True) not in collectives
    fp8, bf16 = (run("llama-3-8b", "h100:8", name, Layout(tp=8, sequence_parallel=True)).time["tp"]
                 for name in ("fp8_delayed", "bf16"))  # fmt: skip
    assert 0.5 < fp8 / bf16 < 0.95


def test_deepseek_dispatches_in_fp8_and_combines_in_bf16() -> None:
    exchanged = [
        collective
        for collective in list_unit_collectives(unit_of("qwen3-30b-a3b"), IssuePolicy())
        if collective.kind is CollectiveKind.ALL_TO_ALL
    ]
    assert sorted((collective.for_products, collective.role is Role.STATISTIC) for collective in exchanged) == [
        (False, False), (False, False), (False, True), (True, False), (True, False),
    ]  # fmt: skip
    products = read_products(unit_of("qwen3-30b-a3b"), IssuePolicy())
    cast, plain = TensorFormats(get_precision("fp8_deepseek_v3")), TensorFormats(get_precision("mxfp8"))
    for collective in exchanged:
        if collective.role is Role.STATISTIC:
            continue  # numbers of rows are whole numbers
        narrow = cast.precision.cast_bytes() if collective.for_products else 2
        assert cast.collective_width(collective, products) == narrow
        assert plain.collective_width(collective, products) == 2


def run(model: str, cluster: str, precision: str, layout: Layout) -> Estimate:
    return estimate(Problem(load_model(model), load_cluster(cluster), replace(JOB, precision=precision)), layout)


@pytest.mark.parametrize("name", FP8)
def test_fp8_is_faster_than_bf16_but_not_twice(name: str) -> None:
    layout = Layout(fsdp=8, zero_stage=3)
    plain, narrow = (run("llama-3-8b", "h100:8", recipe, layout) for recipe in ("bf16", name))
    assert 1.1 < plain.step_time_s / narrow.step_time_s < 2
    assert narrow.time["forward"] < plain.time["forward"]


def test_saved_casts_reduce_activation_memory() -> None:
    layout = Layout(fsdp=8, zero_stage=3)
    plain, saved_cast, recast = (
        run("llama-3-8b", "h100:8", name, layout).memory for name in ("bf16", "fp8_delayed", "fp8_torchao")
    )
    assert saved_cast["activations"] < plain["activations"] == recast["activations"]


def test_casts_inside_products_are_neither_saved_nor_moved() -> None:
    """Such software saves and moves activations as in bf16; only its products run in FP8."""
    layout, in_products = Layout(tp=8, sequence_parallel=True), IssuePolicy(casts="in_products")

    def priced(name: str, policy: IssuePolicy | None) -> Estimate:
        return estimate(
            Problem(load_model("llama-3-8b"), load_cluster("h100:8"), replace(JOB, precision=name)),
            layout,
            policy=policy,
        )

    plain, cast, saved_cast = priced("bf16", None), priced("fp8_blockwise", in_products), priced("fp8_blockwise", None)
    assert cast.memory["activations"] == plain.memory["activations"] > saved_cast.memory["activations"]
    assert cast.time["tp"] == pytest.approx(plain.time["tp"])
    assert cast.time["tp"] > 1.1 * saved_cast.time["tp"]
    assert cast.time["forward"] < plain.time["forward"]
    assert cast.time["backward"] > saved_cast.time["backward"]  # operands are cast again
    dispatched = [
        collective
        for collective in list_unit_collectives(unit_of("qwen3-30b-a3b"), in_products)
        if collective.kind is CollectiveKind.ALL_TO_ALL
    ]
    products, recipe = (
        read_products(unit_of("qwen3-30b-a3b"), IssuePolicy()),
        get_precision("fp8_deepseek_v3").with_casts_in_matmuls,
    )
    assert {
        TensorFormats(recipe).collective_width(collective, products)
        for collective in dispatched
        if collective.role is not Role.STATISTIC
    } == {2}


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_casts_take_the_time_of_their_bytes(phase: str) -> None:
    """Instructions, simulations and prices of a layout agree."""
    job = replace(JOB, precision="fp8_blockwise")
    pricing = Pricing(Problem(load_model("llama-3-8b"), load_cluster("h100:8"), job), Layout(tp=8))
    priced = InstructionPricer(pricing, "block")
    parts, rates = priced.parts, priced.pricer.rates
    num_bytes = TensorFormats(get_precision("fp8_blockwise")).cast_bytes(phase, parts.products, priced.values)
    assert num_bytes > 1e8
    assert priced.casts_s(phase) == pytest.approx(num_bytes / rates.bytes_per_s)


def test_weights_can_be_gathered_in_fp8() -> None:
    """Both recipes have fp32 weights; one of them casts a block's before they are gathered."""
    uncast, cast = (run("llama-3-8b", "h100:16", name, Layout(fsdp=16, zero_stage=3))
                   for name in ("fp8_transformer_engine", "fp8_torchao"))  # fmt: skip
    assert cast.memory["gathered"] < uncast.memory["gathered"]
    assert cast.memory["parameters"] == uncast.memory["parameters"]
    traffic = [priced_step.time["fsdp"] + priced_step.hidden["fsdp"] for priced_step in (cast, uncast)]
    assert traffic[0] < 0.7 * traffic[1]


def test_all_but_matrices_of_blocks_rest_in_bf16_in_an_fp8_model() -> None:
    """Embedding, head and norms; a tile of a matrix has a scale of four bytes."""
    layout = Layout(fsdp=8, zero_stage=3)
    lean = run("llama-3-8b", "h100:8", "fp8_deepseek_v3", layout).memory["parameters"]
    unquantized = (2 * DENSE.vocab_size + 2 * DENSE.num_layers + 1) * DENSE.d_model
    matrices = run("llama-3-8b", "h100:8", "bf16", layout).memory["parameters"] * 8 / 2 - unquantized
    assert lean * 8 == pytest.approx(matrices * (1 + 4 / 128**2) + 2 * unquantized, rel=1e-6)


def test_a_chip_without_an_fp8_peak_is_refused_by_name() -> None:
    with pytest.raises(MissingValueError, match="chip a100-80gb: no sourced fp8 peak; it has bf16"):
        run("llama-3-8b", "a100-80gb:8", "fp8_delayed", Layout(fsdp=8, zero_stage=3))


def test_fp8_products_run_at_the_rate_that_was_measured_in_fp8() -> None:
    chip = load_cluster("h100:8").chip
    assert chip.matmul_flops_per_s("fp8") == pytest.approx(
        1601e12, rel=1e-3
    )  # the best product of a millisecond and more
    assert chip.matmul_flops_per_s("bf16") == pytest.approx(794.5e12, rel=1e-3)


def test_int8_is_faster_where_a_chip_has_it() -> None:
    """A v6e multiplies twice as fast in int8 as in bf16, and in fp8 no faster, so that the casts are lost."""
    layout = Layout(fsdp=16, zero_stage=3, recompute="full")
    plain, int8, fp8 = (
        run("llama-3-8b", "tpu-v6e:4x4", name, layout).step_time_s for name in ("bf16", "int8_aqt", "fp8_delayed")
    )
    assert int8 < plain < fp8


def test_fp4_is_faster_than_fp8_but_not_twice() -> None:
    layout = Layout(tp=2, pp=2, sequence_parallel=True, schedule="1f1b", recompute="full")
    fp8, fp4 = (run("llama-3-70b", "gb200:4", name, layout) for name in ("mxfp8", "nvfp4"))
    assert fp8.step_time_s / 2 < fp4.step_time_s < fp8.step_time_s
    assert fp4.memory["activations"] <= fp8.memory["activations"]


def test_gradients_reduced_in_fp32_take_twice_the_bytes_and_no_memory() -> None:
    layout = Layout(fsdp=16, zero_stage=3, recompute="full")
    bf16, fp32 = (run("llama-3-8b", "h100:16", name, layout) for name in ("bf16", "bf16_fp32_reduction"))
    assert fp32.memory == bf16.memory
    assert sum(fp32.hidden.values()) > sum(bf16.hidden.values())


@pytest.mark.parametrize("name", PRECISIONS)
def test_an_mfu_is_measured_against_the_peak_of_the_activations(name: str) -> None:
    assert mfu_format(replace(JOB, precision=name)) == (name[:4] if name[:4] in ("fp32", "fp16") else "bf16")


# Step times in bf16 over those in fp8 of the same layout, on H100 and GB200: NVIDIA, DGX Cloud benchmarking (NeMo), releases
# 25.04.02 and 25.05.05; torchtitan's published Llama-3.1-8B runs with float8 (2024-12-23, on H100 of 96 GB capped at 500 W).
PUBLISHED = [
    ("gpt-3-175b", "h100:128", 256, 2048, Layout(fsdp=4, zero_stage=1, tp=4, pp=8, num_virtual_stages=6), "fp8_delayed", 1.48),
    ("llama-3-405b", "h100:512", 256, 8192, Layout(fsdp=4, zero_stage=1, tp=8, cp=2, pp=8, num_virtual_stages=8),
     "fp8_delayed", 1.56),
    ("llama-3-405b", "gb200:128", 64, 8192, Layout(fsdp=2, zero_stage=1, tp=4, cp=2, pp=8, num_virtual_stages=8),
     "fp8_delayed", 1.52),
    ("llama-3-70b", "h100:64", 128, 8192, Layout(fsdp=2, zero_stage=1, tp=4, cp=2, pp=4, num_virtual_stages=5),
     "fp8_delayed", 1.37),
    ("llama-3-8b", "h100:8", 16, 8192, Layout(fsdp=8, zero_stage=3, micro_batch_seqs=2, recompute="selective"),
     "fp8_torchao", 1.28),
]  # fmt: skip


@pytest.mark.parametrize(("model", "cluster", "seqs", "seq_len", "layout", "recipe", "measured"), PUBLISHED)
def test_predicted_gains_equal_published_runs_within_a_sixth(
    model: str, cluster: str, seqs: int, seq_len: int, layout: Layout, recipe: str, measured: float
) -> None:
    staged = replace(layout, schedule="interleaved" if layout.pp > 1 else "none", sequence_parallel=layout.tp > 1)
    steps = [
        estimate(
            Problem(
                load_model(model), load_cluster(cluster),
                Job(global_batch_tokens=seqs * seq_len, seq_len=seq_len, precision=name),
            ), staged,
        ).step_time_s
        for name in ("bf16", recipe)
    ]  # fmt: skip
    assert steps[0] / steps[1] == pytest.approx(measured, rel=1 / 6)
