"""Small random models of all kinds that a framework's names are known for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from shardwise.model.architecture import Architecture
from shardwise.model.numerics import SIGMOID, Gating, Numerics, Rotary
from shardwise.run.engine.model_builder import ModelWeights, initial_weights
from shardwise.step.rank_program import balance_biases
from shardwise.values.errors import InputError

ROTARIES = (
    Rotary(),
    Rotary(base=500.0),
    Rotary(base=300.0, factor=2.0),
    Rotary(base=300.0, part=0.5),
    Rotary(base=500.0, factor=4.0, original_positions=32),
    Rotary(base=500.0, factor=8.0, original_positions=8192),
)
BIASES = ((), (), ("qkv",), ("qkv", "attention_out", "mlp"))


def random_models(accepts: Callable[[Architecture], object], seed: int) -> Iterator[Architecture]:
    """Models without an end that do not raise `InputError`."""
    rng = random.Random(seed)
    while True:
        try:
            model = random_model(rng)
            accepts(model)
        except InputError:
            continue
        yield model


def random_model(rng: random.Random) -> Architecture:
    kv_heads, group = rng.choice(((1, 1), (2, 1), (2, 2), (2, 3), (4, 1), (4, 2)))
    sizes = {
        "num_layers": rng.randint(1, 4), "d_model": 4 * rng.randint(2, 6), "d_ff": 4 * rng.randint(1, 8),
        "num_kv_heads": kv_heads, "num_heads": kv_heads * group, "head_dim": 2 * rng.randint(1, 5),
        "vocab_size": rng.randint(9, 40),
    }  # fmt: skip
    numerics = Numerics(norm_epsilon=rng.choice((1e-5, 1e-6, 1e-3)), rotary=rng.choice(ROTARIES))
    plain = Architecture(
        name="random", **sizes, tied_embeddings=rng.random() < 0.3, qk_norm=rng.random() < 0.4, bias=rng.choice(BIASES),
        numerics=numerics,
    )  # fmt: skip
    kinds: tuple[Callable[[Architecture, random.Random], Architecture], ...] = (same, same, routed, routed, latent, gpt)
    return rng.choice(kinds)(plain, rng)


def same(model: Architecture, rng: random.Random) -> Architecture:
    return model


def routed(model: Architecture, rng: random.Random) -> Architecture:
    experts = rng.choice((2, 4, 8))
    chosen = rng.randint(1, experts)
    parts: dict[str, Any] = {"num_experts": experts, "experts_per_token": chosen, "bias": model.bias[:1]}
    if rng.random() < 0.5:
        parts |= {"shared_expert_width": model.d_ff * rng.randint(1, 2), "shared_gate": rng.random() < 0.5}
    if rng.random() < 0.3 and model.num_layers > 1:
        parts |= {"num_dense_layers": 1, "dense_d_ff": model.d_ff + 4}
    return replace(model, **parts, numerics=replace(model.numerics, **gates(experts, chosen, rng)))


def gates(experts: int, chosen: int, rng: random.Random) -> Mapping[str, Any]:
    """How tokens choose experts: by softmax, by sigmoid, or among groups of them."""
    kind = rng.choice(("softmax", "sigmoid", "groups"))
    if kind == "softmax":
        return {"normalised_gates": rng.random() < 0.7}
    if kind == "sigmoid" or experts < 4 or chosen > experts // 2:
        return {"gating": Gating(scores=SIGMOID, scale=rng.choice((1.0, 2.5)))}
    return {"gating": Gating(scores=SIGMOID, scale=2.5, groups=2, chosen_groups=1, votes=2)}


def latent(model: Architecture, rng: random.Random) -> Architecture:
    """Multi-head latent attention, with or without experts. Widths are even: torchtitan takes pairs as complex numbers."""
    rotary, plain = 2 * rng.randint(1, 3), 2 * rng.randint(1, 3)
    parts = {
        "num_kv_heads": model.num_heads, "kv_lora_rank": 2 * rng.randint(1, 3), "q_lora_rank": rng.choice((0, 7)),
        "rope_head_dim": rotary, "head_dim": rotary + plain, "v_head_dim": rng.randint(2, plain + 1), "qk_norm": False,
        "bias": (), "tied_embeddings": False, "numerics": replace(model.numerics, rotary=Rotary(base=300.0)),
        "num_predict_layers": rng.choice((0, 0, 1)),
    }  # fmt: skip
    latent_model = replace(model, **parts)
    return routed(latent_model, rng) if rng.random() < 0.7 else latent_model


def gpt(model: Architecture, rng: random.Random) -> Architecture:
    """A model of the older kind: LayerNorm with biases, a plain MLP, learned positions."""
    return replace(
        model, norm="layer", norm_bias=True, mlp="gelu", positions="learned", max_positions=32, qk_norm=False,
        bias=("qkv", "attention_out", "mlp"), numerics=replace(model.numerics, rotary=Rotary()),
    )  # fmt: skip


def random_weights(model: Architecture, seed: int, dtype: torch.dtype = torch.float32) -> ModelWeights:
    """None of them small, so that logits depend on each; biases of routers' choices where these are scored by sigmoid."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4).to(dtype)

    tensors = {name: drawn(tuple(tensor.shape)) for name, tensor in initial_weights(model, 1).tensors.items()}
    moved = model.numerics.gating.scores == SIGMOID and model.num_experts
    biases = {name: drawn((model.num_experts,)).float() for name in balance_biases(model).values()} if moved else {}
    return ModelWeights(model, tensors, biases)
