"""Models whose layers read an embedding of their own, and keys and values of earlier layers, compute what Gemma 4 and Gemma 3n
compute; those of Gemma 3n have several streams as well, of which they predict all but one.

Constant factors (of embeddings and sums, which programs leave out) are put into the weights. Modules run in double precision;
rotary angles are in single precision in them: hence the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


STREAMS, LAUREL_RANK, LOGIT_CAP = 3, 5, 30.0
LARGEST_GATES = 40  # of so many gates some are above the cutoff


def _gemma3n(**fields: Any) -> tuple[Any, Any]:
    """Return a narrow Gemma 3n whose first layers keep the largest gates alone, and its config. All its layers see all tokens."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    num_layers = fields.get("num_hidden_layers", 4)
    config = Gemma3nTextConfig(**{
        "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "intermediate_size": LARGEST_GATES, "hidden_size_per_layer_input": INPUT_WIDTH, "vocab_size": 10,
        "vocab_size_per_layer_input": 10, "num_hidden_layers": num_layers, "num_kv_shared_layers": 2,
        "layer_types": ["full_attention"] * num_layers, "rms_norm_eps": NORM_EPSILON, "altup_num_inputs": STREAMS,
        "laurel_rank": LAUREL_RANK, "activation_sparsity_pattern": [0.95, 0.95, *[0.0] * (num_layers - 2)],
        "rope_parameters": {"full_attention": ROPE}, "pad_token_id": None, "final_logit_softcapping": LOGIT_CAP, **fields,
    })  # fmt: skip
    config._attn_implementation = "eager"
    return Gemma3nForCausalLM(config), config


def _architecture(num_layers: int = 4, num_shared: int = 2, **fields: Any) -> Architecture:
    first = num_layers - num_shared
    sparse = {"sparse_activation": True} if "alternating_streams" in fields else {}
    pattern = [*["plain"] * (first - 1), "store", *["block"] * num_shared]
    return Architecture(**{
        "name": "gemma4", "num_layers": num_layers, "d_model": WIDTH, "d_ff": 12, "num_heads": HEADS,
        "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": 10, "mlp": "geglu", "post_norms": True,
        "qk_norm": True, "key_sharing": "reuse", "layer_input_dim": INPUT_WIDTH, "tied_embeddings": True,
        "layer_pattern": tuple(pattern), "layer_kinds": {
            "plain": {"key_sharing": "none", "value_norm": True, **sparse},
            "store": {"key_sharing": "store", "value_norm": True, **sparse},
        }, **fields,
    })  # fmt: skip


STREAM_FIELDS = {"num_streams": STREAMS, "alternating_streams": True, "laurel_rank": LAUREL_RANK, "d_ff": LARGEST_GATES}


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
        layer_weights = _layer_weights(inner, reuses=layer >= num_layers - num_shared)
        weights |= {f"{layer}.{name}": array for name, array in layer_weights.items()}
    return weights


def _stream_weights(stored: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the weights of Gemma 3n's streams, of their ends and in each layer."""
    weights: dict[str, Any] = {}
    for name, module in (
        ("stream_projections", "altup_projections"),
        ("stream_unembeddings", "altup_unembed_projections"),
    ):
        weights[name] = np.stack([stored[f"model.{module}.{stream}.weight"] for stream in range(STREAMS - 1)])
    for layer in range(num_layers):
        altup, laurel = (f"model.layers.{layer}.{name}." for name in ("altup", "laurel"))
        inner = {
            "stream_router_norm.weight": stored[f"{altup}router_norm.weight"] / WIDTH,
            "stream_router": stored[f"{altup}modality_router.weight"],
            "stream_prediction": stored[f"{altup}prediction_coefs.weight"].reshape(STREAMS, STREAMS, STREAMS),
            "stream_correction": stored[f"{altup}correction_coefs.weight"],
            "stream_scale": stored[f"{altup}correct_output_scale"], "laurel_down": stored[f"{laurel}linear_left.weight"],
            "laurel_up": stored[f"{laurel}linear_right.weight"], "laurel_norm.weight": stored[f"{laurel}post_laurel_norm.weight"],
        }  # fmt: skip
        weights |= {f"{layer}.{name}": array for name, array in inner.items()}
    return weights


def test_logits_are_those_of_gemma3n() -> None:
    model, _ = _gemma3n()
    stored, architecture = randomise(model), _architecture(**STREAM_FIELDS)
    ids = np.random.default_rng(0).integers(10, size=(SEQS, POSITIONS))
    expected = model(torch.tensor(ids), use_cache=False).logits
    weights = {**_model_weights(stored, 4, 2), **_stream_weights(stored, 4), "ids": ids}
    logits = run_program(architecture, model_program(architecture), "logits", weights, np.zeros(1))
    assert_equal(LOGIT_CAP * np.tanh(logits / LOGIT_CAP), expected)


def test_logits_are_those_of_gemma4() -> None:
    model, _ = _gemma4()
    stored, architecture = randomise(model), _architecture()
    ids = np.random.default_rng(0).integers(10, size=(SEQS, POSITIONS))
    expected = model(torch.tensor(ids), use_cache=False).logits
    weights = {**_model_weights(stored, 4, 2), "ids": ids}
    assert_equal(run_program(architecture, model_program(architecture), "logits", weights, np.zeros(1)), expected)


@pytest.mark.parametrize(("build", "fields"), [(_gemma4, {}), (_gemma3n, STREAM_FIELDS)])
def test_flops_are_counted_products(build: Callable[[], tuple[Any, Any]], fields: dict[str, Any]) -> None:
    """The counter counts whole squares of scores, of which the causal half is required."""
    seq_len, architecture = 32, _architecture(**fields)
    model, _ = build()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(SEQS, seq_len, dtype=torch.long), use_cache=False)
    sizes = {**architecture.dims, "B": SEQS, "T": seq_len, "span": 1.0}
    flops = float(program_flops(model_program(architecture)).evaluate(SymbolValues(sizes)))
    assert flops == counter.get_total_flops()


@pytest.mark.parametrize(
    ("build", "fields"),
    [
        (_gemma4, {"num_layers": 13, "num_shared": 7, "layer_types": None, "use_double_wide_mlp": True, "global_head_dim": 8}),
        (_gemma4, {"num_layers": 13, "num_shared": 6, "layer_types": None, "hidden_size_per_layer_input": 0,
                   "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
        (_gemma3n, {"num_hidden_layers": 13, "num_kv_shared_layers": 4, "layer_types": None, "attention_bias": True,
                    "activation_sparsity_pattern": None}),
        (_gemma3n, {"num_hidden_layers": 6, "layer_types": None, "num_kv_shared_layers": 0,
                    "intermediate_size": [40, 40, 40, 24, 24, 24]}),
    ],
)  # fmt: skip
def test_parameters_are_those_of_transformers(build: Callable[..., tuple[Any, Any]], fields: dict[str, Any]) -> None:
    rotary = dict.fromkeys(("full_attention", "sliding_attention"), ROPE)
    with torch.device("meta"):
        model, config = build(**{**fields, "rope_parameters": rotary})
    assert num_params(parse_config(config.to_dict())) == sum(weight.numel() for weight in model.parameters())
