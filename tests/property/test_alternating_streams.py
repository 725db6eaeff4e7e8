"""Streams that layers predict, a learned residual and the largest gates (Gemma 3n): sharded steps, gradients, caches, rules."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from shardwise.layout.rules.engine import unrunnable_parts
from shardwise.run.numpy.kernels import get_map
from shardwise.values import InputError

from .test_carried_tensors import case_of, model, serve_prompt
from .test_gradients import check
from .training_step import TOLERANCE, Case, chained, chained_on_one_device, unsharded, whole, worst_error

STREAM_FIELDS: dict[str, Any] = {
    "num_streams": 4, "alternating_streams": True, "laurel_rank": 2, "sparse_activation": True,
}  # fmt: skip


def stream_case(layout: str) -> Case:
    """Return a case with so many gates that some are above the cutoff."""
    return dataclasses.replace(case_of(layout, **STREAM_FIELDS), hidden=16, seed=3)


@pytest.mark.parametrize("layout", ["fsdp", "sequence_parallel", "ring", "all"])
def test_streams_of_units_equal_one_device(layout: str) -> None:
    case = stream_case(layout)
    outcome = chained(case)
    worst, name = worst_error(case, outcome, chained_on_one_device(case))
    assert worst <= TOLERANCE, f"{name}: relative error {worst:.2e}"
    assert outcome.moved == outcome.derived


def test_the_program_of_the_whole_model_equals_its_units() -> None:
    case = stream_case("sequence_parallel")
    for outcome in (whole(case), unsharded(case)):
        worst, name = worst_error(case, outcome, chained_on_one_device(case))
        assert worst <= TOLERANCE, f"{name}: relative error {worst:.2e}"


def test_gradients_equal_slopes_of_the_loss() -> None:
    sizes = {"width": 6, "hidden": 8, "positions": 5, "half_head_dim": 2, "num_micro_batches": 1, "seed": 1}
    fields = {"layer_input_dim": 3, "mlp": "geglu", "post_norms": True, **STREAM_FIELDS}
    check(Case(num_layers=1, structure=tuple(fields.items()), **sizes))


def test_chunks_of_a_prompt_on_several_devices_give_its_logits() -> None:
    architecture = model(**STREAM_FIELDS)
    (expected, _), (logits, _) = serve_prompt(architecture, (6,), 1), serve_prompt(architecture, (3, 1, 2), 2)
    assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_a_twentieth_of_many_gates_is_kept() -> None:
    """Of gates from a normal distribution, with any mean and variance."""
    gates = 3.0 + 2.0 * np.random.default_rng(0).normal(size=100_000)
    kept = get_map("gaussian_top_k")(gates, gates.sum(), np.sum(gates**2), width=gates.size)
    assert np.mean(kept > 0) == pytest.approx(0.05, abs=2e-3)


@pytest.mark.parametrize("name", ["match_magnitude", "match_magnitude_dsquares", "match_magnitude_dgoal"])
def test_a_row_of_zeros_has_no_magnitude_and_no_gradient(name: str) -> None:
    zeros = [np.zeros((1, 1, 2, 3))] * (2 if "_d" in name else 1)
    assert not get_map(name)(*zeros, np.zeros((1, 1, 2, 1)), np.zeros((1, 1, 1, 1)), width=3).any()


def test_training_refuses_alternating_streams_by_name() -> None:
    parts = unrunnable_parts(model(**STREAM_FIELDS).structure)
    assert {"streams that layers predict", "a learned residual of low rank", "gaussian_top_k"} <= {*parts}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_streams": 1}, "found num_streams = 1; at least 2 are required"),
        ({"num_streams": 0}, "found num_streams = 0; at least 2 are required"),
        ({"alternating_streams": False}, "num_streams = 0, parallel = false"),
        ({"pre_norms": False}, "laurel_rank is that of a residual beside attention's"),
        ({"mlp": "gelu"}, "sparse_activation is about the gates of an MLP, and there are none"),
        (
            {"lora_rank": 4, "lora_targets": ("all-linear",)},
            "of streams that layers predict and of a learned residual are not known",
        ),
    ],
)
def test_contradicting_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model(**{**STREAM_FIELDS, **fields})
