"""Recurrent mixers compute what the modules of `transformers` compute: the same outputs, and the same gradients by autograd.

Modules run in double precision, but norms, decays and states are cast to single precision in them: hence the tolerances.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from crosscheck.mixer_weights import Arrays, mamba1_weights, mamba2_weights, split_array, stack_filters
from torch import nn

from shardwise.derive.sharded_unit import derive_unit
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.block_parts import HIDDEN
from shardwise.model.mixer_builder import add_recurrent_mixer
from shardwise.model.numerics import NORM_EPSILON
from shardwise.model.program import Program, ProgramBuilder, Role
from shardwise.model.recurrent_mixers import RecurrentMixer
from shardwise.model.structure import ModelStructure
from shardwise.run.numpy.devices import VirtualDevices
from shardwise.sharding import Mesh

AXES = ("dp", "fsdp", "ep", "cp", "tp_kv", "tp_rep")
SEQS, POSITIONS, WIDTH = 2, 11, 12
TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5


@dataclass(frozen=True)
class Judge:
    """A module of transformers, the mixer that it is, and the mixer's arrays from a module's by name (also for gradients)."""

    module: Callable[[], nn.Module]
    mixer: RecurrentMixer
    arrays: Callable[[RecurrentMixer, Mapping[str, Any]], Arrays]


def _config(name: str, **fields: Any) -> Any:
    import transformers

    return getattr(transformers, name)(**fields)


def _module(path: str, name: str, config: Any) -> nn.Module:
    from importlib import import_module

    module: nn.Module = getattr(import_module(f"transformers.models.{path}"), name)(config, 0)
    return module


def _qwen3_next() -> nn.Module:
    config = _config(
        "Qwen3NextConfig", hidden_size=WIDTH, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=5,
        linear_value_head_dim=3, linear_conv_kernel_dim=4, rms_norm_eps=NORM_EPSILON, num_hidden_layers=4,
    )  # fmt: skip
    return _module("qwen3_next.modeling_qwen3_next", "Qwen3NextGatedDeltaNet", config)


def _qwen3_5() -> nn.Module:
    config = _config(
        "Qwen3_5TextConfig", hidden_size=WIDTH, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=5,
        linear_value_head_dim=3, linear_conv_kernel_dim=4, rms_norm_eps=NORM_EPSILON, num_hidden_layers=4,
    )  # fmt: skip
    return _module("qwen3_5.modeling_qwen3_5", "Qwen3_5GatedDeltaNet", config)


def _kimi() -> nn.Module:
    config = _config(
        "KimiLinearConfig", hidden_size=WIDTH, linear_num_heads=3, linear_head_dim=4, linear_conv_kernel_dim=4,
        rms_norm_eps=NORM_EPSILON, num_hidden_layers=4,
    )  # fmt: skip
    return _module("kimi_linear.modeling_kimi_linear", "KimiLinearDeltaAttention", config)


def _bailing() -> nn.Module:
    config = _config(
        "BailingHybridConfig", hidden_size=WIDTH, num_attention_heads=3, head_dim=4, short_conv_kernel_size=4,
        rms_norm_eps=NORM_EPSILON, num_hidden_layers=6,
    )  # fmt: skip
    return _module("bailing_hybrid.modeling_bailing_hybrid", "BailingHybridDeltaAttention", config)


class _Lightning(nn.Module):
    """A module of MiniMax, which takes arguments that it does not read."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x, None, None)


def _minimax() -> nn.Module:
    config = _config(
        "MiniMaxConfig", hidden_size=WIDTH, num_attention_heads=3, head_dim=4, block_size=4, num_hidden_layers=4,
        layer_types=["linear_attention"] * 4,
    )  # fmt: skip
    module = _module("minimax.modeling_minimax", "MiniMaxLightningAttention", config)
    module.norm.variance_epsilon = NORM_EPSILON  # the model gives it its default
    return _Lightning(module)


def _xlstm() -> nn.Module:
    from transformers.models.xlstm.modeling_xlstm import xLSTMLayer

    config = _config(
        "xLSTMConfig", hidden_size=WIDTH, num_heads=3, num_hidden_layers=1, norm_eps=NORM_EPSILON, eps=1e-12, mode="train",
        autocast_kernel_dtype="float32", chunk_size=POSITIONS, return_last_states=True,
    )  # fmt: skip
    return xLSTMLayer(config)


def _bamba() -> nn.Module:
    config = _config(
        "BambaConfig", hidden_size=WIDTH, mamba_n_heads=6, mamba_d_head=4, mamba_n_groups=1, mamba_d_state=5, mamba_expand=2,
        mamba_d_conv=4, mamba_chunk_size=4, rms_norm_eps=NORM_EPSILON, mamba_conv_bias=True, mamba_proj_bias=False,
    )  # fmt: skip
    return _module("bamba.modeling_bamba", "BambaMixer", config)


def _nemotron_h() -> nn.Module:
    config = _config(
        "NemotronHConfig", hidden_size=WIDTH, mamba_num_heads=6, mamba_head_dim=4, n_groups=2, ssm_state_size=5, expand=2,
        conv_kernel=4, chunk_size=4, layer_norm_epsilon=NORM_EPSILON, use_conv_bias=True, use_bias=True,
    )  # fmt: skip
    return _module("nemotron_h.modeling_nemotron_h", "NemotronHMamba2Mixer", config)


def _falcon_h1(**norm: bool) -> nn.Module:
    config = _config(
        "FalconH1Config", hidden_size=WIDTH, mamba_n_heads=6, mamba_d_head=4, mamba_n_groups=2, mamba_d_state=5, mamba_d_ssm=24,
        mamba_d_conv=4, mamba_chunk_size=4, rms_norm_eps=NORM_EPSILON, mamba_conv_bias=True, mamba_proj_bias=False,
        num_hidden_layers=1, **norm,
    )  # fmt: skip
    module = _module("falcon_h1.modeling_falcon_h1", "FalconH1Mixer", config)
    module.register_buffer("mup_vector", torch.ones(1), persistent=False)
    return module


def _jamba() -> nn.Module:
    config = _config(
        "JambaConfig", hidden_size=WIDTH, mamba_d_state=5, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=3, mamba_conv_bias=True,
        mamba_proj_bias=False, rms_norm_eps=NORM_EPSILON, num_hidden_layers=1,
    )  # fmt: skip
    return _module("jamba.modeling_jamba", "JambaMambaMixer", config)


def _lfm2() -> nn.Module:
    config = _config(
        "Lfm2Config", hidden_size=WIDTH, conv_L_cache=3, conv_bias=True, num_hidden_layers=1, layer_types=["conv"]
    )
    return _module("lfm2.modeling_lfm2", "Lfm2ShortConv", config)


class _RecurrentGemma(nn.Module):
    """A recurrent block of RecurrentGemma, which takes the positions of its tokens."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x, torch.arange(x.shape[1])[None], None, use_cache=False)


def _recurrent_gemma() -> nn.Module:
    config = _config("RecurrentGemmaConfig", hidden_size=WIDTH, num_attention_heads=3, lru_width=15, conv1d_width=4)
    path = "recurrent_gemma.modeling_recurrent_gemma"
    return _RecurrentGemma(_module(path, "RecurrentGemmaRecurrentBlock", config))


def _gated_delta(mixer: RecurrentMixer, stored: Mapping[str, Any]) -> Arrays:
    heads, per, n, x = (mixer.dims[d] for d in "LONX")
    shapes: dict[str, tuple[int, ...]] = {"q": (heads, n), "k": (heads, n), "v": (heads, per, x)}
    arrays = stack_filters(
        stored["conv1d.weight"], {name: int(np.prod(shape)) for name, shape in shapes.items()}, shapes
    )
    if "in_proj_qkvz.weight" in stored:  # by head: queries, keys, values and gates; then beta and steps
        by_head = stored["in_proj_qkvz.weight"].reshape(heads, -1, WIDTH)
        parts = split_array(by_head, {"q": n, "k": n, "v": per * x, "z": per * x}, axis=1)
        parts |= split_array(stored["in_proj_ba.weight"].reshape(heads, -1, WIDTH), {"b": per, "a": per}, axis=1)
    else:
        parts = split_array(stored["in_proj_qkv.weight"], {"q": heads * n, "k": heads * n, "v": heads * per * x})
        parts |= {name: stored[f"in_proj_{name}.weight"] for name in "zba"}
    shapes |= {"z": shapes["v"], "b": (heads, per), "a": (heads, per)}
    arrays |= {f"w_{name}": part.reshape(*shapes[name], WIDTH) for name, part in parts.items()}
    return arrays | {
        "step.bias": stored["dt_bias"].reshape(heads, per), "log_rate": stored["A_log"].reshape(heads, per),
        "norm.weight": stored["norm.weight"], "w_out": stored["out_proj.weight"].T.reshape(heads, per, x, WIDTH),
    }  # fmt: skip


def _kimi_delta(mixer: RecurrentMixer, stored: Mapping[str, Any]) -> Arrays:
    heads, n = mixer.dims["L"], mixer.dims["N"]
    shapes = dict.fromkeys("qkv", (heads, n))
    arrays = stack_filters(stored["conv1d.weight"], dict.fromkeys("qkv", heads * n), shapes)
    arrays |= {f"w_{name}": stored[f"{name}_proj.weight"].reshape(heads, n, WIDTH) for name in "qkv"}
    if mixer.full_rank_gates:
        gates = {"w_f": "forget_gate.f_proj", "w_g": "g_proj"}
    else:
        arrays |= {"w_f_down": stored["forget_gate.f_a_proj.weight"], "w_g_down": stored["g_a_proj.weight"]}
        gates = {"w_f_up": "forget_gate.f_b_proj", "w_g_up": "g_b_proj"}
    arrays |= {name: stored[f"{module}.weight"].reshape(heads, n, -1) for name, module in gates.items()}
    arrays |= {
        "step.bias": stored["forget_gate.dt_bias"].reshape(heads, n),
        "log_rate": stored["forget_gate.A_log"].reshape(heads),
    }
    return arrays | {
        "w_b": stored["b_proj.weight"], "norm.weight": stored["o_norm.weight"],
        "w_out": stored["o_proj.weight"].T.reshape(heads, n, WIDTH),
    }  # fmt: skip


def _lightning(mixer: RecurrentMixer, stored: Mapping[str, Any]) -> Arrays:
    heads, n = mixer.dims["L"], mixer.dims["N"]
    parts = np.split(stored["module.qkv_proj.weight"].reshape(heads, 3 * n, WIDTH), 3, axis=1)
    return {
        **{f"w_{name}": part for name, part in zip("qkv", parts, strict=True)},
        "w_z": stored["module.output_gate.weight"].reshape(heads, n, WIDTH),
        "norm.weight": stored["module.norm.weight"].reshape(heads, n),
        "w_out": stored["module.out_proj.weight"].T.reshape(heads, n, WIDTH),
    }  # fmt: skip


def _fixed_decays(heads: int) -> Any:
    """Return the decays of the first of four layers [B, T, heads] (Qin et al. 2024), as MiniMax's `get_slope_rate` has them."""
    slopes = 2.0 ** (-8.0 / heads * np.arange(1, heads + 1)) * (1.0 + 1e-5)
    return np.broadcast_to(-slopes, (SEQS, POSITIONS, heads))


def _mlstm(mixer: RecurrentMixer, stored: Mapping[str, Any]) -> Arrays:
    heads, n, x = (mixer.dims[dim] for dim in "LNX")
    modules = {"q": ("q", n), "k": ("k", n), "v": ("v", x), "z": ("ogate_preact", x)}
    return {
        **{f"w_{name}": stored[f"{m}.weight"].reshape(heads, width, WIDTH) for name, (m, width) in modules.items()},
        **{f"w_{name}": stored[f"{name}gate_preact.weight"] for name in "if"},
        **{f"{name}.bias": stored[f"{name}gate_preact.bias"] for name in "if"},
        "norm.weight": stored["multihead_norm.weight"].reshape(heads, x),
        "w_out": stored["out_proj.weight"].T.reshape(heads, x, WIDTH),
    }  # fmt: skip


def _rg_lru(mixer: RecurrentMixer, stored: Mapping[str, Any]) -> Arrays:
    blocks, width = mixer.dims["L"], mixer.dims["X"]
    stored = {name.removeprefix("module."): array for name, array in stored.items()}
    gates = {"i": "input_gate", "r": "recurrent_gate"}
    return {
        **{f"w_{name}": stored[f"linear_{m}.weight"].reshape(blocks, width, WIDTH) for name, m in (("x", "x"), ("z", "y"))},
        **{f"{name}.bias": stored[f"linear_{m}.bias"].reshape(blocks, width) for name, m in (("x", "x"), ("z", "y"))},
        **{f"w_{name}": stored[f"rg_lru.{gate}_weight"].swapaxes(1, 2) for name, gate in gates.items()},
        **{f"{name}.bias": stored[f"rg_lru.{gate}_bias"] for name, gate in gates.items()},
        "x_conv": stored["conv_1d.weight"][:, 0].T.reshape(-1, blocks, width),
        "x_conv.bias": stored["conv_1d.bias"].reshape(blocks, width),
        "log_rate": stored["rg_lru.recurrent_param"].reshape(blocks, width),
        "w_out": stored["linear_out.weight"].T.reshape(blocks, width, WIDTH), "out.bias": stored["linear_out.bias"],
    }  # fmt: skip


def _short_conv(mixer: RecurrentMixer, stored: Mapping[str, Any]) -> Arrays:
    sizes = dict.fromkeys(("gate_in", "gate_out", "x"), mixer.dims["L"])
    weights = {f"w_{name}": part for name, part in split_array(stored["in_proj.weight"], sizes).items()}
    biases = {f"{name}.bias": part for name, part in split_array(stored["in_proj.bias"], sizes).items()}
    return {
        **weights, **biases, "x_conv": stored["conv.weight"][:, 0].T, "x_conv.bias": stored["conv.bias"],
        "w_out": stored["out_proj.weight"].T, "out.bias": stored["out_proj.bias"],
    }  # fmt: skip


DELTA = RecurrentMixer(kind="gated_delta", num_heads=6, num_groups=2, key_dim=5, head_dim=3, conv_width=4)
MAMBA: dict[str, Any] = {
    "kind": "mamba2",
    "num_heads": 6,
    "key_dim": 5,
    "head_dim": 4,
    "conv_width": 4,
    "conv_bias": True,
}
JUDGES: dict[str, Judge] = {
    "Qwen3-Next": Judge(_qwen3_next, DELTA, _gated_delta),
    "Qwen3.5": Judge(_qwen3_5, DELTA, _gated_delta),
    "Kimi Linear": Judge(
        _kimi,
        RecurrentMixer(kind="kimi_delta", num_heads=3, num_groups=3, key_dim=4, head_dim=4, conv_width=4, gate_rank=4),
        _kimi_delta,
    ),
    "Ling 3": Judge(
        _bailing,
        RecurrentMixer(
            kind="kimi_delta",
            num_heads=3,
            num_groups=3,
            key_dim=4,
            head_dim=4,
            conv_width=4,
            full_rank_gates=True,
            bounded_decay=True,
        ),
        _kimi_delta,
    ),
    "MiniMax": Judge(
        _minimax,
        RecurrentMixer(kind="lightning", num_heads=3, num_groups=3, key_dim=4, head_dim=4, conv_width=1),
        _lightning,
    ),
    "xLSTM": Judge(
        _xlstm, RecurrentMixer(kind="mlstm", num_heads=3, num_groups=3, key_dim=2, head_dim=4, conv_width=1), _mlstm
    ),
    "Bamba": Judge(_bamba, RecurrentMixer(**MAMBA, norm="after_gate"), mamba2_weights),
    "Nemotron-H": Judge(
        _nemotron_h, RecurrentMixer(**MAMBA, num_groups=2, norm="after_gate", projection_bias=True), mamba2_weights
    ),
    "Falcon-H1": Judge(
        lambda: _falcon_h1(mamba_rms_norm=True, mamba_norm_before_gate=True),
        RecurrentMixer(**MAMBA, num_groups=2, norm="before_gate"),
        mamba2_weights,
    ),
    "Falcon-H1 without norm": Judge(
        lambda: _falcon_h1(mamba_rms_norm=False), RecurrentMixer(**MAMBA, num_groups=2, norm="none"), mamba2_weights
    ),
    "Jamba": Judge(
        _jamba,
        RecurrentMixer(
            kind="mamba1", num_heads=24, key_dim=5, gate_rank=3, conv_width=4, conv_bias=True, step_norms=True
        ),
        mamba1_weights,
    ),
    "RecurrentGemma": Judge(
        _recurrent_gemma,
        RecurrentMixer(
            kind="rg_lru", num_heads=3, key_dim=5, head_dim=5, conv_width=4, conv_bias=True, projection_bias=True
        ),
        _rg_lru,
    ),
    "LFM2": Judge(
        _lfm2,
        RecurrentMixer(kind="short_conv", num_heads=WIDTH, conv_width=3, conv_bias=True, projection_bias=True),
        _short_conv,
    ),
}


def _to_arrays(tensors: Mapping[str, torch.Tensor | None]) -> Arrays:
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items() if tensor is not None}


def _run_module(judge: Judge, x: Any) -> tuple[Arrays, Any, Arrays]:
    """Return the weights of a module with random values, its output, and the gradients of half the sum of its squares."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = judge.module().double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    out = module(torch.tensor(x))
    out = out[0] if isinstance(out, tuple) else out
    (out.square().sum() / 2).backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    arrays = (_to_arrays(dict(module.named_parameters())), out.detach().numpy(), _to_arrays(gradients))
    return judge.arrays(judge.mixer, arrays[0]), arrays[1], judge.arrays(judge.mixer, arrays[2])


def _program(mixer: RecurrentMixer) -> Program:
    builder = ProgramBuilder()
    y = builder.input("y", HIDDEN, Role.CONSTANT)
    out = add_recurrent_mixer(builder, mixer.structure, y, "")
    squares = builder.elementwise("sum_square", [out], "squares", ("B", "T"), Role.STATISTIC)
    scale = builder.input("loss_scale", (), Role.CONSTANT)
    return builder.build([builder.elementwise("scaled_sum", [squares, scale], "loss", (), Role.STATISTIC)])


def _error(array: Any, expected: Any) -> float:
    assert array.shape == expected.shape
    return float(np.abs(array - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", JUDGES)
def test_mixers_equal_modules_of_transformers(name: str) -> None:
    judge = JUDGES[name]
    x = np.random.default_rng(0).normal(size=(SEQS, POSITIONS, WIDTH))
    weights, expected, expected_gradients = _run_module(judge, x)
    program = _program(judge.mixer)
    assert set(weights) == set(program.weights)
    structure = ModelStructure()
    unit = derive_unit("whole", program, ShardingScheme.unsharded(structure))
    sizes = {**judge.mixer.dims, "B": SEQS, "T": POSITIONS, "D": WIDTH, "V": 1}
    devices = VirtualDevices(Mesh(tuple((axis, 1) for axis in AXES)), sizes)
    devices.constants = {"y": (HIDDEN, x), "loss_scale": ((), np.array(0.5))}
    devices.constants["positions"] = (("T",), np.arange(POSITIONS))
    if "fixed_decay" in program.inputs:
        devices.constants["fixed_decay"] = ((*HIDDEN[:2], "L"), _fixed_decays(judge.mixer.num_heads))
    for weight, array in weights.items():
        devices.scatter_array(weight, unit.forward.specs[weight], array)
    devices.run(unit.forward.program, unit.forward.steps)
    (out,) = (operation.inputs[0] for operation in program.operations if operation.outputs == ("squares",))
    assert _error(devices.gather_array(out, unit.forward.specs[out]), expected) <= TOLERANCE
    devices.scatter_array("d.loss", unit.forward.specs["loss"], np.ones(()))
    devices.run(unit.backward.program, unit.backward.steps)
    for weight, gradient in unit.gradients.items():
        array = devices.gather_array(gradient, unit.backward.specs[gradient])
        error = _error(array, expected_gradients[weight])
        assert error <= GRADIENT_TOLERANCE, f"{weight}: {error}"
