"""Rules of serving layouts, whatever the engine: every rule that a layout of a model breaks, with the nearest that it keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from shardwise.layout.rules.recurrence_rules import describe_split_parts
from shardwise.layout.sharding_scheme import shared_kv_heads
from shardwise.model import Architecture
from shardwise.model.carried_tensors import describe_carried_tensors, has_carried_tensors
from shardwise.serve.formats import ServingFormats
from shardwise.serve.serving_layout import ServingLayout
from shardwise.values import raise_problems
from shardwise.values.errors import join_words

# A block of scales is never split: vLLM (fp8.py) and SGLang require parts that are multiples of it.
SCALE_BLOCKS: Mapping[str, int] = {"fp8_block": 128}


def serving_layout_problems(
    architecture: Architecture, layout: ServingLayout, formats: ServingFormats | None = None
) -> list[str]:
    """Return a sentence for each rule that a layout of a model breaks.

    Query heads, groups of heads of a recurrence, and the widths of MLPs and experts, are split evenly; fewer key-value heads
    than devices are kept in copies, of the same number each. Experts are split evenly over `ep`. Parts of matrices hold whole
    blocks of scales.

    >>> import shardwise as sw
    >>> serving_layout_problems(sw.load_model("llama-3-8b"), ServingLayout(tp=3))[0]
    'layout: tp is 3; a divisor of the 32 query heads is required (the nearest are 2 and 4)'
    """
    if problems := list(_cache_problems(architecture)):
        return problems  # whatever the layout
    problems = [*_general_problems(architecture, layout)]
    for layer in architecture.layer_architectures.values():
        problems += [*_attention_problems(layer, layout), *_recurrence_problems(layer, layout)]
        problems += _width_problems(layer, layout, formats or ServingFormats())
    return list(dict.fromkeys(problems))


def default_serving_layout(architecture: Architecture, num_devices: int, formats: ServingFormats) -> ServingLayout:
    """Return tensor parallelism over devices, with the experts split from each other where their matrices cannot be split.

    >>> import shardwise as sw
    >>> from shardwise.serve import published_formats
    >>> [default_serving_layout(model, 8, published_formats(model)) for model in map(sw.load_model, ("glm-5", "minimax-m2.5"))]
    [ServingLayout.parse('tp=8'), ServingLayout.parse('tp=8 ep=8')]
    """
    plain = ServingLayout(tp=num_devices)
    by_expert = ServingLayout(tp=num_devices, ep=num_devices)
    problems, by_expert_problems = (
        serving_layout_problems(architecture, layout, formats) for layout in (plain, by_expert)
    )
    return by_expert if problems and not by_expert_problems else plain


def require_legal_serving_layout(architecture: Architecture, layout: ServingLayout, formats: ServingFormats) -> None:
    """Raise `InputError` with every rule that a layout of a model breaks."""
    raise_problems(serving_layout_problems(architecture, layout, formats))


def draft_problems(
    architecture: Architecture, num_drafted: int, label: str = "batch_limits.mtp_tokens"
) -> Iterator[str]:
    """Yield what a model lacks to draft tokens itself; `label` is what names their number.

    Engines have a list of the models whose modules they run. Source: vLLM, config/speculative.py, `MTPModelTypes`.
    """
    if num_drafted and not architecture.num_predict_layers:
        yield (
            f"{label} is {num_drafted}; no modules of multi-token prediction, which draft tokens, are known of "
            f"{architecture.name}, so 0 is required, or a config.json that has some (num_nextn_predict_layers); a draft model "
            "is not priced"
        )


def _cache_problems(architecture: Architecture) -> Iterator[str]:
    """Yield what a model keeps for a sequence that no program of inference has: one head of keys, and compressed keys."""
    layers = [layer for layer in architecture.layer_architectures.values() if layer.shared_keys]
    if layers:
        windows = sorted({layer.compress_window for layer in layers if layer.compress_window})
        compressed = (
            f", and keys that stand for {join_words([str(n) for n in windows], 'and')} tokens each" if windows else ""
        )
        yield (
            f"model: {architecture.name} caches one head of keys, which are its values too{compressed}; no program of inference "
            "has such a cache here, so another model is required (trainings of it are planned: `shardwise plan`)"
        )


def _general_problems(architecture: Architecture, layout: ServingLayout) -> Iterator[str]:
    if layout.pp > 1 and has_carried_tensors(architecture):
        yield (
            f"layout: pp is {layout.pp}; {architecture.name} has {describe_carried_tensors(architecture)}, which no stage "
            "hands to another here, so pp=1 is required"
        )
    num_experts = max(layer.num_experts for layer in architecture.layer_architectures.values())
    if layout.pp > architecture.num_layers:
        yield f"layout: pp is {layout.pp}; at most one stage for each of the {architecture.num_layers} layers is required"
    if not num_experts:
        if layout.ep > 1:
            yield f"layout: ep is {layout.ep}; {architecture.name} has no experts, so ep=1 is required"
        if layout.attention_dp > 1:
            yield (
                f"layout: attention_dp is {layout.attention_dp}; {architecture.name} has no experts to share between copies of "
                f"attention, so attention_dp=1 replicas={layout.replicas * layout.attention_dp} is required"
            )
    elif (num_experts + layout.redundant_experts) % layout.ep:
        copies = -num_experts % layout.ep
        counted = f" and {layout.redundant_experts} redundant ones" if layout.redundant_experts else ""
        yield (
            f"layout: ep is {layout.ep}; a divisor of the {num_experts} experts{counted} is required"
            f"{_nearest(layout.ep, num_experts)}, or redundant_experts={copies}"
        )
    yield from _form_problems(architecture, layout)


def _form_problems(architecture: Architecture, layout: ServingLayout) -> Iterator[str]:
    """Yield forms that change nothing under the layout's degrees, and widths that are not split evenly."""
    if layout.ep == 1 and layout.dispatch != "all_gather":
        yield f"layout: dispatch is {layout.dispatch} with ep=1; experts that are split (ep) are required, or dispatch=all_gather"
    if layout.ep == 1 and layout.redundant_experts:
        yield (
            f"layout: redundant_experts is {layout.redundant_experts} with ep=1; experts that are split (ep) are required, or "
            "redundant_experts=0"
        )
    kv_heads = 1 if architecture.kv_lora_rank else shared_kv_heads(architecture)  # a latent is one for all heads
    if layout.cache_split != "heads" and layout.tp // math.gcd(layout.tp, kv_heads) == 1:
        yield (
            f"layout: cache_split is {layout.cache_split} with tp={layout.tp}; more devices of tp than the {kv_heads} key-value "
            f"{'head' if kv_heads == 1 else 'heads'} are required, or cache_split=heads"
        )
    if architecture.d_model % layout.ws:
        yield (
            f"layout: ws is {layout.ws}; a divisor of the width {architecture.d_model} is required"
            f"{_nearest(layout.ws, architecture.d_model)}"
        )


def _attention_problems(layer: Architecture, layout: ServingLayout) -> Iterator[str]:
    if layer.mixer != "attention":
        return
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    if heads % layout.tp:
        yield f"layout: tp is {layout.tp}; a divisor of the {heads} query heads is required{_nearest(layout.tp, heads)}"
    elif not layer.kv_lora_rank and kv_heads % layout.tp and layout.tp % kv_heads:
        yield f"layout: tp is {layout.tp}; a divisor or a multiple of the {kv_heads} key-value heads is required"


def _recurrence_problems(layer: Architecture, layout: ServingLayout) -> Iterator[str]:
    """Yield what cannot be split of a recurrence. Groups of Mamba-2 are not copied: vLLM 0.32.0 (mamba_mixer2.py) and SGLang
    0.5.23 (mamba.py) require that tp divides them, unless all heads share one, which every device then has."""
    if layer.recurrence is None:
        return
    num_parts = layer.recurrence.dims["L"]
    if num_parts % layout.tp:
        parts = describe_split_parts(layer.recurrence)
        yield f"layout: tp is {layout.tp}; a divisor of {parts} is required{_nearest(layout.tp, num_parts)}"


def _width_problems(layer: Architecture, layout: ServingLayout, formats: ServingFormats) -> Iterator[str]:
    if layer.feed_forward == "none":
        return
    widths = [("expert_tp", layout.expert_tp_degree, layer.d_ff, "experts'", formats.expert_format.name)]
    if not layer.num_experts:
        widths = [("tp", layout.tp, layer.d_ff, "MLP's", formats.weights)]
    for degree_name, degree, width, owner, weight_format in widths:
        block = SCALE_BLOCKS.get(weight_format, 1)
        splits = ""
        if layer.num_experts and not layer.num_experts % (layout.ep * degree):
            splits = f", or experts that are split from each other: ep={layout.ep * degree}"
        if width % degree:
            nearest = _nearest(degree, width)
            yield f"layout: {degree_name} is {degree}; a divisor of the {owner} width {width} is required{nearest}{splits}"
        elif (width // degree) % block:
            yield (
                f"layout: {degree_name} is {degree}; parts of the {owner} width {width} that are multiples of {block} are "
                f"required, which is the block of {weight_format}'s scales{_nearest(degree, width // block)}{splits}"
            )


def _nearest(degree: int, total: int) -> str:
    """Return the nearest divisors of a total, as a remark."""
    below = next(d for d in range(min(degree, total), 0, -1) if total % d == 0)
    above = next((d for d in range(degree, total + 1) if total % d == 0), None)
    return f" (the nearest {'is' if above is None else 'are'} {below}{'' if above is None else f' and {above}'})"
