"""Parts of a multimodal config beside its language model, and how many parameters they have where their structure is known.

Towers of images are encoders of L equal layers of width D and an MLP of width F behind an embedding of patches; what projects
their states to the language model counts as theirs. Sources: the modelling code of each family in `transformers` 5.23; a test
compares the counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardwise.model.omitted_parts import OmittedPart

Config = Mapping[str, Any]  # sizes; a wrong one is noticed where the count is not a number


def _linear(inputs: Any, outputs: Any, *, bias: bool = True) -> Any:
    return inputs * outputs + outputs * bias


def _encoder_layers(num_layers: Any, width: Any, mlp: Any) -> Any:
    """Return the parameters of layers with biases: attention, an MLP without a gate, and two LayerNorms."""
    attention = 4 * _linear(width, width)
    return num_layers * (attention + _linear(width, mlp) + _linear(mlp, width) + 4 * width)


def _count_qwen(vision: Config, text: Config) -> Any:
    """Count Qwen3-VL's tower: a merger, and one more for each layer whose states enter the language model's first layers."""
    width, merged = vision["hidden_size"], vision["hidden_size"] * vision["spatial_merge_size"] ** 2
    patch = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    merger = _linear(merged, merged) + _linear(merged, vision["out_hidden_size"])
    deep = len(vision["deepstack_visual_indexes"]) * (merger + 2 * merged)
    layers = _encoder_layers(vision["depth"], width, vision["intermediate_size"])
    return _linear(patch, width) + vision["num_position_embeddings"] * width + layers + merger + 2 * width + deep


def _count_siglip(vision: Config, text: Config) -> Any:
    """Count Gemma 3's tower: SigLIP with a norm behind its layers and, unless it is left out, a head that pools their states;
    then a norm and a projection without biases."""
    width = vision["hidden_size"]
    pooled = _encoder_layers(1, width, vision["intermediate_size"]) - width  # one norm less, and a query
    head = pooled if vision.get("vision_use_head", True) else 0
    positions = (vision["image_size"] // vision["patch_size"]) ** 2
    ends = _linear(vision["num_channels"] * vision["patch_size"] ** 2, width) + positions * width + 2 * width
    layers = _encoder_layers(vision["num_hidden_layers"], width, vision["intermediate_size"])
    return ends + layers + head + width + width * text["hidden_size"]


def _count_gemma4(vision: Config, text: Config) -> Any:
    """Count Gemma 4's tower: gated MLPs, four RMSNorms a layer and norms of queries and keys, without biases."""
    width, heads = vision["hidden_size"], vision["num_attention_heads"] * vision["head_dim"]
    kv_heads = vision["num_key_value_heads"] * vision["head_dim"]
    layer = (
        2 * width * (heads + kv_heads) + 2 * vision["head_dim"] + 3 * width * vision["intermediate_size"] + 4 * width
    )
    ends = 2 * vision["position_embedding_size"] * width + 3 * vision["patch_size"] ** 2 * width
    return ends + vision["num_hidden_layers"] * layer + width * text["hidden_size"]


def _count_llama4(vision: Config, text: Config) -> Any:
    width = vision["hidden_size"]
    positions = (vision["image_size"] // vision["patch_size"]) ** 2 + 1
    ends = vision["num_channels"] * vision["patch_size"] ** 2 * width + width + positions * width + 4 * width
    shuffled = int(width / vision["pixel_shuffle_ratio"] ** 2)
    adapter = shuffled * vision["projector_input_dim"] + vision["projector_input_dim"] * vision["projector_output_dim"]
    layers = _encoder_layers(vision["num_hidden_layers"], width, vision["intermediate_size"])
    return ends + layers + adapter + vision["vision_output_dim"] * text["hidden_size"]


def _count_kimi(vision: Config, text: Config) -> Any:
    width, height, across = vision["vt_hidden_size"], vision["init_pos_emb_height"], vision["init_pos_emb_width"]
    merged = width * vision["merge_kernel_size"][0] * vision["merge_kernel_size"][1]
    ends = _linear(3 * vision["patch_size"] ** 2, width) + height * across * width + 2 * width
    projector = 2 * width + _linear(merged, merged) + _linear(merged, text["hidden_size"])
    return ends + _encoder_layers(vision["vt_num_hidden_layers"], width, vision["vt_intermediate_size"]) + projector


def _count_minimax(vision: Config, text: Config) -> Any:
    width, out = vision["hidden_size"], text["hidden_size"]
    merge = vision["img_token_compression_config"]
    patch = vision["num_channels"] * merge["temporal_patch_size"] * vision["patch_size"] ** 2
    projector = _linear(width, out) + 2 * _linear(out, out) + _linear(out * merge["spatial_merge_size"] ** 2, out)
    layers = _encoder_layers(vision["num_hidden_layers"], width, vision["intermediate_size"])
    return patch * width + 2 * width + layers + projector


STEP_VISION = {
    "hidden_size": 1536, "num_hidden_layers": 47, "mlp_ratio": 8960 / 1536, "image_size": 728, "patch_size": 14,
    "num_channels": 3,
}  # fmt: skip


def _count_step(vision: Config, text: Config) -> Any:
    """Count Step 3.7's tower: layers with two scales of their sums, and two convolutions that halve the picture."""
    vision = {**STEP_VISION, **vision}
    width, mlp = vision["hidden_size"], int(vision["hidden_size"] * vision["mlp_ratio"])
    positions = (vision["image_size"] // vision["patch_size"]) ** 2
    ends = vision["num_channels"] * vision["patch_size"] ** 2 * width + positions * width + 2 * width
    layers = _encoder_layers(vision["num_hidden_layers"], width, mlp) + vision["num_hidden_layers"] * 2 * width
    convolutions = _linear(9 * width, 2 * width) + _linear(9 * 2 * width, 4 * width)
    return ends + layers + convolutions + 4 * width * text["hidden_size"]


# Towers of images by the model_type of the whole config.
VISION_TOWERS: Mapping[str, Callable[[Config, Config], Any]] = {
    "qwen3_vl": _count_qwen, "qwen3_vl_moe": _count_qwen, "qwen3_5": _count_qwen, "qwen3_5_moe": _count_qwen,
    "gemma3": _count_siglip, "gemma4": _count_gemma4, "llama4": _count_llama4, "kimi_k25": _count_kimi,
    "minimax_m3_vl": _count_minimax, "step3p7": _count_step,
}  # fmt: skip
# Families whose code builds a tower of its defaults where a config has none.
DEFAULT_TOWER_TYPES = ("step3p7",)
# Keys of parts that are left out, and what these are.
PART_NAMES: Mapping[str, str] = {
    "vision_config": "vision tower", "audio_config": "audio tower", "vq_config": "image tokeniser",
    "audio_encoder_config": "audio encoder", "depth_decoder_config": "depth decoder", "vision": "vision tower",
    "speech_config": "speech tower", "talker_config": "speech decoder", "code2wav_config": "speech synthesiser",
}  # fmt: skip


# Layers that attend to images, where a config does not say which. Source: MllamaTextConfig of transformers
MLLAMA_IMAGE_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)


def _count_image_layers(text: Config) -> Any:
    """Count Llama 3.2 Vision's layers that attend to images: two norms, norms of queries and keys, and two gates beside their
    matrices."""
    width, head_dim = text["hidden_size"], text["hidden_size"] // text["num_attention_heads"]
    attention = 2 * width * (width + text.get("num_key_value_heads", 8) * head_dim) + 2 * head_dim
    layer = attention + 3 * width * text["intermediate_size"] + 2 * width + 2
    layers = text.get("cross_attention_layers")
    return len(MLLAMA_IMAGE_LAYERS if layers is None else layers) * layer


def find_omitted_parts(config: Config, text: Config) -> Iterator[OmittedPart]:
    """Yield the parts of a whole config beside `text`, its language model's part."""
    for key, name in PART_NAMES.items():
        part = config.get(key)
        has_default = key == "vision_config" and config.get("model_type") in DEFAULT_TOWER_TYPES
        if part is None and has_default:
            part = {}
        if isinstance(part, dict) and (part or has_default):
            yield OmittedPart(name=name, num_params=_count(config, key, part, text))
    if text.get("model_type") == "mllama_text_model":
        yield OmittedPart(name="layers that attend to images", num_params=_count_image_layers(text))


def _count(config: Config, key: str, part: Config, text: Config) -> int | None:
    """Return a part's parameters; None where its structure, or a size of it, is not known."""
    counter = VISION_TOWERS.get(str(config.get("model_type"))) if key == "vision_config" else None
    try:
        count = None if counter is None else counter(part, text)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError, IndexError):
        return None
    return count if isinstance(count, int) and count > 0 else None
