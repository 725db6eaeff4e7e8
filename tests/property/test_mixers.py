"""Recurrent mixers and sparse attention on virtual devices: equal to one device, and only what was derived moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from shardwise.derive.sharded_unit import derive_unit
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.recurrent_mixers import RecurrentMixer
from shardwise.run.numpy import recurrences
from shardwise.run.numpy.devices import VirtualDevices
from shardwise.sharding import CollectiveKind

from .mixer_programs import MixerCase, SparseAttention
from .test_gradients import slope
from .training_step import TOLERANCE

SHAPE: dict[str, Any] = {"key_dim": 4, "head_dim": 4, "conv_width": 3, "chunk": 4}
MIXERS = {
    "gated_delta": RecurrentMixer(kind="gated_delta", num_heads=16, num_groups=4, **SHAPE),
    "kimi_delta": RecurrentMixer(kind="kimi_delta", num_heads=8, num_groups=8, gate_rank=4, **SHAPE),
    "kimi_delta of full rank": RecurrentMixer(
        kind="kimi_delta", num_heads=8, num_groups=8, full_rank_gates=True, bounded_decay=True, **SHAPE
    ),
    "lightning": RecurrentMixer(kind="lightning", num_heads=8, num_groups=8, **SHAPE),
    "mlstm": RecurrentMixer(kind="mlstm", num_heads=8, num_groups=8, **SHAPE),
    "mamba2 groups": RecurrentMixer(
        kind="mamba2", num_heads=16, num_groups=4, norm="after_gate", conv_bias=True, projection_bias=True, **SHAPE
    ),
    "mamba2": RecurrentMixer(kind="mamba2", num_heads=8, norm="before_gate", conv_bias=True, **SHAPE),
    "mamba2 without norm": RecurrentMixer(kind="mamba2", num_heads=8, norm="none", **SHAPE),
    "mamba1": RecurrentMixer(
        kind="mamba1", num_heads=8, key_dim=4, gate_rank=4, conv_width=3, conv_bias=True, step_norms=True
    ),
    "rg_lru": RecurrentMixer(
        kind="rg_lru", num_heads=4, key_dim=4, head_dim=4, conv_width=3, conv_bias=True, projection_bias=True
    ),
    "short_conv": RecurrentMixer(kind="short_conv", num_heads=8, conv_width=3, conv_bias=True, projection_bias=True),
}
SPARSE = {"sparse attention": SparseAttention(), "blocks of keys": SparseAttention(num_selected=2, block=3)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "cp": {"degrees": (("cp", 4),)},
    "tp": {"degrees": (("tp_kv", 2), ("tp_rep", 2))},
    "tp, sequence parallel": {"degrees": (("tp_kv", 2), ("tp_rep", 2)), "sequence_parallel": True},
    "fsdp, cp, tp": {
        "degrees": (("fsdp", 2), ("cp", 2), ("tp_kv", 2)), "zero_stage": 3, "sequence_parallel": True, "recompute": "full",
    },
    "dp, ep, cp, ring": {"degrees": (("dp", 2), ("ep", 2), ("cp", 2)), "cp_variant": "ring", "recompute": "selective"},
    "ulysses": {"degrees": (("cp", 2), ("tp_rep", 2)), "cp_variant": "ulysses", "zero_stage": 1},
}  # fmt: skip


def case_of(mixer: str, layout: str = "cp") -> MixerCase:
    return MixerCase(mixer={**MIXERS, **SPARSE}[mixer], positions=16, **LAYOUTS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mixer", [*MIXERS, *SPARSE])
def test_sharded_mixers_equal_one_device(mixer: str, layout: str) -> None:
    case = case_of(mixer, layout)
    worst, name = case.worst_error()
    assert worst <= TOLERANCE, f"{name}: {worst}"
    moved, derived = case.traffic()
    assert moved == derived


@pytest.mark.parametrize("mixer", [name for name in MIXERS if name != "short_conv"])
def test_segments_pass_their_states_on(mixer: str) -> None:
    """With states that stay behind, the sharded model is another one: the states carry more than rounding."""
    zero = mock.patch.object(
        recurrences.Segments, "state_before", lambda self, segment: np.zeros(self.states.shape[1:])
    )
    with zero:
        worst, _ = case_of(mixer).worst_error()
    assert worst > 1e-4


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_sequence_in_one_part_hands_nothing_on(mixer: str) -> None:
    """Without cp nothing is gathered for segments: tensor parallelism alone moves what attention's does."""
    moved = replace(case_of(mixer, "cp"), degrees=()).run().moved
    assert not any(moved["micro_batch"].values())
    split = case_of(mixer, "cp").run().moved["micro_batch"]
    assert split[CollectiveKind.ALL_GATHER, ("cp",)] > 0


@pytest.mark.parametrize("mixer", [*MIXERS, *SPARSE])
def test_gradients_equal_slopes_of_the_loss(mixer: str) -> None:
    """The derived backward program is the derivative of the forward program, along a random direction of each weight."""
    case = replace(case_of(mixer), degrees=(), positions=7)
    result, (state, batches) = case.on_one_device(), case.inputs()
    unit = derive_unit("whole", case.program, ShardingScheme.unsharded(case.architecture.structure))
    program, specs, rng = unit.forward.program, unit.forward.specs, np.random.default_rng(1)

    def loss(weights: Any) -> float:
        devices = VirtualDevices(case.mesh, case.sizes)
        devices.constants = {name: (program.dims(name), array) for name, array in batches[0].items()}
        for name, array in weights.items():
            devices.scatter_array(name, specs[name], array)
        devices.run(program, unit.forward.steps)
        return float(devices.gather_array("loss", specs["loss"]))

    weights = {name: state[name] for name in program.weights}
    for weight, name in unit.gradients.items():
        gradient = result.gradients[name]
        direction = rng.normal(size=gradient.shape)
        direction /= np.linalg.norm(direction)
        along, expected = float(np.sum(gradient * direction)), slope(loss, weights, weight, direction)
        typical = float(np.sqrt(np.mean(gradient**2)))
        assert abs(along - expected) <= 1e-6 * max(abs(expected), typical), f"{weight}: {along}, slope {expected}"
