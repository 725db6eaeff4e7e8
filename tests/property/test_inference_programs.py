"""Passes of inference, in chunks and token by token on sharded devices, give the logits of training's forward pass on one device.

They share builders of projections, norms and MLPs; what differs (caches, states, masks, picked tokens, handovers) is judged here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from shardwise.derive.inference_unit import InferenceScheme, derive_inference_unit
from shardwise.derive.sharded_unit import derived_unit
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.architecture import Architecture
from shardwise.model.layer_pattern import FrozenFields
from shardwise.run.numpy.devices import VirtualDevices
from shardwise.run.numpy.inference import ServedModel, lay_out_tokens
from shardwise.run.numpy.kernels import Router
from shardwise.sharding import Mesh
from shardwise.values import InputError

from .structures import STRUCTURES, WITH_EXPERTS
from .test_hybrids import KINDS, LAYERS

SEQS, POSITIONS, CHUNK = 4, 7, 4
TOLERANCE = 1e-10  # of the largest logit
TRAINING_AXES = ("pp", "dp", "fsdp", "ep", "cp", "tp_kv", "tp_rep")
AXES = ("cp", "dp_e", "dp_m", "kv_e", "kv_m", "rep_e", "rep_m", "ws")
SIZES: dict[str, Any] = {
    "num_layers": 1, "d_model": 8, "d_ff": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "vocab_size": 16,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "num_experts": 4, "experts_per_token": 2, "shared_expert_width": 8, "expert_latent_dim": 8, "attention_gate": "element",
    "mlp": "relu2", "layer_pattern": LAYERS, "layer_kinds": FrozenFields(KINDS), "num_layers": 7, "head_dim": 8,
}  # fmt: skip
RNG = np.random.default_rng(5)
IDS = RNG.integers(0, SIZES["vocab_size"], (SEQS, POSITIONS))


def architecture_of(fields: dict[str, Any]) -> Architecture:
    heads = {"num_kv_heads": 4} if "kv_lora_rank" in fields else {}  # a latent makes a key for each head
    return Architecture(name="small", **{**SIZES, **heads, **fields, "num_predict_layers": 0})


def units_by_path(architecture: Architecture) -> dict[str, str]:
    layers = {f"layers.{index}": unit for index, unit in enumerate(architecture.layer_units)}
    predict = {"predict.0": "predict"} if architecture.num_predict_layers else {}
    return {"embedding": "embedding", **layers, "head": "head", **predict}


def random_weights(architecture: Architecture) -> dict[str, dict[str, Any]]:
    scheme = InferenceScheme(structure=architecture.structure)
    weights: dict[str, dict[str, Any]] = {}
    for path, unit in units_by_path(architecture).items():
        program, dims = derive_inference_unit(scheme, unit).program, architecture.unit_architecture(unit).dims
        weights[path] = {
            name: RNG.normal(size=[dims[dim] for dim in program.dims(name)]) * 0.5 for name in program.weights
        }
    return weights


def trained_unit(architecture: Architecture, unit: str, arrays: dict[str, Any], ids: Any) -> Any:
    """Return what a unit gives in training's forward pass on one device: hidden states, or logits [B, T, V]."""
    scheme, mesh = ShardingScheme.unsharded(architecture.structure), Mesh.of(dict.fromkeys(TRAINING_AXES, 1))
    sizes = {**architecture.unit_architecture(unit).dims, "B": ids.shape[0], "T": ids.shape[1]}
    devices = VirtualDevices(mesh, sizes, router=Router.of(architecture.numerics))
    by_token = ("B", "T")
    devices.constants = {
        "ids": (by_token, ids), "positions": (("T",), np.arange(ids.shape[1])), "targets": (by_token, ids),
        "loss_scale": ((), np.ones(())),
    }  # fmt: skip
    forward = derived_unit(scheme, unit).forward
    for name, array in arrays.items():
        spec = next(s.placed.inputs[i] for s in forward.steps if hasattr(s, "placed")
                    for i, operand in enumerate(s.operation.inputs) if operand == name)  # fmt: skip
        devices.scatter_array(name, spec, array)
    devices.run(forward.program, forward.steps)
    results = ("logits_biased", "logits", forward.program.outputs[0])
    result = next(name for name in results if name in forward.program.tensors)
    return devices.gather_array(result, forward.specs[result])


def trained_logits(architecture: Architecture, weights: dict[str, dict[str, Any]]) -> Any:
    """Return the logits [B, T, V] of training's forward pass on one device."""
    x: Any = None
    for path, unit in units_by_path(architecture).items():
        if unit != "predict":
            arrays = weights[path] if x is None else {**weights[path], "x": x}
            x = trained_unit(architecture, unit, arrays, IDS)
    return x


def served_logits(served: ServedModel) -> Any:
    """Return the logits of the last token of a chunk and of each token after it [B, T - CHUNK + 1, V]."""
    places = {sequence: (sequence, 0) for sequence in range(SEQS)}
    chunk = lay_out_tokens([(s, IDS[s, :CHUNK].tolist(), 0) for s in range(SEQS)], SEQS, places)
    logits = [served.run(chunk)[:, 0]]
    for position in range(CHUNK, POSITIONS):
        tokens = lay_out_tokens([(s, [int(IDS[s, position])], position) for s in range(SEQS)], SEQS, places)
        logits.append(served.run(tokens, absorbs_latent=True)[:, 0])
    return np.stack(logits, axis=1)


def assert_served_equals_trained(architecture: Architecture, degrees: dict[str, int], **choices: Any) -> None:
    weights = random_weights(architecture)
    served = ServedModel(
        architecture=architecture, scheme=InferenceScheme(structure=architecture.structure, **choices),
        mesh=Mesh.of({axis: degrees.get(axis, 1) for axis in AXES}), weights=weights, num_rows=SEQS, num_slots=POSITIONS + 1,
    )  # fmt: skip
    expected = trained_logits(architecture, weights)[:, CHUNK - 1 :]
    assert np.abs(served_logits(served) - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_structure_is_served_as_it_is_trained(name: str) -> None:
    assert_served_equals_trained(architecture_of(dict(STRUCTURES[name])), {"kv_m": 2, "dp_e": 2})


@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_of_every_structure_are_reached(name: str, dispatch: str) -> None:
    degrees = {"kv_e": 2, "dp_e": 2}
    assert_served_equals_trained(architecture_of(dict(STRUCTURES[name])), degrees, dispatch=dispatch, token_dim="B")


def test_rows_of_several_sequences_are_refused_where_a_state_is_of_one() -> None:
    architecture = architecture_of(HYBRID)
    served = ServedModel(
        architecture=architecture, scheme=InferenceScheme(structure=architecture.structure), mesh=Mesh.of(dict.fromkeys(AXES, 1)),
        weights=random_weights(architecture), num_rows=1, num_slots=8,
    )  # fmt: skip
    tokens = lay_out_tokens([(0, [1, 2], 0), (1, [3], 0)], 1, {0: (0, 0), 1: (0, 4)})
    with pytest.raises(InputError, match="rows of one sequence"):
        served.run(tokens)


@pytest.mark.parametrize("degrees", [{}, {"kv_m": 2, "dp_m": 2}, {"kv_e": 2, "dp_e": 2}], ids=str)
def test_hybrids_are_served_as_they_are_trained(degrees: dict[str, int]) -> None:
    assert_served_equals_trained(architecture_of(HYBRID), degrees)


@pytest.mark.parametrize("name", ["multi_token_prediction", "deepseek_v3"])
def test_a_module_of_multi_token_prediction_drafts_what_it_is_trained_to(name: str) -> None:
    """The judge is the module's training program on one device: the loss of its logits for each token."""
    architecture = dataclasses.replace(architecture_of(dict(STRUCTURES[name])), num_predict_layers=1)
    weights = random_weights(architecture)
    served = ServedModel(
        architecture=architecture, scheme=InferenceScheme(structure=architecture.structure),
        mesh=Mesh.of({axis: 2 if axis == "kv_m" else 1 for axis in AXES}), weights=weights, num_rows=SEQS,
        num_slots=POSITIONS,
    )  # fmt: skip
    places = {sequence: (sequence, 0) for sequence in range(SEQS)}
    length = POSITIONS - 1
    served.run(lay_out_tokens([(s, IDS[s, :-1].tolist(), 0) for s in range(SEQS)], SEQS, places))
    hidden = served.hidden[0]  # that of all devices is the same
    following = lay_out_tokens([(s, IDS[s, 1:].tolist(), 0) for s in range(SEQS)], SEQS, places, num_picked=length)
    logits = served.draft(following)
    trained = trained_unit(architecture, "predict", {**weights["predict.0"], "x": hidden}, IDS[:, 1:])
    assert np.abs(logits - trained).max() <= TOLERANCE * np.abs(trained).max()
