"""Kernels on a chip: FLOPs, bytes and critical sizes equal the books'; operations of a block equal the derived program's."""

from __future__ import annotations

import math

import pytest

import shardwise as sw
from shardwise.book_formulas.rooflines import (
    KERNEL_FORMS,
    KernelRoofline,
    block_roofline,
    kernel_roofline,
    link_bandwidths,
    load_chip_and_links,
)
from shardwise.book_formulas.rules import matmul_cost, matmul_critical_batch
from shardwise.model.parameters_and_flops import model_flops_per_token
from shardwise.values.errors import InputError, MissingValueError

V5E = sw.load_chip("tpu-v5e")
WIDE = {"D": 10**9, "F": 10**9}


def matmul(
    chip: str, batch: float, d_in: int, d_out: int, dtype: str = "bf16", weights: str | None = None
) -> KernelRoofline:
    return kernel_roofline(sw.load_chip(chip), "matmul", {"B": batch, "D": d_in, "F": d_out}, dtype, weights)


def test_cost_and_critical_batch_of_a_matmul_equal_the_rules() -> None:
    roofline = matmul("tpu-v5e", 240, 8192, 28672)
    assert roofline.cost == matmul_cost(240, 8192, 28672)
    assert roofline.critical_letters == ("B",)
    assert roofline.critical_size == pytest.approx(matmul_critical_batch(197e12, 810e9, 8192, 28672))
    assert roofline.critical_intensity == pytest.approx(197e12 / 810e9)
    assert roofline.bound == "memory"
    assert roofline.attainable_flops_per_s == pytest.approx(roofline.cost.flops / roofline.bounds.lower_s)


@pytest.mark.parametrize(("dtype", "weights", "critical_size"), [("bf16", "int8", 121.6), ("int8", "int8", 243.2)])
def test_critical_sizes_with_int8_weights_equal_the_books(dtype: str, weights: str, critical_size: float) -> None:
    """S0, part 1, questions 1 and 2: 243 in int8 throughout, half of bf16's 240 with only weights in int8."""
    roofline = matmul("tpu-v5e", 64, 10**9, 10**9, dtype, weights)
    assert roofline.critical_size == pytest.approx(critical_size, rel=1e-3)


SIZES = {
    "matmul": {"B": 1, "D": 4096, "F": 16384},
    "bmm": {"B": 7, "T": 1, "D": 4096, "F": 8192},
    "moe": {"B": 1, "D": 7168, "F": 2048, "E": 256, "k": 8},
    "attention": {"T": 1, "N": 64, "K": 8, "H": 128},
}


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_compute_and_memory_times_are_equal_at_the_critical_size(name: str, causal: bool, weights: str | None) -> None:
    attention = name == "attention"
    if (causal and not attention) or (weights and attention):
        return
    chip, sizes = sw.load_chip("h100"), SIZES[name]
    letter, *follow = kernel_roofline(chip, name, sizes, weights=weights, causal=causal).critical_letters
    assert follow == (["S"] if attention else [])
    critical_size = kernel_roofline(chip, name, sizes, weights=weights, causal=causal).critical_size
    assert 1 < critical_size < math.inf
    assert kernel_roofline(
        chip, name, sizes | {letter: critical_size}, weights=weights, causal=causal
    ).bounds.ratio == pytest.approx(2)


def test_narrow_matrices_never_reach_the_knee() -> None:
    roofline = matmul("tpu-v5e", 1e9, 256, 256)
    assert math.isinf(roofline.critical_size)
    assert roofline.bound == "memory"


def test_a_batched_matmul_has_two_flops_per_byte() -> None:
    """S0, part 1, question 4: int8 throughout, about 2 at any batch."""
    for batch in (1, 64, 4096):
        roofline = kernel_roofline(V5E, "bmm", {"B": batch, "D": 4096, "F": 4096}, "int8")
        assert roofline.cost.flops == 2 * batch * 4096**2
        assert roofline.cost.moved_bytes == batch * (4096 + 4096**2 + 4096)
        assert roofline.cost.intensity == pytest.approx(2, rel=1e-3)
        assert roofline.bound == "memory"


@pytest.mark.parametrize("group", [1, 8])
def test_intensity_of_attention_over_a_prompt_equals_the_books(group: int) -> None:
    """S0, part 3, question 4: TG/(G + 1) FLOPs a byte, so 2I tokens for multi-head attention and I for large G."""
    sizes = {"T": 4096, "N": 64, "K": 64 // group, "H": 128}
    roofline = kernel_roofline(V5E, "attention", sizes)
    assert roofline.cost.intensity == pytest.approx(4096 * group / (group + 1))
    assert roofline.critical_size == pytest.approx(197e12 / 810e9 * (group + 1) / group)
    assert roofline.sizes == {"B": 1, "T": 4096, "S": 4096, "N": 64, "K": 64 // group, "H": 128}


def test_a_causal_mask_halves_flops_and_intensity() -> None:
    """S3, A.3: T(T + 1)/2 of the scores; the bytes stay."""
    sizes = {"T": 4096, "N": 64, "K": 8, "H": 128}
    full, masked = (kernel_roofline(V5E, "attention", sizes, causal=causal).cost for causal in (False, True))
    assert masked.flops / full.flops == pytest.approx(4097 / 8192)
    assert masked.moved_bytes == full.moved_bytes


@pytest.mark.parametrize("group", [1, 8, 64])
def test_decoding_has_one_flop_per_byte_for_each_head_of_a_group(group: int) -> None:
    """S0, part 3, question 4: SG/(S + G), close to G, so never bound by compute."""
    sizes = {"B": 32, "T": 1, "S": 10**6, "N": 64, "K": 64 // group, "H": 128}
    roofline = kernel_roofline(V5E, "attention", sizes)
    assert roofline.cost.intensity == pytest.approx(10**6 * group / (10**6 + group))
    assert roofline.cost.intensity == pytest.approx(group, rel=1e-3)
    assert roofline.bound == "memory"
    assert kernel_roofline(V5E, "attention", sizes, causal=True).cost == roofline.cost


def test_queries_reach_the_knee_only_within_the_cache_length() -> None:
    long = kernel_roofline(V5E, "attention", {"T": 1, "S": 8192, "N": 64, "K": 8, "H": 128}, causal=True)
    assert long.critical_letters == ("T",)
    critical_size = long.critical_size
    assert kernel_roofline(
        V5E, "attention", long.sizes | {"T": critical_size}, causal=True
    ).bounds.ratio == pytest.approx(2)
    short = kernel_roofline(V5E, "attention", {"T": 1, "S": 256, "N": 64, "H": 128}, causal=True)
    assert math.isinf(short.critical_size)


def test_unfused_attention_is_memory_bound_by_its_scores() -> None:
    """S3, A.3: scores in memory leave an intensity of the order of min(T, H)."""
    sizes = {"T": 10**6, "N": 64, "H": 128}
    roofline = kernel_roofline(V5E, "attention", sizes, fused=False)
    assert roofline.cost.intensity == pytest.approx(4 * 128 / (4 * 2), rel=1e-3)
    assert math.isinf(roofline.critical_size)


def test_the_critical_batch_of_experts_equals_the_books() -> None:
    """S0, part 3, question 8: 120·E/k tokens with int8 weights on v5e; 3840 for 256 experts of which a token takes 8."""
    roofline = kernel_roofline(V5E, "moe", {"B": 1, **WIDE, "E": 256, "k": 8}, weights="int8")
    assert roofline.critical_size == pytest.approx(197e12 / 810e9 / 2 * 256 / 8, rel=1e-3)
    assert roofline.critical_size == pytest.approx(3840, rel=0.02)


def test_vector_kernels_are_memory_bound_at_any_size() -> None:
    dot = kernel_roofline(V5E, "dot", {"N": 4096})
    assert dot.cost.intensity == pytest.approx(8191 / 16386)
    product = kernel_roofline(V5E, "elementwise", {"N": 1000})
    assert (product.cost.flops, product.cost.read_bytes, product.cost.written_bytes) == (1000, 4000, 2000)
    for roofline in (dot, product):
        assert (roofline.bound, roofline.critical_letters, roofline.padding_efficiency) == ("memory", (), None)
        assert math.isinf(roofline.critical_size)


def test_rooflines_from_vmem_equal_the_books() -> None:
    """S0, part 2, question 4: 22 times HBM's bandwidth, compute-bound from a batch of 11; 263 from HBM (printed: 271)."""
    sizes = {"B": 1, "D": 4096, "F": 16384}
    assert kernel_roofline(V5E, "matmul", sizes, "int8", origin="vmem").critical_size == pytest.approx(11.1, rel=0.01)
    assert kernel_roofline(V5E, "matmul", sizes, "int8").critical_size == pytest.approx(262.7, abs=0.05)


def test_rooflines_from_the_host_equal_the_books() -> None:
    """S0, part 2, question 3: every transfer is a stage, the slowest binds; 61,000 tokens on v6e at 15 GB/s."""
    sizes = {"B": 64, "D": 8192, "F": 32768}
    roofline = kernel_roofline(V5E, "matmul", sizes, origin="host")
    assert [stage.name for stage in roofline.staging.stages] == ["pcie", "memory", "vmem", "compute"]
    assert roofline.bound == roofline.staging.binding.name == "pcie"
    assert roofline.bounds.lower_s == roofline.staging.overlapped_s == pytest.approx(roofline.cost.moved_bytes / 15e9)
    assert roofline.bounds.upper_s == pytest.approx(roofline.staging.sequential_s)
    v6e = kernel_roofline(sw.load_chip("tpu-v6e"), "matmul", {"B": 1, "D": 10**10, "F": 4 * 10**10}, origin="host")
    assert v6e.critical_size == pytest.approx(918e12 / 32e9, rel=1e-3)
    assert v6e.critical_size * 32 / 15 == pytest.approx(61_000, rel=0.01)
    assert [stage.name for stage in v6e.staging.stages] == ["pcie", "memory", "compute"]


@pytest.mark.parametrize(
    ("kernel", "sizes", "useful"),
    [
        ("matmul", {"B": 8, "D": 128, "F": 128}, 1.0),
        ("matmul", {"B": 1, "D": 128, "F": 128}, 1 / 8),
        ("matmul", {"B": 8, "D": 129, "F": 64}, 129 / 256 / 2),
        ("bmm", {"B": 5, "T": 4, "D": 128, "F": 128}, 1 / 2),
        ("moe", {"B": 8, "D": 128, "F": 128, "E": 4, "k": 1}, 1 / 4),
        ("attention", {"T": 128, "N": 8, "K": 8, "H": 64}, 1 / 2),
        ("attention", {"T": 1, "S": 128, "N": 16, "K": 4, "H": 128}, 1 / 2),
    ],
)
def test_padding_efficiency_equals_the_useful_share_of_tiles(
    kernel: str, sizes: dict[str, float], useful: float
) -> None:
    """S0, part 2: 8 rows at a time, weights padded to 128 in both dims; 256 on v6e, so a fourth of a 128 x 128 weight."""
    roofline = kernel_roofline(V5E, kernel, sizes)
    assert roofline.padding_efficiency == pytest.approx(useful)
    assert roofline.padded_bounds is not None
    compute = roofline.cost.math_s(roofline.flops_per_s) / useful
    assert roofline.padded_bounds.lower_s == pytest.approx(
        max(compute, roofline.cost.moved_bytes / roofline.bytes_per_s)
    )
    if kernel == "matmul" and sizes["D"] == sizes["F"] == 128:
        v6e = kernel_roofline(sw.load_chip("tpu-v6e"), kernel, sizes)
        assert v6e.padding_efficiency == pytest.approx(useful / 4)


def test_padding_is_absent_where_the_tile_has_no_source() -> None:
    roofline = matmul("h100", 3, 100, 100)
    assert roofline.padding_efficiency is None
    assert roofline.padded_bounds is None


@pytest.mark.parametrize(
    ("arguments", "options", "problem"),
    [
        (("conv", {"B": 1}), {}, "'conv'; one of dot, elementwise, matmul, bmm, moe, attention"),
        (("matmul", {"B": 1, "Q": 2}), {}, "matmul has no 'Q'; B, D, F are required"),
        (("matmul", {"B": 1}), {}, "D, F missing"),
        (("attention", {"T": 1, "H": 2, "N": 6, "K": 4}), {}, "N=6 query heads on K=4"),
        (("attention", {"T": 9, "S": 8, "H": 2, "N": 6}), {"causal": True}, "T=9 queries for S=8 keys"),
        (("moe", {"B": 1, "D": 1, "F": 1, "E": 2, "k": 3}), {}, "k=3 of E=2"),
        (("dot", {"N": 1}), {"weights": "int8"}, "dot has none"),
        (("dot", {"N": 1}), {"causal": True}, "dot is not attention"),
        (("dot", {"N": 1}), {"fused": False}, "dot is not attention"),
        (("dot", {"N": 1}), {"origin": "disk"}, "'disk'; one of host, hbm, vmem"),
        (("matmul", {"B": 1, "D": 1, "F": 1}), {"weights": "bf17"}, "'bf17'"),
    ],
)
def test_invalid_kernels_and_sizes_are_refused(
    arguments: tuple[str, dict[str, float]], options: dict[str, object], problem: str
) -> None:
    with pytest.raises(InputError) as caught:
        kernel_roofline(V5E, *arguments, **options)  # type: ignore[arg-type]
    assert problem in str(caught.value)


def test_values_without_a_source_are_refused() -> None:
    with pytest.raises(MissingValueError, match="no sourced fp8 peak"):
        kernel_roofline(V5E, "dot", {"N": 1}, "fp8")
    with pytest.raises(MissingValueError, match="no sourced vmem_bytes_per_s"):
        kernel_roofline(sw.load_chip("h100"), "dot", {"N": 1}, origin="vmem")
    with pytest.raises(MissingValueError, match="no sourced pcie_bytes_per_s"):
        kernel_roofline(sw.load_chip("cpu"), "dot", {"N": 1}, "fp32", origin="host")


def test_optional_sizes_have_defaults() -> None:
    for form in KERNEL_FORMS.values():
        required = {letter: 4.0 for letter in form.letters if letter not in form.defaults}
        assert list(form.fill_sizes(required)) == list(form.letters)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tpu-v5e", {"torus axis": 90e9}),
        ("tpu-v5p:4x4x4", {"torus axis": 180e9}),
        ("H100", {"nvlink": 450e9, "network": 50e9}),
        ("h100:16", {"nvlink": 450e9, "network": 50e9}),
    ],
)
def test_links_of_a_chip_have_their_bandwidths(name: str, expected: dict[str, float]) -> None:
    chip, links = load_chip_and_links(name)
    assert links == pytest.approx(expected)
    assert set(link_bandwidths(chip, links)) == {"PCIe", *expected} | ({"VMEM"} if chip.vmem_bytes_per_s else set())


@pytest.mark.parametrize("model", ["llama-3-8b", "gemma-2-9b", "mixtral-8x7b", "gpt-3-175b"])
def test_flops_of_blocks_and_head_add_up_to_the_models(model: str) -> None:
    """All blocks forward, and the head: a third of the training FLOPs of `model_flops_per_token`."""
    a, tokens = sw.load_model(model), 2 * 4096
    roofline = block_roofline(a, sw.load_chip("h100"), 2, 4096)
    head = 2.0 * a.d_model * a.vocab_size * tokens
    assert a.num_layers * roofline.total_flops("forward") + head == pytest.approx(
        model_flops_per_token(a, 4096) * tokens / 3, rel=1e-3
    )
    attention = next(operation.flops for operation in roofline.operations if operation.name == "attended, lse")
    scores = roofline.total_flops("backward") - 2 * (roofline.total_flops("forward") - attention)
    assert scores == pytest.approx(2.5 * attention)


def test_operations_of_a_block_equal_single_kernels() -> None:
    a, chip = sw.load_model("llama-3-70b"), sw.load_chip("h100")
    roofline = block_roofline(a, chip, 1, 8192)
    up = next(operation for operation in roofline.operations if operation.name == "mlp_norm.out · w_up")
    plain = kernel_roofline(chip, "matmul", {"B": 8192, "D": 8192, "F": 28672})
    assert (up.flops, up.moved_bytes, up.bound) == (plain.cost.flops, plain.cost.moved_bytes, plain.bound)
    assert up.seconds == pytest.approx(plain.bounds.lower_s)
    assert all(operation.bound == "memory" for operation in roofline.operations if not operation.flops)
    for phase in ("forward", "backward"):
        parts = [roofline.total_s(phase, bound) for bound in ("compute", "memory")]
        assert sum(parts) == pytest.approx(roofline.total_s(phase))
    small = block_roofline(a, chip, 1, 128)
    assert {operation.bound for operation in small.operations} == {"memory"}


def test_each_kernel_of_a_comparison_has_attention_of_its_own():
    """Options are those of the first kernel; words behind the sizes of another one are its own."""
    sizes, letters = "T=2048,N=32,H=128", {"T": 2048, "N": 32, "H": 128}
    comparison = sw.roofline(
        "attention", "h100", size_texts=[sizes], causal=True, fused=False,
        compared_kernels=[f"attention {sizes}", f"attention {sizes} causal", f"attention {sizes} unfused causal"],
    )  # fmt: skip
    forms = [(True, False), (False, True), (True, True), (True, False)]
    for kernel, (causal, fused) in zip(comparison.rooflines, forms, strict=True):
        assert (kernel.causal, kernel.fused) == (causal, fused)
        assert kernel.cost == sw.roofline("attention", "h100", causal=causal, fused=fused, **letters).cost
