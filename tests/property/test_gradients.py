"""The derived backward program is the derivative of the forward program: finite differences of the loss agree.

Along a random direction of each weight, so that every entry of its gradient has a part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schemes import scheme_of

from shardwise.derive.sharded_unit import derive_unit
from shardwise.model.decoder import model_program
from shardwise.run.numpy.devices import VirtualDevices
from shardwise.sharding import Mesh

from .training_step import AXES, Case, run_unsharded

STEP = 2e-5


def loss_of(case: Case) -> Callable[[Mapping[str, Any]], float]:
    """The loss of the unsharded program as a function of its weights."""
    unit = derive_unit("whole", model_program(case.architecture), scheme_of(case.architecture.structure))
    _, batches = case.inputs()
    program, specs = unit.forward.program, unit.forward.specs
    (output,) = program.outputs

    def loss(weights: Mapping[str, Any]) -> float:
        total = 0.0
        for batch in batches:
            devices = VirtualDevices(Mesh(tuple((axis, 1) for axis in AXES)), case.sizes, router=case.router)
            devices.constants = {name: (program.dims(name), array) for name, array in batch.items()}
            for name, array in weights.items():
                devices.scatter_array(name, specs[name], array)
            devices.run(program, unit.forward.steps)
            total += float(devices.gather_array(output, specs[output]))
        return total

    return loss


def slope(loss: Callable[[Mapping[str, Any]], float], weights: Mapping[str, Any], name: str, direction: Any) -> float:
    """Central difference over four points, exact up to the fifth derivative."""

    def moved(distance: float) -> float:
        return loss({**weights, name: weights[name] + distance * direction})

    return (8.0 * (moved(STEP) - moved(-STEP)) - (moved(2 * STEP) - moved(-2 * STEP))) / (12.0 * STEP)


def check(case: Case) -> None:
    result = run_unsharded(case)
    state, _ = case.inputs()
    weights = {name: state[name] for name in model_program(case.architecture).weights}
    loss = loss_of(case)
    assert abs(loss(weights) - result.loss) <= 1e-12 * abs(result.loss)
    rng = np.random.default_rng(case.seed + 1)
    for name, gradient in result.gradients.items():
        assert gradient.shape == weights[name].shape
        typical = float(np.sqrt(np.mean(gradient**2)))
        direction = rng.normal(size=gradient.shape)
        direction /= np.linalg.norm(direction)
        along_direction, expected = float(np.sum(gradient * direction)), slope(loss, weights, name, direction)
        assert abs(along_direction - expected) <= 1e-6 * max(abs(expected), typical), (
            f"{name}: {along_direction} but the loss has {expected}"
        )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mlp", ["swiglu", "geglu", "gelu", "relu"])
def test_gradients_equal_slopes_of_the_loss(mlp: str, tied: bool) -> None:
    check(
        Case(
            mlp=mlp,
            tied=tied,
            num_layers=2,
            kv_heads_per_rank=2,
            query_heads_per_rank=2,
            half_head_dim=2,
            width=6,
            hidden=4,
            positions=4,
            seqs=2,
            num_micro_batches=1,
        )
    )


@given(
    st.builds(
        Case,
        mlp=st.sampled_from(["swiglu", "geglu", "gelu"]),
        tied=st.booleans(),
        kv_heads_per_rank=st.integers(1, 2),
        query_heads_per_rank=st.integers(1, 3),
        half_head_dim=st.integers(1, 2),
        width=st.integers(3, 6),
        hidden=st.integers(1, 4),
        positions=st.integers(2, 5),
        num_micro_batches=st.integers(1, 2),
        seed=st.integers(0, 2**16),
    )
)
def test_gradients_equal_slopes_for_any_sizes(case: Case) -> None:
    check(case)


def test_a_wrong_gradient_is_noticed() -> None:
    """The loss's slope is far from half of the gradient."""
    case = Case(width=4, positions=3)
    result = run_unsharded(case)
    state, _ = case.inputs()
    weights = {name: state[name] for name in result.gradients}
    gradient = result.gradients["0.w_up"]
    direction = np.zeros_like(gradient)
    direction[np.unravel_index(np.argmax(np.abs(gradient)), gradient.shape)] = 1.0
    expected = slope(loss_of(case), weights, "0.w_up", direction)
    assert abs(expected) > 1e-3
    assert abs(0.5 * np.sum(gradient * direction) - expected) > 0.4 * abs(expected)
