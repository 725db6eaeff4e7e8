"""Blocks of attention and an MLP that layers share: sharded steps, gradients, caches, what is refused (Zamba, Zamba2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from schemes import scheme_of

from shardwise.book_formulas.kv_cache import KvCache
from shardwise.derive.inference_unit import INSTANCE_AXES, InferenceScheme, derive_inference_unit
from shardwise.derive.sharded_program import CollectiveStep
from shardwise.derive.sharded_unit import ShardedUnit, derive_units
from shardwise.layout import Layout
from shardwise.layout.rules.engine import unrunnable_parts
from shardwise.layout.rules.table import violations
from shardwise.model import Architecture, Job, borrowed_weights
from shardwise.model.layer_pattern import FrozenFields
from shardwise.run.numpy.inference import ServedModel, lay_out_tokens
from shardwise.sharding import Mesh
from shardwise.values import InputError

from .test_gradients import check
from .training_step import TOLERANCE, Case, chained, chained_on_one_device, unsharded, whole, worst_error

MIXER = {
    "kind": "mamba2", "num_heads": 8, "num_groups": 2, "head_dim": 4, "key_dim": 4, "conv_width": 3, "chunk": 2,
    "norm": "after_gate", "conv_bias": True,
}  # fmt: skip
# Of Zamba: channels in groups with keys, queries and steps of their own.
CHANNELS = {
    "kind": "mamba1", "num_heads": 8, "num_groups": 2, "key_dim": 4, "gate_rank": 4, "conv_width": 3, "norm": "none",
    "conv_bias": True,
}  # fmt: skip
BLOCK: dict[str, Any] = {
    "mixer": "attention", "feed_forward": "mlp", "shared_block": True, "adapted_parts": "attention_and_mlp",
}  # fmt: skip
KINDS = {
    "first": BLOCK, "second": BLOCK, "first_again": {**BLOCK, "weights_of": "first"},
    "second_again": {**BLOCK, "weights_of": "second"},
}  # fmt: skip
PATTERN = ("block", "first", "first_again", "second", "second_again")
FIELDS: dict[str, Any] = {
    "mlp": "geglu", "mixer": "none", "feed_forward": "none", "recurrence": FrozenFields(MIXER), "carried_embedding": True,
    "adapter_rank": 4,
    "layer_kinds": FrozenFields(KINDS), "layer_pattern": PATTERN,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "half_head_dim": 2,
    "hidden": 8,
    "num_layers": 5,
    "kv_heads_per_rank": 1,
    "positions": 4,
    "num_micro_batches": 1,
    "weight_spread": 0.25,
}
LAYOUTS = {
    "fsdp": Case(fsdp=2, zero_stage=3, recompute="full", **{**SIZES, "num_micro_batches": 2}),
    "zero_2": Case(dp=2, fsdp=2, zero_stage=2, **SIZES),
    "tp": Case(tp_rep=2, **SIZES),
    "sequence_parallel": Case(tp_kv=2, sequence_parallel=True, recompute="selective", **SIZES),
    "ring": Case(cp=2, cp_variant="ring", recompute="full", **SIZES),
    "all": Case(
        dp=2, fsdp=2, cp=2, tp_kv=2, zero_stage=3, cp_variant="ring", sequence_parallel=True, recompute="selective", **SIZES
    ),
}  # fmt: skip


def case_of(layout: str, **fields: Any) -> Case:
    return dataclasses.replace(LAYOUTS[layout], structure=tuple({**FIELDS, **fields}.items()), seed=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_with_weights_of_another_equal_one_device(layout: str) -> None:
    """Unit by unit: each use of a block gathers its weights, and the layer that owns them reduces the sum of their gradients."""
    assert_equals_one_device(case_of(layout))


@pytest.mark.parametrize("layout", ["fsdp", "sequence_parallel", "all"])
def test_groups_of_channels_equal_one_device(layout: str) -> None:
    assert_equals_one_device(case_of(layout, recurrence=FrozenFields(CHANNELS)))


def assert_equals_one_device(case: Case) -> None:
    outcome = chained(case)
    worst, name = worst_error(case, outcome, chained_on_one_device(case))
    assert worst <= TOLERANCE, f"{name}: relative error {worst:.2e}"
    assert outcome.moved == outcome.derived


@pytest.mark.parametrize("layout", ["fsdp", "sequence_parallel", "all"])
def test_the_program_of_the_whole_model_equals_its_units(layout: str) -> None:
    """In the program of the whole model a shared weight is one tensor with several uses."""
    case = case_of(layout)
    for outcome in (whole(case), unsharded(case)):
        worst, name = worst_error(case, outcome, chained_on_one_device(case))
        assert worst <= TOLERANCE, f"{name}: relative error {worst:.2e}"


@pytest.mark.parametrize("mixer", [MIXER, CHANNELS])
def test_gradients_equal_slopes_of_the_loss(mixer: dict[str, Any]) -> None:
    sizes = {"width": 6, "hidden": 4, "positions": 5, "half_head_dim": 2, "num_micro_batches": 1, "seed": 1}
    check(Case(num_layers=5, structure=tuple({**FIELDS, "recurrence": FrozenFields(mixer)}.items()), **sizes))


def test_a_shared_weight_is_gathered_at_each_use_and_reduced_once() -> None:
    """Under ZeRO-3 each use gathers the block, forward and backward; only the layer that owns it scatters its gradients."""
    units = derive_units(scheme_of(model().structure, zero_stage=3))
    moved = {name: [*moves_of_weight(units[name], "w_down")] for name in ("first", "first_again")}
    gathers = ["all_gather"] * 2
    assert moved == {"first": [*gathers, "reduce_scatter", "all_reduce"], "first_again": gathers}
    assert "w_down" in units["first"].trained
    assert "w_down" not in units["first_again"].trained


def moves_of_weight(unit: ShardedUnit, weight: str) -> Iterator[str]:
    """Yield the kinds of the collectives on a weight and on its gradient, in order."""
    for step in (step for steps in unit.phases().values() for step in steps):
        if (
            isinstance(step, CollectiveStep)
            and step.tensor.name.removeprefix("d.").partition("#")[0].rstrip("'") == weight
        ):
            yield step.collective.kind.value


def model(**fields: Any) -> Architecture:
    sizes: dict[str, Any] = {
        "name": "small", "num_layers": 5, "d_model": 16, "d_ff": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "vocab_size": 64,
    }  # fmt: skip
    return Architecture(**{**sizes, **FIELDS, **fields})


def test_stages_of_a_pipeline_are_refused() -> None:
    job = Job(global_batch_tokens=128, seq_len=16)
    (problem,) = violations(model(), job, 2, Layout(pp=2, schedule="1f1b"))
    assert "pp = 2, but small has the embedding that shared blocks read, which pass between layers" in problem
    assert "so pp=1 is required" in problem
    assert not violations(model(), job, 2, Layout(dp=2))


def test_groups_of_channels_bound_tensor_parallelism() -> None:
    job = Job(global_batch_tokens=128, seq_len=16)
    problems = violations(model(recurrence=CHANNELS, num_kv_heads=4), job, 4, Layout(tp=4))
    assert any("does not split the 2 groups of channels of mamba1 evenly" in problem for problem in problems)


def test_training_refuses_shared_blocks_by_name() -> None:
    assert "blocks that layers share" in unrunnable_parts(model().structure)


def test_the_embedding_is_kept_by_its_own_unit() -> None:
    units = derive_units(scheme_of(model().structure, recompute="full"))
    assert "carried_embedding" in units["embedding"].saved_by_this_unit_only
    assert {*units["first_again"].saved_by_this_unit_only} == {"x"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"carried_embedding": False}, "reads the embedding; mixer = attention"),
        ({"adapter_rank": 0}, "with adapters of a rank, found adapter_rank = 0"),
        (
            {"layer_kinds": {**KINDS, "second_again": {**BLOCK, "weights_of": "third"}}},
            "weights_of = 'third'; one of block, first",
        ),
        ({"layer_pattern": ("block", "first_again", "first", "second", "second_again")}, "one layer before layer 1 is required"),
        (
            {"layer_pattern": ("first", "first", "first_again", "second", "second_again", "block"), "num_layers": 6},
            "which is 2 layers",
        ),
        (
            {"layer_kinds": {**KINDS, "second_again": {**BLOCK, "weights_of": "second", "d_ff": 64}}},
            "weights_of = second, from which it differs in d_ff",
        ),
        ({"layer_kinds": {**KINDS, "second_again": {"weights_of": "second"}}}, "is about a shared_block, and there is none"),
        (
            {"layer_kinds": {}, "layer_pattern": (), "adapter_rank": 0, "num_predict_layers": 1},
            "num_predict_layers = 0 are required",
        ),
        ({"lora_rank": 4, "lora_targets": ("q_proj",)}, "adapters of a shared block"),
    ],
)  # fmt: skip
def test_contradicting_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model(**fields)


@pytest.mark.parametrize(("chunks", "tp"), [((2, 4), 1), ((3, 1, 2), 2)])
@pytest.mark.parametrize("mixer", [MIXER, CHANNELS])
def test_each_use_has_a_cache_of_its_own(chunks: tuple[int, ...], tp: int, mixer: dict[str, Any]) -> None:
    """Chunks of a prompt on several devices give the logits of the whole prompt on one; weights are loaded once."""
    architecture = model(recurrence=mixer)
    (expected, served), (logits, _) = (serve_prompt(architecture, *split) for split in (((6,), 1), (chunks, tp)))
    assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max()
    has_keys = {path: any("k_cache" in name for name, _ in caches) for path, caches in served.caches.items()}
    assert has_keys == {"embedding": False, "head": False, **{f"layers.{i}": i > 0 for i in range(5)}}
    assert KvCache(architecture=architecture).bytes_per_token == 4 * 2 * 2 * 8 * 2


def serve_prompt(architecture: Architecture, chunks: tuple[int, ...], tp: int) -> tuple[Any, ServedModel]:
    """Return the logits after a prompt of six tokens in chunks, with random weights, and the model."""
    rng, weights = np.random.default_rng(0), {}
    scheme = InferenceScheme(structure=architecture.structure)
    paths = {f"layers.{i}": unit for i, unit in enumerate(architecture.layer_units)}
    first_paths = {unit: path for path, unit in reversed(paths.items())}
    for path, unit in {"embedding": "embedding", **paths, "head": "head"}.items():
        program, owners = derive_inference_unit(scheme, unit).program, borrowed_weights(architecture, unit)
        weights[path] = {
            name: weights[first_paths[owners[name].unit]][name] if name in owners
            else rng.normal(size=[architecture.dims[dim] for dim in program.dims(name)]) * 0.25
            for name in program.weights
        }  # fmt: skip
    ids = rng.integers(64, size=6).tolist()
    mesh = Mesh(tuple((axis, tp if axis == "kv_m" else 1) for axis in INSTANCE_AXES))
    served, start, logits = ServedModel(architecture, scheme, mesh, weights, 1, 16), 0, None
    for length in chunks:
        logits = served.run(lay_out_tokens([(0, ids[start : start + length], start)], 1, {0: (0, 0)}))
        start += length
    return logits, served
