"""Number formats of a served model: how its matrices rest, what its products run in, and how the cache is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.values import bytes_per_element, did_you_mean, lookup, raise_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """A format in which matrices rest: `element_bytes` and a scale of `scale_bytes` for each `block` elements (None: one
    for a whole tensor or channel, whose bytes are left out).

    `product` is the format in which products with these matrices run: that of the chip's peak (`Chip.flops_per_s`). Weights
    that are dequantized before the product ("weight-only") run in bf16.
    """

    name: str
    element_bytes: float
    product: str
    block: int | None = None
    scale_bytes: float = 0.0
    source: str

    @property
    def bytes_per_element(self) -> float:
        """Bytes of one element, its share of a scale included."""
        return self.element_bytes + (self.scale_bytes / self.block if self.block else 0.0)


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    weight_format.name: weight_format
    for weight_format in (
        WeightFormat(name="bf16", element_bytes=2.0, product="bf16", source="IEEE 754 with 8 bits of exponent"),
        WeightFormat(name="fp8", element_bytes=1.0, product="fp8",
                     source="E4M3 with a scale for each tensor or channel (vLLM, quantization: FP8 W8A8)"),
        WeightFormat(name="fp8_block", element_bytes=1.0, product="fp8", block=128 * 128, scale_bytes=4.0,
                     source="DeepSeek-AI 2025 (DeepSeek-V3), section 3.3.2: blocks of 128 x 128 with a scale in fp32"),
        WeightFormat(name="int8", element_bytes=1.0, product="int8", source="vLLM, quantization: INT8 W8A8"),
        WeightFormat(name="nvfp4", element_bytes=0.5, product="fp4", block=16, scale_bytes=1.0,
                     source="NVIDIA, Transformer Engine user guide, NVFP4: 16 elements share a scale in E4M3"),
        WeightFormat(name="mxfp4", element_bytes=0.5, product="bf16", block=32, scale_bytes=1.0,
                     source="OCP Microscaling Formats 1.0: 32 elements share a scale in E8M0; activations stay in bf16"),
        WeightFormat(name="int4", element_bytes=0.5, product="bf16", block=128, scale_bytes=2.0,
                     source="Lin et al. 2023 (AWQ, arXiv 2306.00978): groups of 128 with a 16-bit scale, weight-only"),
        WeightFormat(name="int4_g32", element_bytes=0.5, product="bf16", block=32, scale_bytes=2.0,
                     source="Kimi K2's INT4 checkpoints: groups of 32 with a 16-bit scale, weight-only"),
    )
}  # fmt: skip
CACHE_FORMATS = ("bf16", "fp8")


def get_weight_format(name: str) -> WeightFormat:
    """Return a weight format by name. Raises `InputError` that lists the names.

    >>> get_weight_format("nvfp4").bytes_per_element
    0.5625
    """
    return lookup(WEIGHT_FORMATS, name, "weight format")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFormats:
    """Formats of a served model, by part; a part that is None rests in `weights`.

    `weights` are the matrices of attention and MLPs, `attention` those of attention alone, `experts` those of routed experts.
    Embedding, head, router and norms rest in bf16, as published quantized checkpoints keep them. `cache` is the format of keys
    and values.

    >>> formats = ServingFormats(weights="bf16", experts="mxfp4")
    >>> formats.expert_format.name, formats.attention_format.name, formats.cache_bytes
    ('mxfp4', 'bf16', 2.0)
    """

    weights: str = "bf16"
    attention: str | None = None
    experts: str | None = None
    cache: str = "bf16"

    def __post_init__(self) -> None:
        choices = {
            "weights": WEIGHT_FORMATS,
            "attention": WEIGHT_FORMATS,
            "experts": WEIGHT_FORMATS,
            "cache": CACHE_FORMATS,
        }
        raise_problems(
            [
                f"formats: {name} is {value!r}{did_you_mean(value, allowed)}; one of {', '.join(allowed)} is required"
                for name, allowed in choices.items()
                if (value := getattr(self, name)) not in allowed
                and not (value is None and name in ("attention", "experts"))
            ]
        )

    @property
    def weight_format(self) -> WeightFormat:
        """Format of the matrices of MLPs, and of all parts that name none."""
        return get_weight_format(self.weights)

    @property
    def attention_format(self) -> WeightFormat:
        """Format of attention's projections."""
        return get_weight_format(self.attention or self.weights)

    @property
    def expert_format(self) -> WeightFormat:
        """Format of routed experts."""
        return get_weight_format(self.experts or self.weights)

    @property
    def cache_bytes(self) -> float:
        """Bytes of one cached element."""
        return bytes_per_element(self.cache)

    def __str__(self) -> str:
        parts = {
            "attention": self.attention,
            "experts": self.experts,
            "cache": self.cache if self.cache != "bf16" else None,
        }
        return ", ".join([self.weights, *(f"{name} {value}" for name, value in parts.items() if value)])
