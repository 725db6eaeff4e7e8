"""Models whose layers read an embedding of their own, and keys and values of earlier layers, compute what Gemma 4 computes.

Constant factors (of embeddings and sums, which programs leave out) are put into the weights. Modules run in double precision;
rotary angles are in single precision in them: hence the tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from crosscheck.block_judges import POSITIONS, ROPE, SEQS, assert_equal, randomise, run_program
from torch.utils.flop_counter import FlopCounterMode

from shardwise.model import Architecture
from shardwise.model.decoder import model_program
from shardwise.model.huggingface.config import parse_config
from shardwise.model.numerics import NORM_EPSILON
from shardwise.model.parameters_and_flops import num_params, program_flops
from shardwise.values import SymbolValues

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INPUT_WIDTH = 16, 4, 2, 6, 8
NORMS = {
    "attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
    "layer_input_norm": "post_per_layer_input_norm",
}  # fmt: skip


def _gemma4(num_layers: int = 4, num_shared: int = 2, **fields: Any) -> tuple[Any, Any]:
    """Return a narrow Gemma 4 whose last layers reuse keys and values, and its config. All its layers see all tokens."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(**{
        "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "global_head_dim": HEAD_DIM, "intermediate_size": 12, "hidden_size_per_layer_input": INPUT_WIDTH, "vocab_size": 10,
        "vocab_size_per_layer_input": 10, "num_hidden_layers": num_layers, "num_kv_shared_layers": num_shared,
        "layer_types": ["full_attention"] * num_layers, "rms_norm_eps": NORM_EPSILON,
        "rope_parameters": {"full_attention": ROPE}, "pad_token_id": None, **fields,
    })  # fmt: skip
    config._attn_implementation = "eager"
    return Gemma4ForCausalLM(config), config


def _architecture(num_layers: int = 4, num_shared: int = 2) -> Architecture:
    first = num_layers - num_shared
    pattern = [*["plain"] * (first - 1), "store", *["block"] * num_shared]
    return Architecture(
        name="gemma4", num_layers=num_layers, d_model=WIDTH, d_ff=12, num_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM, vocab_size=10, mlp="geglu", post_norms=True, qk_norm=True, key_sharing="reuse",
        layer_input_dim=INPUT_WIDTH, tied_embeddings=True, layer_pattern=tuple(pattern),
        layer_kinds={
            "plain": {"key_sharing": "none", "value_norm": True}, "store": {"key_sharing": "store", "value_norm": True},
        },
    )  # fmt: skip


def _layer_weights(stored: Mapping[str, Any], *, reuses: bool) -> dict[str, Any]:
    shapes = {"q": (KV_HEADS, HEADS // KV_HEADS, HEAD_DIM), "k": (KV_HEADS, HEAD_DIM), "v": (KV_HEADS, HEAD_DIM)}
    names = "q" if reuses else "qkv"
    weights = {f"w{name}": stored[f"self_attn.{name}_proj.weight"].reshape(*shapes[name], WIDTH) for name in names}
    weights |= {f"{name}_norm.weight": stored[f"self_attn.{name}_norm.weight"] for name in names if name != "v"}
    weights["q_norm.weight"] = weights["q_norm.weight"] * HEAD_DIM**0.5  # its scores are not scaled
    weights |= {f"{name}.weight": stored[f"{module}.weight"] for name, module in NORMS.items()}
    return weights | {
        "wo": stored["self_attn.o_proj.weight"].T.reshape(*shapes["q"], WIDTH), "w_gate": stored["mlp.gate_proj.weight"],
        "w_up": stored["mlp.up_proj.weight"], "w_down": stored["mlp.down_proj.weight"].T,
        "layer_input_gate": stored["per_layer_input_gate.weight"], "layer_input_out": stored["per_layer_projection.weight"],
    }  # fmt: skip


def _model_weights(stored: Mapping[str, Any], num_layers: int, num_shared: int) -> dict[str, Any]:
    stored = {name.removeprefix("model."): array for name, array in stored.items()}
    packed, half = (num_layers, INPUT_WIDTH), 2.0**-0.5
    weights = {
        "embedding": stored["embed_tokens.weight"] * WIDTH**0.5, "final_norm.weight": stored["norm.weight"] / WIDTH**0.5,
        "layer_embedding": stored["embed_tokens_per_layer.weight"].reshape(-1, *packed) * INPUT_WIDTH**0.5 * half,
        "layer_projection": stored["per_layer_model_projection.weight"].reshape(*packed, WIDTH) * WIDTH**-0.5,
        "layer_projection_norm.weight": stored["per_layer_projection_norm.weight"] * half,
    }  # fmt: skip
    for layer in range(num_layers):
        prefix = f"layers.{layer}."
        inner = {name.removeprefix(prefix): array for name, array in stored.items() if name.startswith(prefix)}
        own = _layer_weights(inner, reuses=layer >= num_layers - num_shared)
        weights |= {f"{layer}.{name}": array for name, array in own.items()}
    return weights


def test_logits_are_those_of_gemma4() -> None:
    model, _ = _gemma4()
    stored, architecture = randomise(model), _architecture()
    ids = np.random.default_rng(0).integers(10, size=(SEQS, POSITIONS))
    expected = model(torch.tensor(ids), use_cache=False).logits
    weights = {**_model_weights(stored, 4, 2), "ids": ids}
    assert_equal(run_program(architecture, model_program(architecture), "logits", weights, np.zeros(1)), expected)


def test_flops_are_counted_products() -> None:
    """The counter counts whole squares of scores, of which the causal half is required."""
    seq_len, architecture = 32, _architecture()
    model, _ = _gemma4()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(SEQS, seq_len, dtype=torch.long), use_cache=False)
    sizes = {**architecture.dims, "B": SEQS, "T": seq_len, "span": 1.0}
    flops = float(program_flops(model_program(architecture)).evaluate(SymbolValues(sizes)))
    assert flops == counter.get_total_flops()


@pytest.mark.parametrize(
    "fields",
    [
        {"num_layers": 13, "num_shared": 7, "layer_types": None, "use_double_wide_mlp": True, "global_head_dim": 8},
        {"num_layers": 13, "num_shared": 6, "layer_types": None, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
         "num_global_key_value_heads": 1},
    ],
)  # fmt: skip
def test_parameters_are_those_of_transformers(fields: dict[str, Any]) -> None:
    rotary = dict.fromkeys(("full_attention", "sliding_attention"), ROPE)
    with torch.device("meta"):
        model, config = _gemma4(**{**fields, "rope_parameters": rotary})
    assert num_params(parse_config(config.to_dict())) == sum(weight.numel() for weight in model.parameters())
