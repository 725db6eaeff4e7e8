"""Parts of a block run on one NumPy device, to be compared with modules of `transformers` that have the same weights.

Modules run in double precision; rotary angles and routers are in single precision in them: hence the tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.derive.sharded_unit import derive_unit
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.architecture import Architecture
from shardwise.model.block_parts import HIDDEN
from shardwise.model.decoder_block import BlockBuilder
from shardwise.model.numerics import ROTARY_BASE
from shardwise.model.program import Program, ProgramBuilder, Role
from shardwise.model.residual_streams import residual_dims
from shardwise.run.numpy.devices import VirtualDevices
from shardwise.run.numpy.kernels import Router
from shardwise.sharding import Mesh

AXES = ("dp", "fsdp", "ep", "cp", "tp_kv", "tp_rep")
SEQS, POSITIONS, WIDTH = 2, 9, 16
TOLERANCE = 1e-6
ROPE = {"rope_type": "default", "rope_theta": ROTARY_BASE}
Arrays = Mapping[str, Any]


def run_part(architecture: Architecture, part: str, weights: Arrays, x: Any, router: Router | None = None) -> Any:
    """Return what a method of the block's builder gives for a normalised hidden state, or for residual streams, on one device."""
    hidden = HIDDEN if x.ndim == 3 else residual_dims(has_streams=True)
    builder = ProgramBuilder()
    out = getattr(BlockBuilder(builder, architecture, ""), part)(builder.input("y", hidden, Role.CONSTANT))
    squares = builder.elementwise("sum_square", [out], "squares", ("B", "T"), Role.STATISTIC)
    scale = builder.input("loss_scale", (), Role.CONSTANT)
    program = builder.build([builder.elementwise("scaled_sum", [squares, scale], "loss", (), Role.STATISTIC)])
    return run_program(architecture, program, out, weights, x, router)


def run_program(
    architecture: Architecture, program: Program, result: str, weights: Arrays, x: Any, router: Router | None = None
) -> Any:  # fmt: skip
    """Return one result of a program of the hidden state `x` or `y` on one device. Constants may be among the weights."""
    constants = {name: array for name, array in weights.items() if program.tensors[name].role is Role.CONSTANT}
    weights = {name: array for name, array in weights.items() if name not in constants}
    assert set(weights) == set(program.weights)
    unit = derive_unit("whole", program, ShardingScheme.unsharded(architecture.structure))
    sizes = {**architecture.dims, "B": SEQS, "T": POSITIONS}
    devices = VirtualDevices(Mesh(tuple((axis, 1) for axis in AXES)), sizes, router=router or Router())
    devices.constants = {
        **{name: (program.dims(name), array) for name, array in constants.items()},
        **({"y": (program.dims("y"), x)} if "y" in program.inputs else {}),
        "loss_scale": ((), np.array(1.0)),
        "positions": (("T",), np.arange(POSITIONS)),
        "targets": (("B", "T"), np.zeros((SEQS, POSITIONS), dtype=int)),
    }
    states = {"x": x} if "x" in program.inputs else {}
    for name, array in {**weights, **states}.items():
        devices.scatter_array(name, unit.forward.specs[name], array)
    devices.run(unit.forward.program, unit.forward.steps)
    return devices.gather_array(result, unit.forward.specs[result])


def randomise(module: nn.Module) -> Arrays:
    """Give a module random weights in double precision, and return them by name."""
    module.double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return {name: parameter.detach().numpy().copy() for name, parameter in module.named_parameters()}


def hidden_states() -> Any:
    return np.random.default_rng(0).normal(size=(SEQS, POSITIONS, WIDTH))


def causal_mask() -> torch.Tensor:
    blocked = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).triu(1)
    return torch.zeros(SEQS, 1, POSITIONS, POSITIONS, dtype=torch.float64).masked_fill(blocked, float("-inf"))


def assert_equal(array: Any, expected: torch.Tensor) -> None:
    reference = expected.detach().numpy()
    assert np.abs(array - reference).max() <= TOLERANCE * np.abs(reference).max()


def attention_weights(stored: Arrays, groups: tuple[int, int], widths: tuple[int, int]) -> dict[str, Any]:
    """Return the projections of an attention module: (key-value heads, query heads of each) of widths (key, value)."""
    (kv_heads, queries), (key, value) = groups, widths
    return {
        "wq": stored["q_proj.weight"].reshape(kv_heads, queries, key, WIDTH),
        "wk": stored["k_proj.weight"].reshape(kv_heads, key, WIDTH),
        "wv": stored["v_proj.weight"].reshape(kv_heads, value, WIDTH),
        "wo": stored["o_proj.weight"].T.reshape(kv_heads, queries, value, WIDTH),
    }  # fmt: skip


def expert_weights(stored: Arrays, shared: str = "") -> dict[str, Any]:
    """Return the matrices of experts and, by the name of their module, of shared ones."""
    gate, up = np.split(stored["experts.gate_up_proj"], 2, axis=1)
    weights = {"experts_gate": gate, "experts_up": up, "experts_down": stored["experts.down_proj"].swapaxes(1, 2)}
    if shared:
        weights |= {f"shared_{name}": stored[f"{shared}.{name}_proj.weight"] for name in ("gate", "up")}
        weights["shared_down"] = stored[f"{shared}.down_proj.weight"].T
    return weights


def angles(embedding: nn.Module, x: Any, *layer_type: str) -> Any:
    """Return the cosines and sines of a rotary embedding of `transformers`."""
    return embedding(torch.tensor(x), torch.arange(POSITIONS)[None], *layer_type)
