"""Embeddings for each layer, and keys and values that layers share: sharded steps, gradients, caches, what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from schemes import scheme_of

from shardwise.book_formulas.kv_cache import KvCache
from shardwise.derive.inference_unit import INSTANCE_AXES, InferenceScheme, derive_inference_unit
from shardwise.derive.sharded_unit import derive_units
from shardwise.layout import Layout
from shardwise.layout.rules.engine import unrunnable_parts
from shardwise.layout.rules.table import violations
from shardwise.model import Architecture, Job
from shardwise.model.layer_pattern import FrozenFields
from shardwise.run.numpy.inference import ServedModel, lay_out_tokens
from shardwise.sharding import Mesh
from shardwise.values import InputError

from .test_gradients import check
from .training_step import TOLERANCE, Case, chained, chained_on_one_device, unsharded, whole, worst_error

KINDS: dict[str, dict[str, Any]] = {"store": {"key_sharing": "store"}, "reuse": {"key_sharing": "reuse"}}
PATTERN = ("block", "store", "reuse", "reuse")
FIELDS: dict[str, Any] = {
    "layer_input_dim": 8, "layer_input_rows": 8, "mlp": "geglu", "post_norms": True, "qk_norm": True, "value_norm": True,
    "layer_kinds": FrozenFields(KINDS), "layer_pattern": PATTERN,
}  # fmt: skip
SIZES = {
    "half_head_dim": 2,
    "hidden": 4,
    "num_layers": 4,
    "kv_heads_per_rank": 2,
    "positions": 4,
    "num_micro_batches": 1,
}
LAYOUTS = {
    "fsdp": Case(fsdp=2, zero_stage=3, recompute="full", **{**SIZES, "num_micro_batches": 2}),
    "tp": Case(tp_kv=2, tp_rep=2, **SIZES),
    "sequence_parallel": Case(tp_kv=2, tp_rep=2, sequence_parallel=True, recompute="selective", **SIZES),
    "ring": Case(cp=2, cp_variant="ring", recompute="full", **SIZES),
    "ulysses": Case(cp=2, cp_variant="ulysses", zero_stage=2, **SIZES),
    "all": Case(
        dp=2, fsdp=2, cp=2, tp_kv=2, zero_stage=3, cp_variant="ring", sequence_parallel=True, recompute="selective", **SIZES
    ),
}  # fmt: skip


def case_of(layout: str, **fields: Any) -> Case:
    return dataclasses.replace(LAYOUTS[layout], structure=tuple({**FIELDS, **fields}.items()), seed=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_units_that_hand_tensors_on_equal_one_device(layout: str) -> None:
    """Units one after the other, on many devices and on one; on one device they equal the program of the whole model."""
    case = case_of(layout)
    outcome = chained(case)
    worst, name = worst_error(case, outcome, chained_on_one_device(case))
    assert worst <= TOLERANCE, f"{name}: relative error {worst:.2e}"
    assert outcome.moved == outcome.derived


@pytest.mark.parametrize("layout", ["sequence_parallel", "all"])
def test_the_program_of_the_whole_model_equals_its_units(layout: str) -> None:
    case = case_of(layout)
    worst, name = worst_error(case, whole(case), chained_on_one_device(case))
    assert worst <= TOLERANCE, f"{name}: relative error {worst:.2e}"
    worst, name = worst_error(case, unsharded(case), chained_on_one_device(case))
    assert worst <= TOLERANCE, f"{name}: relative error {worst:.2e}"


NO_KINDS: dict[str, Any] = {"layer_kinds": {}, "layer_pattern": ()}


def model(**fields: Any) -> Architecture:
    sizes: dict[str, Any] = {
        "name": "small", "num_layers": 4, "d_model": 16, "d_ff": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "vocab_size": 64, "layer_kinds": KINDS, "layer_pattern": PATTERN, "layer_input_dim": 8,
    }  # fmt: skip
    return Architecture(**{**sizes, **fields})


def test_stages_of_a_pipeline_are_refused() -> None:
    job = Job(global_batch_tokens=128, seq_len=16)
    (problem,) = violations(model(), job, 2, Layout(pp=2, schedule="1f1b"))
    assert (
        "small has an embedding for each layer and keys and values that layers share, which pass between layers"
        in problem
    )
    assert not violations(model(), job, 2, Layout(dp=2))


def test_training_refuses_carried_tensors_by_name() -> None:
    parts = unrunnable_parts(model().structure)
    assert {"an embedding for each layer", "keys and values that layers share"} <= {*parts}


def test_carried_tensors_are_kept_by_the_unit_that_computes_them() -> None:
    """With full recomputation a layer keeps its input, and one whose keys and values are reused keeps these too."""
    units = derive_units(scheme_of(model().structure, recompute="full"))
    kept = {name: {*units[name].saved_by_this_unit_only} for name in ("embedding", "store", "reuse")}
    assert "layer_inputs" in kept["embedding"]
    assert kept["store"] == {"x", "k", "v"}
    assert kept["reuse"] == {"x"}
    assert {"layer_input", "reused_k", "reused_v"} <= {*units["reuse"].saved}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"layer_pattern": ("block", "reuse", "store", "reuse")},
            "layer 1 reuses keys and values, and no layer before it",
        ),
        (
            {"layer_kinds": {"store": KINDS["store"], "reuse": {**KINDS["reuse"], "num_kv_heads": 1}}},
            "layer 2 reuses keys",
        ),
        ({"num_streams": 2}, "num_streams = 0, parallel = false and num_predict_layers = 0 are required"),
        ({"layer_input_dim": 0, "layer_input_rows": 9}, "layer_input_dim is required"),
    ],
)
def test_contradicting_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model(**fields)


@pytest.mark.parametrize(("chunks", "tp"), [((2, 4), 1), ((3, 1, 2), 2)])
def test_layers_that_reuse_keys_have_no_cache(chunks: tuple[int, ...], tp: int) -> None:
    """Chunks of a prompt on several devices give the logits of the whole prompt on one."""
    (whole_prompt, served), (logits, _) = (serve_prompt(model(), *split) for split in (((6,), 1), (chunks, tp)))
    assert np.abs(logits - whole_prompt).max() <= TOLERANCE * np.abs(whole_prompt).max()
    cached = {path: len(caches) for path, caches in served.caches.items() if path.startswith("layers")}
    assert cached == {"layers.0": 2, "layers.1": 2, "layers.2": 0, "layers.3": 0}
    assert (
        KvCache(architecture=model()).bytes_per_token
        == 2 * KvCache(architecture=model(num_layers=1, **NO_KINDS)).bytes_per_token
    )


def serve_prompt(architecture: Architecture, chunks: tuple[int, ...], tp: int) -> tuple[Any, ServedModel]:
    """Return the logits after a prompt of six tokens in chunks, with random weights, and the model."""
    rng, weights = np.random.default_rng(0), {}
    scheme = InferenceScheme(structure=architecture.structure)
    layers = {f"layers.{i}": unit for i, unit in enumerate(architecture.layer_units)}
    units = {"embedding": "embedding", **layers, "head": "head"}
    for path, unit in units.items():
        program = derive_inference_unit(scheme, unit).program
        weights[path] = {
            name: rng.normal(size=[architecture.dims[dim] for dim in program.dims(name)]) * 0.5
            for name in program.weights
        }
    ids = rng.integers(64, size=6).tolist()
    mesh = Mesh(tuple((axis, tp if axis == "kv_m" else 1) for axis in INSTANCE_AXES))
    served, start, logits = ServedModel(architecture, scheme, mesh, weights, 1, 16), 0, None
    for length in chunks:
        logits = served.run(lay_out_tokens([(0, ids[start : start + length], start)], 1, {0: (0, 0)}))
        start += length
    return logits, served


def test_gradients_equal_slopes_of_the_loss() -> None:
    sizes = {"width": 6, "hidden": 4, "positions": 5, "half_head_dim": 2, "num_micro_batches": 1, "seed": 1}
    fields = {**FIELDS, "layer_input_dim": 3, "layer_input_rows": 5}
    check(Case(num_layers=4, structure=tuple(fields.items()), **sizes))
