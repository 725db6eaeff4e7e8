"""Rules of serving layouts, whatever the engine: every rule that a layout of a model breaks, with the nearest that it keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from shardwise.layout.sharding_scheme import shared_kv_heads
from shardwise.model import Architecture
from shardwise.model.carried_tensors import describe_carried_tensors, has_carried_tensors
from shardwise.serve.formats import ServingFormats
from shardwise.serve.serving_layout import ServingLayout
from shardwise.values import raise_problems

# A block of scales is never split: vLLM (fp8.py) and SGLang require parts that are multiples of it.
SCALE_BLOCKS: Mapping[str, int] = {"fp8_block": 128}


def serving_layout_problems(
    architecture: Architecture, layout: ServingLayout, formats: ServingFormats | None = None
) -> list[str]:
    """Return a sentence for each rule that a layout of a model breaks.

    Query heads, and the widths of MLPs and experts, are split evenly; fewer key-value heads than devices are kept in copies, of
    the same number each. Experts are split evenly over `ep`. Parts of matrices hold whole blocks of scales.

    >>> import shardwise as sw
    >>> serving_layout_problems(sw.load_model("llama-3-8b"), ServingLayout(tp=3))[0]
    'layout: tp is 3; a divisor of the 32 query heads is required (the nearest are 2 and 4)'
    """
    problems = [*_general_problems(architecture, layout)]
    for layer in architecture.layer_architectures.values():
        problems += [*_attention_problems(layer, layout), *_width_problems(layer, layout, formats or ServingFormats())]
    return list(dict.fromkeys(problems))


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


def _general_problems(architecture: Architecture, layout: ServingLayout) -> Iterator[str]:
    if any(layer.shared_keys for layer in architecture.layer_architectures.values()):
        yield (
            f"model: {architecture.name} attends to one head of keys and to compressed keys, whose cache is not known here; "
            "another model is required"
        )
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


def _width_problems(layer: Architecture, layout: ServingLayout, formats: ServingFormats) -> Iterator[str]:
    if layer.feed_forward == "none":
        return
    widths = [("expert_tp", layout.expert_tp_degree, layer.d_ff, "experts'", formats.expert_format.name)]
    if not layer.num_experts:
        widths = [("tp", layout.tp, layer.d_ff, "MLP's", formats.weights)]
    for degree_name, degree, width, owner, weight_format in widths:
        block = SCALE_BLOCKS.get(weight_format, 1)
        if width % degree:
            nearest = _nearest(degree, width)
            yield f"layout: {degree_name} is {degree}; a divisor of the {owner} width {width} is required{nearest}"
        elif (width // degree) % block:
            yield (
                f"layout: {degree_name} is {degree}; parts of the {owner} width {width} that are multiples of {block} are "
                f"required, which is the block of {weight_format}'s scales{_nearest(degree, width // block)}"
            )


def _nearest(degree: int, total: int) -> str:
    """Return the nearest divisors of a total, as a remark."""
    below = next(d for d in range(min(degree, total), 0, -1) if total % d == 0)
    above = next((d for d in range(degree, total + 1) if total % d == 0), None)
    return f" (the nearest {'is' if above is None else 'are'} {below}{'' if above is None else f' and {above}'})"
