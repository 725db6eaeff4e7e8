"""Precision recipes: the number formats of a training run, each with its source, and the options of delayed scaling. Loads no
NumPy.

Bytes of state per parameter need an optimizer too: `model/optimizer_program.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from shardwise.values.dtypes import bytes_per_element
from shardwise.values.errors import lookup


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Number formats of a training run; their widths give the bytes of state per parameter.

    `moments` are the optimizer's (`second_moment` is that of squares where it differs); `accumulated_gradients` is a second copy
    of the gradients in another format, into which micro-batches are added; `update_gradients` one of a device's own shard,
    which the update reads and which rests with the moments. A format of None means that no such copy is kept.

    `matmul` is the format that products with a block's weights run in; None: that of the activations. The head's product,
    the router's and attention always run in `activations`. Operands are cast: each is read `cast_reads` times in its own
    format and written in `matmul`, with a scale of `scale_bytes` for `block` elements (for `weight_block` of a weight;
    None: one scale for the tensor). With `transposed_copies` a product needs its operands in the order of the dims that
    it sums over, so that an operand of two kinds of product is written twice. With `saves_casts` the cast operand, and not
    the original, is kept for the backward pass. What is gathered for such products alone moves in `matmul` with `casts_gathers`,
    and tokens on their way to experts with `casts_dispatch`. With `casts_orders_apart` each order of dims is read and cast by
    itself, as the maxima of rows and of columns are. With `rescales_gradients` the products of the backward pass leave their
    scales out, and another kernel multiplies what they made by them. ZeRO gathers
    the weights of those products in `gathered`; None: as they rest. With `frozen`, matrices of those products that are not
    trained rest and are gathered in that format, and each product reads a dequantized copy. Beside `matmul` stands what an engine
    needs to know: the floating-point formats (`dtypes.NUMBER_FORMATS`) of what those products take, `operand` of activations and
    weights and `gradient_operand` of gradients, and the `scaling` of them; None where `matmul` is no such format.
    """

    name: str
    weights: str
    gradients: str
    master: str | None
    moments: str
    second_moment: str | None = None
    accumulated_gradients: str | None = None
    update_gradients: str | None = None
    activations: str = "bf16"
    gradient_reduction: str = "bf16"
    matmul: str | None = None
    operand: str | None = None
    gradient_operand: str | None = None
    scaling: str | None = None
    block: int | None = None
    weight_block: int | None = None
    scale_bytes: float = 4.0
    cast_reads: int = 1
    transposed_copies: bool = True
    saves_casts: bool = True
    casts_gathers: bool = True
    casts_dispatch: bool = False
    casts_orders_apart: bool = False
    rescales_gradients: bool = False
    gathered: str | None = None
    frozen: str | None = None
    source: str = ""

    @property
    def gradient_bytes(self) -> float:
        """Bytes of a parameter's gradient, with the copy that accumulates it."""
        copy = bytes_per_element(self.accumulated_gradients) if self.accumulated_gradients else 0.0
        return bytes_per_element(self.gradients) + copy

    @property
    def master_bytes(self) -> float:
        """Bytes of a parameter's master copy; 0 if the weights are the master copy."""
        return bytes_per_element(self.master) if self.master else 0.0

    @property
    def moment_dtypes(self) -> tuple[str, str]:
        """Formats of the first and the second moment."""
        return self.moments, self.second_moment or self.moments

    @property
    def shares_amax(self) -> bool:
        """True if scales follow from the largest magnitudes of earlier steps, over all ranks: `reduce_amax`, a default of
        Transformer Engine's DelayedScaling."""
        return self.scaling == "delayed"

    @property
    def matmul_format(self) -> str:
        """Format of matmuls with a block's weights."""
        return self.matmul or self.activations

    @property
    def with_casts_in_matmuls(self) -> Precision:
        """The recipe under software that casts operands inside matmuls, and neither saves nor moves casts of activations."""
        return replace(self, saves_casts=False, casts_gathers=False, casts_dispatch=False)

    def cast_bytes(self, *, weight: bool = False) -> float:
        """Return the bytes of one element of a matmul's operand, its share of a scale included."""
        block = self.weight_block if weight else self.block
        return bytes_per_element(self.matmul_format) + (self.scale_bytes / block if self.matmul and block else 0.0)


def _fp8(name: str, state: Precision, source: str, scaling: str, **choices: object) -> Precision:
    """Return a recipe with the state of another one and fp8 matmuls with a block's weights.

    Per-tensor scales use E5M2 for gradients (Transformer Engine's HYBRID; torchao, tensorwise), finer ones E4M3 for
    everything (DeepSeek-V3, section 3.3.2; torchao, rowwise; Transformer Engine, MXFP8 and Float8BlockScaling).
    """
    gradients = "e5m2" if scaling in ("tensor", "delayed") else "e4m3"
    formats = {"matmul": "fp8", "operand": "e4m3", "gradient_operand": gradients, "scaling": scaling}
    return replace(state, name=name, source=source, **formats, **choices)  # type: ignore[arg-type]


_BF16 = Precision(
    name="bf16", weights="bf16", gradients="bf16", master="fp32", moments="fp32",
    source="S1, memory: 2 + 2 + 4 + 8 = 16 bytes per parameter",
)  # fmt: skip
_FP16 = replace(
    _BF16, name="fp16", weights="fp16", gradients="fp16", activations="fp16", gradient_reduction="fp16"
)  # fmt: skip
_FP32 = Precision(
    name="fp32", weights="fp32", gradients="fp32", master=None, moments="fp32", activations="fp32",
    gradient_reduction="fp32", source="S1, memory: 4 + 4 + 8 = 16 bytes per parameter",
)  # fmt: skip
_FP32_WEIGHTS = replace(_FP32, activations="bf16")
_TRANSFORMER_ENGINE = (
    "NVIDIA, Transformer Engine user guide, low precision training: what Linear layers take is cast, with a transposed copy "
    "beside it, as Hopper's fp8 products take one order of dims only; attention, norms and the head stay in bf16"
)
_TABLE = "S1, table of FP8 recipes"
_QLORA = (
    "Dettmers et al. 2023, QLoRA (arXiv 2305.14314), section 3: matrices of the blocks rest in 4 bits and are dequantized to "
    "bf16 for each product; embedding, head and norms stay in bf16, adapters have the state of bf16, 16 bytes"
)

PRECISIONS = {
    precision.name: precision
    for precision in (
        _BF16,
        replace(_BF16, name="bf16_fp32_gradients", accumulated_gradients="fp32", gradient_reduction="fp32",
                source="S1, memory: gradients are also accumulated in fp32, 2 + 2 + 4 + 4 + 8 = 20 bytes per parameter"),
        replace(_BF16, name="bf16_fp32_main_gradients", gradients="fp32", gradient_reduction="fp32",
                source="Megatron-LM, distributed optimizer: bf16 weights, fp32 gradients, 2 + 4 + 4 + 8 = 18 bytes, "
                "or 6 + 12 over the data-parallel degree"),
        replace(_BF16, name="bf16_fp32_reduction", gradient_reduction="fp32",
                source="PyTorch FSDP, MixedPrecision(reduce_dtype=float32), as torchtitan and Composer have it; weights are "
                "gathered in bf16 and gradients reduced in fp32, state as in bf16"),
        replace(_BF16, name="bf16_bf16_moments", moments="bf16",
                source="Megatron-Core, precision-aware optimizer with bf16 moments: 2 + 2 + 4 + 4 = 12 bytes, or 4 + 8 over the "
                "data-parallel degree; Megatron Bridge, recipes of DeepSeek-V3 and Moonlight"),
        replace(_FP16, name="fp16_fp32_update", update_gradients="fp32",
                source="DeepSpeed, ZeRO-1 with fp16: gradients add up in fp16, and each device casts those of its shard to fp32 "
                "for the update: 2 + 2 + 4 + 8 + 4 = 20 bytes, or 4 + 16 over the data-parallel degree"),
        replace(_FP16,
                source="S1, FP16 and BF16 training; Micikevicius et al. 2018 (arXiv 1710.03740): an fp32 copy of the weights, a "
                "loss that is scaled, sums in fp32; 2 + 2 + 4 + 8 = 16 bytes"),
        replace(_BF16, name="bf16_no_master", master=None,
                source="S0, section 5: bf16 weights and fp32 moments, 10 bytes; 12 with the gradients that S0 leaves out"),
        replace(_BF16, name="bf16_bf16_state", master=None, moments="bf16",
                source="MaxText, base.yml: weight_dtype bfloat16, where optax keeps Adam's moments in the format of the weights: "
                "2 + 2 + 4 = 8 bytes with the gradients"),
        _FP32,
        _fp8("fp8_delayed", _BF16,
             f"{_TRANSFORMER_ENGINE}; delayed scaling: one scale per tensor, from earlier steps; state as in bf16",
             scaling="delayed"),
        _fp8("fp8_current", _BF16, scaling="tensor", cast_reads=2,
             source=f"{_TRANSFORMER_ENGINE}; current scaling: one scale per tensor, which takes another read; state as in bf16"),
        _fp8("fp8_blockwise", _BF16, scaling="tile_power_of_two", block=128, weight_block=128 * 128,
             source="NVIDIA, Transformer Engine user guide, Float8BlockScaling: DeepSeek-V3's tiles of 1 x 128 and of 128 x 128, "
             "E4M3 for everything, scales in fp32 that are powers of two; state as in bf16"),
        _fp8("mxfp8", _BF16, scaling="mx", block=32, weight_block=32, scale_bytes=1.0,
             source="OCP Microscaling Formats 1.0: 32 elements share an 8-bit scale; NVIDIA, Transformer Engine user guide: "
             "Blackwell scales along the dim that is summed over, so that rows and columns are cast apart; state as in bf16"),
        replace(_BF16, name="nvfp4", matmul="fp4", operand="e2m1", gradient_operand="e2m1", scaling="nvfp4",
                block=16, weight_block=16, scale_bytes=1.0, cast_reads=2,
                source="NVIDIA, Transformer Engine user guide, NVFP4: 16 elements share an 8-bit scale, the tensor one in fp32; "
                "that takes another read, each row of a weight's 16 x 16 block has a copy of its scale, rows and columns are "
                "cast apart, and all three products of a layer run in fp4; state as in bf16"),
        _fp8("fp8_transformer_engine", _FP32_WEIGHTS,
             f"{_TABLE}: fp32 weights and gradients, no master copy, 4 + 4 + 4 + 4 = 16 bytes; {_TRANSFORMER_ENGINE}",
             scaling="delayed"),
        _fp8("fp8_torchao", _FP32_WEIGHTS, scaling="tensor", gathered="fp8", cast_reads=2, saves_casts=False,
             source="torchao float8 training, tensorwise, as torchtitan uses it: fp32 weights are cast before FSDP gathers "
             "them (enable_fsdp_float8_all_gather), the head is left out, bf16 inputs are kept and cast again for the gradients"),
        _fp8("fp8_torchao_rowwise", _FP32_WEIGHTS, scaling="row", gathered="bf16", cast_reads=2, saves_casts=False,
             casts_orders_apart=True, rescales_gradients=True, casts_gathers=False,
             source="torchao float8 training, recipe rowwise: as tensorwise, but for a scale of each row or column, so that each "
             "order of dims is cast by itself; FSDP and tensor parallelism gather bf16, as fp8 gathers are there for tensorwise "
             "scales only; backward products run with one scale of 1, and a kernel applies the scales of rows and columns to "
             "their results (pytorch/ao, pull request 1325, issue 2184)"),
        _fp8("fp8_deepseek_v3", _BF16, scaling="tile", weights="fp8", moments="bf16", accumulated_gradients="fp32",
             gradient_reduction="fp32", block=128, weight_block=128 * 128, casts_dispatch=True,
             source=f"{_TABLE}: 4 + 4 + 1 + 2 + 2 + 2 = 15 bytes; DeepSeek-V3 report (arXiv 2412.19437), section 3.3: tiles of "
             "1 x 128 and of 128 x 128 with fp32 scales; inputs of products kept and tokens dispatched in fp8; embedding, head, "
             "router, norms and attention in bf16"),
        _fp8("fp8_lm_o3", _BF16, scaling="tensor", weights="fp8", gradients="fp8", master="fp16", accumulated_gradients="fp16",
             moments="fp8", second_moment="fp16", gradient_reduction="fp8", cast_reads=2,
             source=f"{_TABLE}: 2 + 2 + 1 + 1 + 1 + 2 = 9 bytes; FP8-LM (arXiv 2310.18313): gradients are reduced in fp8 too, "
             "one scale per tensor"),
        _fp8("fp8_nanotron", _BF16, scaling="tensor", weights="fp8", gradients="fp8", master="bf16", accumulated_gradients="fp32",
             moments="fp8", gradient_reduction="fp32",
             source=f"{_TABLE}: 2 + 4 + 1 + 1 + 1 + 1 = 10 bytes; nanotron, pull request 70: one scale per tensor"),
        replace(_BF16, name="qlora_nf4", frozen="nf4_double",
                source=f"{_QLORA}; NF4 with double quantization, 0.5 + 1/64 + 4/(64 x 256) = 0.516 bytes of a frozen parameter"),
        replace(_BF16, name="qlora_nf4_single", frozen="nf4",
                source=f"{_QLORA}; NF4 or FP4 without double quantization (the default of transformers' BitsAndBytesConfig), "
                "0.5 + 4/64 = 0.5625 bytes of a frozen parameter"),
        replace(_BF16, name="qlora_int8", frozen="int8",
                source="Dettmers et al. 2022, LLM.int8() (arXiv 2208.07339): one byte of a frozen parameter, with a scale for "
                "each row. Differs: bitsandbytes multiplies in int8 in the forward pass, priced like the backward pass"),
        replace(_FP32_WEIGHTS, name="int8_aqt", matmul="int8", gathered="bf16", cast_reads=2, saves_casts=False,
                transposed_copies=False,
                source="AQT as MaxText uses it (quantization=int8): fp32 weights used in bf16; what products take is scaled by "
                "its own maximum and cast, in the forward and in the backward pass, and a TPU takes any order of dims"),
    )
}  # fmt: skip


def get_precision(name: str) -> Precision:
    """Return a recipe by name. Raises `InputError` that lists the names."""
    return lookup(PRECISIONS, name, "precision")


AmaxAlgorithm = Literal["max", "most_recent"]
AMAX_ALGORITHMS: tuple[AmaxAlgorithm, ...] = get_args(AmaxAlgorithm)
MAX_AMAX_HISTORY, MAX_AMAX_MARGIN = 65_536, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedScaling:
    """Options of delayed scaling: scales from the largest magnitude (amax) of the last `history` steps, or with `most_recent`
    of the last one; that magnitude is mapped to the format's largest number over 2^`margin`.

    Source: NVIDIA, Transformer Engine, common/recipe: DelayedScaling, for the fields and their defaults.
    """

    history: int = 1024
    algorithm: AmaxAlgorithm = "max"
    margin: int = 0

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the options and what is required, in the words of a run's recipe."""
        if not 1 <= self.history <= MAX_AMAX_HISTORY:
            yield f"amax_history is {self.history}; a number of steps from 1 to {MAX_AMAX_HISTORY:,}"
        if self.algorithm not in AMAX_ALGORITHMS:
            yield f"amax_algorithm is {self.algorithm!r}; one of {', '.join(AMAX_ALGORITHMS)}"
        if not 0 <= self.margin <= MAX_AMAX_MARGIN:
            yield f"amax_margin is {self.margin}; a power of two from 0 to {MAX_AMAX_MARGIN}"
