"""Models whose layers share blocks of attention and an MLP compute what Zamba and Zamba2 compute, and have their parameters.

Scores are multiplied by √(2/H) there and by 1/√H here, so queries are scaled. Modules run in double precision; norms, states and
rotary angles are in single precision in them: hence the tolerance.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from crosscheck.block_judges import POSITIONS, ROPE, SEQS, WIDTH, assert_equal, randomise, run_program
from crosscheck.mixer_weights import grouped_mamba1_weights, mamba2_weights
from torch.utils.flop_counter import FlopCounterMode

from shardwise.derive.inference_unit import INSTANCE_AXES, InferenceScheme
from shardwise.model import Architecture, borrowed_weights
from shardwise.model.decoder import model_program
from shardwise.model.huggingface.config import parse_config
from shardwise.model.numerics import NORM_EPSILON
from shardwise.model.parameters_and_flops import num_params, program_flops
from shardwise.run.numpy.inference import ServedModel, lay_out_tokens
from shardwise.sharding import Mesh
from shardwise.values import SymbolValues

HEADS, VOCAB = 4, 10
HEAD_DIM = 2 * WIDTH // HEADS
LAYERS = ["mamba", "hybrid", "hybrid", "mamba", "hybrid", "hybrid", "hybrid"]
COMMON: dict[str, Any] = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "intermediate_size": 12,
    "vocab_size": VOCAB, "num_hidden_layers": len(LAYERS), "layers_block_type": LAYERS, "mamba_d_conv": 4, "mamba_expand": 2,
    "rms_norm_eps": NORM_EPSILON, "hidden_act": "gelu_pytorch_tanh", "pad_token_id": None,
}  # fmt: skip


def _zamba2(**fields: Any) -> tuple[Any, Any]:
    """Return a narrow Zamba2 of two blocks, with adapters of its attention, and its config. No step is below the least one."""
    from transformers import Zamba2Config, Zamba2ForCausalLM

    config = Zamba2Config(**{
        **COMMON, "n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 5, "chunk_size": 4, "num_mem_blocks": 2,
        "adapter_rank": 3, "use_shared_attention_adapter": True, "use_mem_rope": True, "rope_parameters": ROPE,
        "add_bias_linear": True, "time_step_min": 1e-30, **fields,
    })  # fmt: skip
    return _build(Zamba2ForCausalLM, config)


def _zamba(**fields: Any) -> tuple[Any, Any]:
    """Return a narrow Zamba of one block, whose mixers have two groups of channels, and its config."""
    from transformers import ZambaConfig, ZambaForCausalLM

    mixer = {"n_mamba_heads": 2, "mamba_d_state": 5, "mamba_dt_rank": 3}
    return _build(ZambaForCausalLM, ZambaConfig(**{**COMMON, **mixer, **fields}))


def _build(model_class: Any, config: Any) -> tuple[Any, Any]:
    config._attn_implementation = "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model_class(config), config


def _adapter(stored: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """Return the matrices of an adapter of a layer, A [r, ...] and B [r, ...]."""
    return stored[f"{name}.0.weight"], stored[f"{name}.1.weight"].T


def _block_weights(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of a shared block by its module's."""
    heads, scale = (HEADS, 1, HEAD_DIM), 2.0**0.5
    weights = {
        "pair_norm.weight": stored["input_layernorm.weight"], "mlp_norm.weight": stored["pre_ff_layernorm.weight"],
        "wq": stored["self_attn.q_proj.weight"].reshape(*heads, 2 * WIDTH) * scale,
        "wk": stored["self_attn.k_proj.weight"].reshape(HEADS, HEAD_DIM, 2 * WIDTH),
        "wv": stored["self_attn.v_proj.weight"].reshape(HEADS, HEAD_DIM, 2 * WIDTH),
        "wo": stored["self_attn.o_proj.weight"].T.reshape(*heads, WIDTH), "w_down": stored["feed_forward.down_proj.weight"].T,
    }  # fmt: skip
    if "feed_forward.gate_up_proj.weight" not in stored:
        return weights | {f"w_{name}": stored[f"feed_forward.{name}_proj.weight"] for name in ("gate", "up")}
    for name, suffix in (("weight", ""), ("bias", ".bias")):
        gate, up = np.split(stored[f"feed_forward.gate_up_proj.{name}"], 2)
        weights |= {f"{'w_' * (not suffix)}gate{suffix}": gate, f"{'w_' * (not suffix)}up{suffix}": up}
    return weights | {"mlp_out.bias": stored["feed_forward.down_proj.bias"]}


def _own_adapters(stored: Mapping[str, Any], use: int) -> dict[str, Any]:
    """Return the adapters of one of the layers that use a block, by its number among all hybrid layers."""
    if f"feed_forward.gate_up_proj_adapter_list.{use}.0.weight" not in stored:
        return {}
    a, b = _adapter(stored, f"feed_forward.gate_up_proj_adapter_list.{use}")
    gate, up = np.split(b, 2, axis=1)
    weights = {"w_up.lora_a": a, "w_up.lora_b": up, "w_gate.lora_b": gate}
    for name, shape, scale in (
        ("q", (HEADS, 1, HEAD_DIM), 2.0**0.5),
        ("k", (HEADS, HEAD_DIM), 1),
        ("v", (HEADS, HEAD_DIM), 1),
    ):
        a, b = _adapter(stored, f"self_attn.linear_{name}_adapter_list.{use}")
        weights |= {f"w{name}.lora_a": a, f"w{name}.lora_b": b.reshape(-1, *shape) * scale}
    return weights


def _part(stored: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): array for name, array in stored.items() if name.startswith(prefix)}


def _weights(
    architecture: Architecture, stored: Mapping[str, Any], mixer_weights: Callable[..., Any]
) -> dict[str, Any]:
    """Return the weights of the program of the whole model: those of a block under the number of its first layer."""
    stored = {name.removeprefix("model."): array for name, array in stored.items()}
    weights = {"embedding": stored["embed_tokens.weight"], "final_norm.weight": stored["final_layernorm.weight"]}
    hybrids: list[int] = []
    units = architecture.layer_units
    for layer, unit in enumerate(units):
        owner, inner = architecture.unit_architecture(unit).weights_of, _part(stored, f"layers.{layer}.")
        layer_weights: dict[str, Any] = {}
        if architecture.unit_architecture(unit).shared_block:
            first = units.index(owner) if owner else layer
            module = (
                "shared_transf."
                if f"layers.{first}.shared_transf.input_layernorm.weight" in stored
                else "shared_transformer."
            )
            block = _part(stored, f"layers.{first}.{module}")
            layer_weights = {"shared_out": inner["linear.weight"], **_own_adapters(block, len(hybrids))}
            layer_weights |= {} if owner else _block_weights(block)
            hybrids.append(layer)
            inner = _part(inner, "mamba_decoder.")
        mixer = mixer_weights(architecture.recurrence, _part(inner, "mamba."))
        layer_weights |= {
            "attention_norm.weight": inner["input_layernorm.weight"],
            **{f"mixer.{name}": a for name, a in mixer.items()},
        }
        weights |= {f"{layer}.{name}": array for name, array in layer_weights.items()}
    return weights


@pytest.mark.parametrize(("build", "mixer_weights"), [(_zamba2, mamba2_weights), (_zamba, grouped_mamba1_weights)])
def test_logits_are_those_of_transformers(
    build: Callable[[], tuple[Any, Any]], mixer_weights: Callable[..., Any]
) -> None:
    model, config = build()
    stored, architecture = randomise(model), parse_config(config.to_dict())
    ids = np.random.default_rng(0).integers(VOCAB, size=(SEQS, POSITIONS))
    expected = model(torch.tensor(ids), use_cache=False).logits
    weights = {**_weights(architecture, stored, mixer_weights), "ids": ids}
    assert_equal(run_program(architecture, model_program(architecture), "logits", weights, np.zeros(1)), expected)


def _weights_by_unit(architecture: Architecture, weights: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the weights of each unit: those of a block also where a later layer uses it."""
    units = {"embedding": {"embedding": weights["embedding"]}}
    for layer, unit in enumerate(architecture.layer_units):
        owner = architecture.unit_architecture(unit).weights_of
        owner_weights = _part(weights, f"{architecture.layer_units.index(owner)}.") if owner else {}
        borrowed = {name: owner_weights[name] for name in borrowed_weights(architecture, unit)}
        units[f"layers.{layer}"] = {**borrowed, **_part(weights, f"{layer}.")}
    return {**units, "head": {"head": weights["embedding"], "final_norm.weight": weights["final_norm.weight"]}}


@pytest.mark.parametrize(("build", "mixer_weights"), [(_zamba2, mamba2_weights), (_zamba, grouped_mamba1_weights)])
def test_passes_of_inference_give_the_logits_of_transformers(
    build: Callable[[], tuple[Any, Any]], mixer_weights: Callable[..., Any]
) -> None:
    """A prompt in chunks and token by token, on two devices of tensor parallelism."""
    model, config = build()
    architecture = parse_config(config.to_dict())
    weights = _weights_by_unit(architecture, _weights(architecture, randomise(model), mixer_weights))
    ids = np.random.default_rng(0).integers(VOCAB, size=POSITIONS).tolist()
    expected = model(torch.tensor([ids]), use_cache=False).logits
    scheme = InferenceScheme(structure=architecture.structure)
    mesh = Mesh(tuple((axis, 2 if axis == "kv_m" else 1) for axis in INSTANCE_AXES))
    served, logits, start = ServedModel(architecture, scheme, mesh, weights, 1, 16), [], 0
    for length in (POSITIONS - 4, 2, 1, 1):
        tokens = lay_out_tokens([(0, ids[start : start + length], start)], 1, {0: (0, 0)}, num_picked=1)
        logits.append(served.run(tokens)[0, -1])
        start += length
    picked = [POSITIONS - 5, POSITIONS - 3, POSITIONS - 2, POSITIONS - 1]
    assert_equal(np.stack(logits), expected[0, picked])


@pytest.mark.parametrize(
    ("build", "fields"),
    [
        (_zamba2, {}), (_zamba2, {"num_mem_blocks": 1, "use_shared_attention_adapter": False, "add_bias_linear": False}),
        (_zamba2, {"num_mem_blocks": 9}), (_zamba2, {"layers_block_type": ["mamba"] * 7}),
        (_zamba2, {"num_mem_blocks": 3, "layers_block_type": ["hybrid"] * 7}),
        (_zamba2, {"layers_block_type": None, "num_hidden_layers": 54, "num_mem_blocks": 2}),
        (_zamba2, {"num_key_value_heads": 2, "use_shared_attention_adapter": False}),
        (_zamba, {}), (_zamba, {"n_mamba_heads": 1, "mamba_proj_bias": True, "mamba_conv_bias": False}),
        (_zamba, {"layers_block_type": None, "num_hidden_layers": 20, "attn_layer_period": 5, "attn_layer_offset": 1}),
        (_zamba, {"attention_head_dim": 6, "num_key_value_heads": 1, "mamba_dt_rank": "auto"}),
    ],
)  # fmt: skip
def test_parameters_are_those_of_transformers(build: Callable[..., tuple[Any, Any]], fields: dict[str, Any]) -> None:
    with torch.device("meta"):
        model, config = build(**fields)
    assert num_params(parse_config(config.to_dict())) == sum(weight.numel() for weight in model.parameters())


def _config_of(hidden_size: int, hybrids: tuple[int, ...], num_layers: int, **fields: Any) -> dict[str, Any]:
    layers = ["hybrid" if layer in hybrids else "mamba" for layer in range(num_layers)]
    return {"hidden_size": hidden_size, "num_hidden_layers": num_layers, "layers_block_type": layers, **fields}


# Values of the config.json of each release; of the others, the class has them as defaults.
PUBLISHED: dict[str, tuple[str, dict[str, Any], float]] = {
    "Zamba-7B-v1": ("ZambaConfig", {}, 7.23e9),
    "Zamba2-1.2B": (
        "Zamba2Config",
        _config_of(
            2048, (5, 11, 17, 23, 29, 35), 38, n_mamba_heads=64, mamba_d_state=128, use_shared_attention_adapter=True,
            use_mem_rope=True,
        ),
        1.22e9,
    ),
    "Zamba2-2.7B": ("Zamba2Config", {"n_mamba_heads": 80, "num_mem_blocks": 2}, 2.66e9),
    "Zamba2-7B": (
        "Zamba2Config",
        _config_of(3584, (6, *range(11, 78, 6)), 81, n_mamba_heads=112, mamba_ngroups=2, num_mem_blocks=2, use_mem_rope=True),
        7.36e9,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_parameters_of_transformers(name: str) -> None:
    import transformers

    class_name, fields, rounded = PUBLISHED[name]
    config = getattr(transformers, class_name)(**fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = num_params(parse_config(config.to_dict()))
    assert count == sum(weight.numel() for weight in model.parameters())
    assert count == pytest.approx(rounded, rel=5e-3)


@pytest.mark.parametrize(("build", "heads"), [(_zamba2, 8), (_zamba, 1)])
def test_flops_are_counted_products(build: Callable[..., tuple[Any, Any]], heads: int) -> None:
    """Of each use of a block. The counter counts whole squares of scores; products that kernels do elementwise are taken off:
    those that bring states from chunk to chunk (Zamba2), and those that read each state (Zamba)."""
    seq_len, state = 32, 5
    model, config = build(**({"mamba_ngroups": heads} if build is _zamba2 else {}))
    architecture = parse_config(config.to_dict())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.zeros(SEQS, seq_len, dtype=torch.long), use_cache=False)
    counts = counter.get_flop_counts()["Global"]
    products = sum(flops for operation, flops in counts.items() if "convolution" not in str(operation))
    channels = 2 * WIDTH
    rows = (seq_len / 4 + 1) ** 2 if build is _zamba2 else seq_len
    products -= len(LAYERS) * 2.0 * SEQS * rows * channels * state
    sizes = {**architecture.dims, "B": SEQS, "T": seq_len, "span": 1.0}
    flops = float(program_flops(model_program(architecture)).evaluate(SymbolValues(sizes)))
    assert flops == pytest.approx(products, rel=1e-9)
