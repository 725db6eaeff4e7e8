"""Formats in which a model's own weights are published: of the catalogue by name, of a config by its quantization."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.model import Architecture
from shardwise.serve.formats import ServingFormats
from shardwise.values import InputError

# Models of the catalogue whose weights on the Hugging Face hub are quantized, from the quantization_config of each:
# deepseek-ai/DeepSeek-V3, -V3.2 and moonshotai/Kimi-K2-Instruct have fp8 with weight_block_size [128, 128], openai/gpt-oss-20b
# and -120b have mxfp4 with attention, router, embedding and head left out (2025); MiniMaxAI/MiniMax-M2, -M2.5 and
# zai-org/GLM-5-FP8 have fp8 with blocks of [128, 128] (2025, 2026). The others are in bf16.
PUBLISHED: Mapping[str, ServingFormats] = {
    "deepseek-v3": ServingFormats(weights="fp8_block"),
    "deepseek-v3.2": ServingFormats(weights="fp8_block"),
    "kimi-k2": ServingFormats(weights="fp8_block"),
    "minimax-m2": ServingFormats(weights="fp8_block"),
    "minimax-m2.5": ServingFormats(weights="fp8_block"),
    "glm-5": ServingFormats(weights="fp8_block"),
    "gpt-oss-20b": ServingFormats(experts="mxfp4"),
    "gpt-oss-120b": ServingFormats(experts="mxfp4"),
}
# What `Architecture.stored_format` contains, in small letters, the most specific first.
STORED: Mapping[str, ServingFormats] = {
    "mxfp4": ServingFormats(experts="mxfp4"),
    "nvfp4": ServingFormats(weights="nvfp4"),
    "blocks of 128x128": ServingFormats(weights="fp8_block"),
    "fp8": ServingFormats(weights="fp8"),
    "float-quantized": ServingFormats(weights="fp8"),
    "awq": ServingFormats(weights="int4"),
    "gptq": ServingFormats(weights="int4"),
    "pack-quantized": ServingFormats(weights="int4"),
    "int-quantized": ServingFormats(weights="int8"),
}


def published_formats(architecture: Architecture) -> ServingFormats:
    """Return the formats that a model is published in; bf16 where nothing says otherwise.

    Raises `InputError` for a config whose quantization is none of `STORED`.

    >>> import shardwise as sw
    >>> str(published_formats(sw.load_model("gpt-oss-120b"))), str(published_formats(sw.load_model("qwen3-32b")))
    ('bf16, experts mxfp4', 'bf16')
    """
    if architecture.name in PUBLISHED:
        return PUBLISHED[architecture.name]
    stored = architecture.stored_format.lower()
    if not stored:
        return ServingFormats()
    formats = next((formats for name, formats in STORED.items() if name in stored), None)
    if formats is None:
        raise InputError(
            f"model: the config's weights are stored in {architecture.stored_format}, which names no single format; --weights "
            "is required, and --expert-weights or --attention-weights where they differ"
        )
    return formats
