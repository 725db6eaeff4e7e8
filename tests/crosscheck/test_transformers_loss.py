"""The programs compute what the models of `transformers` compute: the same small weights, the same loss.

Our arithmetic has one base of rotary embeddings, one epsilon and gates that sum to one; the configs below ask for these.
Weights are in double precision, but norms and softmaxes of these models work in single precision: hence the tolerance.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from schemes import scheme_of

from shardwise.derive.sharded_unit import derive_unit
from shardwise.model import numerics
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import model_program
from shardwise.model.huggingface.config import parse_config
from shardwise.model.operations.elementwise_functions import FUNCTIONS
from shardwise.run.numpy import kernels
from shardwise.run.numpy.devices import VirtualDevices
from shardwise.run.numpy.kernels import Router
from shardwise.sharding import Mesh

AXES = ("dp", "fsdp", "ep", "cp", "tp_kv", "tp_rep")
SEQS, POSITIONS = 2, 6
TOLERANCE = 1e-6
SMALL: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
    "vocab_size": 31, "head_dim": 8, "rms_norm_eps": numerics.NORM_EPSILON, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": numerics.ROTARY_BASE},
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "attention_bias": True, "mlp_bias": True},
    "qwen3": SMALL,
    "olmo2": SMALL,
    "gpt_oss": {**SMALL, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 64},
    "qwen3_moe": {**SMALL, **EXPERTS},
    "qwen2_moe": {**SMALL, **EXPERTS, "shared_expert_intermediate_size": 12},
    "glm4_moe": {
        **SMALL,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.8,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {**SMALL["rope_parameters"], "partial_rotary_factor": 1.0},
    },
    "olmoe": {**SMALL, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "head_dim": 4},
}
# Where the model of `transformers` keeps each weight of ours, without the prefix `model.layers.N.`.
ATTENTION = {
    "wq": "self_attn.q_proj.weight", "wk": "self_attn.k_proj.weight", "wv": "self_attn.v_proj.weight",
    "q_flat.bias": "self_attn.q_proj.bias", "k_flat.bias": "self_attn.k_proj.bias", "v.bias": "self_attn.v_proj.bias",
    "attention_out.bias": "self_attn.o_proj.bias", "q_norm.weight": "self_attn.q_norm.weight",
    "k_norm.weight": "self_attn.k_norm.weight", "sinks": "self_attn.sinks",
    "attention_norm.weight": "input_layernorm.weight", "attention_post_norm.weight": "post_attention_layernorm.weight",
    "mlp_post_norm.weight": "post_feedforward_layernorm.weight",
}  # fmt: skip
MLP = {
    "w_up": "mlp.up_proj.weight", "w_gate": "mlp.gate_proj.weight", "up.bias": "mlp.up_proj.bias",
    "gate.bias": "mlp.gate_proj.bias", "mlp_out.bias": "mlp.down_proj.bias",
    "shared_up": "mlp.shared_expert.up_proj.weight", "shared_gate": "mlp.shared_expert.gate_proj.weight",
    "shared_expert_gate": "mlp.shared_expert_gate.weight", "router_logits.bias": "mlp.router.bias",
    "experts_down.bias": "mlp.experts.down_proj_bias",
}  # fmt: skip
WHOLE = {"embedding": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight", "head": "lm_head.weight"}


def reference(kind: str) -> tuple[Any, Any, float]:
    """A small model with random weights, tokens, and its loss: every position but the first is a target."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        described = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
        described._attn_implementation = described._experts_implementation = "eager"
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(described).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_().mul_(0.5).add_(1.0 if parameter.dim() == 1 else 0.0)
            ids = torch.randint(described.vocab_size, (SEQS, POSITIONS + 1))
            logits = model(ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    return model, ids.numpy(), float(loss)


def weights(model: Any, architecture: Architecture) -> Iterator[tuple[str, Any]]:
    """Our weights by name, in the shapes that `transformers` keeps them in, experts' put as we have them."""
    stored = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    yield from ((name, stored[theirs]) for name, theirs in WHOLE.items())
    for layer in range(architecture.num_layers):
        layer_weights = {name.removeprefix(f"model.layers.{layer}."): array for name, array in stored.items()}
        names = {**ATTENTION, **MLP}
        if architecture.pre_norms and not architecture.post_norms:
            names |= {"mlp_norm.weight": "post_attention_layernorm.weight"}
            names.pop("attention_post_norm.weight")
        plural = {name: theirs.replace("shared_expert.", "shared_experts.") for name, theirs in names.items()}
        renamed = {
            name: layer_weights[theirs]
            for table in (names, plural)
            for name, theirs in table.items()
            if theirs in layer_weights
        }
        yield from ((f"{layer}.{name}", array) for name, array in renamed.items())
        yield from ((f"{layer}.{name}", array) for name, array in turn_matrices(layer_weights, architecture))


def turn_matrices(layer_weights: dict[str, Any], architecture: Architecture) -> Iterator[tuple[str, Any]]:
    """Matrices that lie the other way round, or in which gate and up are one tensor."""
    yield "wo", layer_weights["self_attn.o_proj.weight"].T
    for name, theirs in (
        ("w_down", "mlp.down_proj.weight"), ("shared_down", "mlp.shared_expert.down_proj.weight"),
        ("shared_down", "mlp.shared_experts.down_proj.weight"),
    ):  # fmt: skip
        if theirs in layer_weights:
            yield name, layer_weights[theirs].T
    if not architecture.num_experts:
        return
    router = (
        layer_weights["mlp.router.weight"] if "mlp.router.weight" in layer_weights else layer_weights["mlp.gate.weight"]
    )
    yield "router", router.T
    gate_up, down = layer_weights["mlp.experts.gate_up_proj"], layer_weights["mlp.experts.down_proj"]
    if architecture.sinks:  # gpt-oss: [E, D, 2 M] with gate and up in turns, and [E, M, D]
        gate_up, bias = np.swapaxes(gate_up, 1, 2), layer_weights["mlp.experts.gate_up_proj_bias"]
        yield from (("experts_gate", gate_up[:, ::2]), ("experts_up", gate_up[:, 1::2]), ("experts_down", down))
        yield from (("experts_gate.bias", bias[:, ::2]), ("experts_up.bias", bias[:, 1::2]))
    else:  # [E, 2 M, D] with gate before up, and [E, D, M]
        gate, up = np.split(gate_up, 2, axis=1)
        yield from (("experts_gate", gate), ("experts_up", up), ("experts_down", np.swapaxes(down, 1, 2)))


def loss_of(architecture: Architecture, ids: Any, weights_by_name: dict[str, Any]) -> float:
    """Our program's loss on one device; every weight has to be given, and no other."""
    unit = derive_unit("whole", model_program(architecture), scheme_of(architecture.structure))
    program, specs = unit.forward.program, unit.forward.specs
    sizes = {**architecture.dims, "B": SEQS, "T": POSITIONS}
    assert set(weights_by_name) == set(program.weights)
    router = Router.of(architecture.numerics)
    devices = VirtualDevices(Mesh(tuple((axis, 1) for axis in AXES)), sizes, router=router)
    scale = np.array(1.0 / (SEQS * POSITIONS))
    batch = {"ids": ids[:, :-1], "targets": ids[:, 1:], "positions": np.arange(POSITIONS), "loss_scale": scale}
    devices.constants = {name: (program.dims(name), array) for name, array in batch.items()}
    for name, array in weights_by_name.items():
        devices.scatter_array(name, specs[name], array.reshape([sizes[dim] for dim in program.dims(name)]))
    devices.run(program, unit.forward.steps)
    return float(devices.gather_array("loss", specs["loss"]))


@pytest.mark.parametrize("kind", CONFIGS)
def test_losses_equal_transformers(kind: str) -> None:
    model, ids, expected = reference(kind)
    architecture = parse_config({**CONFIGS[kind], "model_type": kind})
    weights_by_name = dict(weights(model, architecture))
    assert sum(array.size for array in weights_by_name.values()) == sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert loss_of(architecture, ids, weights_by_name) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("part", ["0.sinks", "0.router_logits.bias", "1.experts_up.bias", "1.experts_down.bias"])
def test_every_weight_of_gpt_oss_changes_the_loss(part: str) -> None:
    """A weight that the loss did not depend on could be wrong unnoticed."""
    model, ids, expected = reference("gpt_oss")
    architecture = parse_config({**CONFIGS["gpt_oss"], "model_type": "gpt_oss"})
    weights_by_name = dict(weights(model, architecture))
    weights_by_name[part] = weights_by_name[part] * np.linspace(0.5, 1.5, weights_by_name[part].size).reshape(
        weights_by_name[part].shape
    )
    assert abs(loss_of(architecture, ids, weights_by_name) - expected) > 1e3 * TOLERANCE


ACTIVATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "swiglu": lambda gate, up: torch.nn.functional.silu(gate) * up,
    "geglu": lambda gate, up: torch.nn.functional.gelu(gate, approximate="tanh") * up,
    "clamped_swiglu": lambda gate, up: (
        (lambda low: low * torch.sigmoid(1.702 * low))(gate.clamp(max=7.0)) * (up.clamp(-7.0, 7.0) + 1.0)
    ),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_activations_and_their_gradients(name: str) -> None:
    """Over values on both sides of the clamps."""
    grid = np.linspace(-9.3, 9.3, 41)
    gate, up = (torch.tensor(a, requires_grad=True) for a in np.meshgrid(grid, grid))
    dy = torch.linspace(0.5, 2.0, gate.numel(), dtype=torch.float64).reshape(gate.shape)
    expected = ACTIVATIONS[name](gate, up)
    expected.backward(dy)
    g, u, d = gate.detach().numpy(), up.detach().numpy(), dy.numpy()
    assert kernels.MAPS[name](g, u, width=1) == pytest.approx(expected.detach().numpy(), rel=1e-12)
    for position, slope in enumerate((gate.grad, up.grad)):
        gradient = FUNCTIONS[name].gradients[position]
        assert gradient is not None
        computed = kernels.MAPS[gradient.function](d, *((g, u)[i] for i in gradient.operands), width=1)
        assert computed == pytest.approx(slope.numpy(), rel=1e-10, abs=1e-12)
