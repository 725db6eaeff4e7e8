"""The parameters of a model are those of the derived units, with the same names, and have the right initial values."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from executing import Executor, random_weights
from plain import build
from schemes import scheme_id, scheme_of
from test_model import ALL_BIASES, AXES, EXPERTS, SMALL, STRUCTURES, small

from shardwise.derive.sharded_unit import derive_units
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import unit_counts, unit_program
from shardwise.model.load import load_model
from shardwise.model.numerics import Numerics
from shardwise.model.parameters_and_flops import num_params, num_trained_params
from shardwise.run.engine.model import TorchModel
from shardwise.run.engine.model_builder import initial_weights
from shardwise.sharding import Mesh
from shardwise.step.flat_arrays import WeightSync
from shardwise.step.parameters import list_parameters
from shardwise.step.rank_program import parameter_shapes

SCHEMES = [
    scheme_of(SMALL.structure, zero_stage, parallel) for zero_stage in (0, 1, 2, 3) for parallel in (False, True)
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("scheme", SCHEMES, ids=scheme_id)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_parameters_are_the_weights_of_the_derived_units(structure: str, scheme: ShardingScheme) -> None:
    """The same names, each with the shape of the derivation's spec on one device."""
    architecture = small(structure)
    scheme = dataclasses.replace(scheme, structure=architecture.structure)
    shapes, units = parameter_shapes(architecture), derive_units(scheme)
    by_hand = dict(build(architecture).named_parameters())
    single_device = Mesh(tuple((axis, 1) for axis in AXES))
    parameters = list_parameters(architecture, scheme)
    assert [parameter.name for parameter in parameters] == list(shapes) == list(by_hand)
    for parameter in parameters:
        sizes = architecture.unit_architecture(parameter.unit).dims
        assert parameter.trained == by_hand[parameter.name].requires_grad
        assert parameter.use.dims == units[parameter.unit].weights[parameter.weight]
        assert (
            parameter.use.local_shape(single_device, sizes)
            == shapes[parameter.name]
            == tuple(by_hand[parameter.name].shape)
        )
    weights_by_path: dict[str, dict[str, list[str]]] = {name: {} for name in unit_counts(architecture)}
    for parameter in parameters:
        weights_by_path[parameter.unit].setdefault(parameter.path, []).append(parameter.weight)
    borrowed = {"head"} if architecture.tied_embeddings else set()
    for unit, count in unit_counts(architecture).items():
        expected = [name for name in units[unit].weights if unit != "head" or name not in borrowed]
        assert list(weights_by_path[unit].values()) == [expected] * count


def model_of(architecture: Architecture) -> TorchModel:
    return Executor(random_weights(architecture)).model


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_unit_is_given_the_weights_that_it_has(structure: str) -> None:
    """All of them and no others; layers that are alike share what was compiled for them, and no layer has another's weights."""
    architecture = small(structure)
    model = model_of(architecture)
    for layer in model.layers:
        assert set(layer.weights) == set(layer.unit.unit.forward.program.weights) <= set(layer.unit.slot_of)
    assert len({id(layer.unit) for layer in model.layers}) == len(unit_counts(architecture))
    addresses = [tensor.data_ptr() for layer in model.layers for tensor in layer.weights.values()]
    borrowed = {
        name
        for name in unit_program(architecture.structure, "predict").borrowed
        if f"embedding.{name}" in parameter_shapes(architecture) or name == "head"
    }
    assert len(addresses) - len(set(addresses)) == architecture.tied_embeddings + architecture.num_predict_layers * len(
        borrowed
    )


# Of w_up [F, D] by stage of ZeRO: what a use gathers; what a micro-batch and a step scatter, reduce and gather.
SHARDED = ("fsdp", "cp")
SYNCS = {
    0: WeightSync(reduce=("cp", "dp", "fsdp")),
    1: WeightSync(step_scatter=SHARDED, reduce=("dp",), step_gather=SHARDED),
    2: WeightSync(scatter=SHARDED, reduce=("dp",), step_gather=SHARDED),
    3: WeightSync(gather=SHARDED, scatter=SHARDED, reduce=("dp",)),
}


@pytest.mark.parametrize("zero_stage", SYNCS)
def test_weights_are_kept_in_step_as_their_stage_asks(zero_stage: int) -> None:
    (spec,) = (
        parameter
        for parameter in list_parameters(SMALL, scheme_of(SMALL.structure, zero_stage))
        if parameter.name == "layers.1.w_up"
    )
    assert str(spec.use) == "[F_{tp_kv,tp_rep}, D]"
    assert spec.sync == SYNCS[zero_stage]


@pytest.mark.parametrize(
    "name",
    [
        "llama-3-70b",
        "gpt-3-175b",
        "gemma-2-9b",
        "mixtral-8x7b",
        "qwen2-57b-a14b",
        "olmo-2-7b",
        "gpt-oss-20b",
        "deepseek-v2",
    ],
)
def test_models_of_the_catalogue_have_as_many_parameters_as_are_counted(name: str) -> None:
    architecture = load_model(name)
    assert sum(math.prod(shape) for shape in parameter_shapes(architecture).values()) == num_params(architecture)


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    routed = dataclasses.replace(SMALL, **EXPERTS, shared_expert_width=3)
    shallow, deep = (initial_weights(dataclasses.replace(routed, num_layers=n), 7) for n in (2, 4))
    again = initial_weights(routed, 7, torch.bfloat16)
    assert again.dtype == torch.bfloat16
    assert shallow.dtype == torch.float32
    values, deep_values = shallow.tensors, deep.tensors
    for name, tensor in again.tensors.items():
        assert torch.equal(tensor, values[name].to(torch.bfloat16))
        scale = (
            2**0.5 if name.endswith(("wo", "experts_down", "shared_down")) else 1.0
        )  # of what is added to the residual stream
        torch.testing.assert_close(deep_values[name] * scale, values[name])
    assert not torch.equal(values["layers.0.wq"], values["layers.1.wq"])
    another = initial_weights(routed, 8)
    assert not torch.equal(another.tensors["layers.0.wq"], values["layers.0.wq"])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_parameter_has_an_initial_value_of_its_kind(structure: str) -> None:
    """Matrices and sinks are normal, norms one, biases and what leaves an adapter zero."""
    for name, values in initial_weights(small(structure), 5).tensors.items():
        if name.endswith(("_bias", "_lora_b")):
            assert not values.any(), name
        elif name.endswith("norm_weight"):
            assert (values == 1.0).all(), name
        else:
            assert values.unique().numel() > values.numel() // 2, name
            assert 0.001 < values.abs().max() < 6 * 0.02, name


def test_biases_of_the_choice_begin_as_nothing_in_float32() -> None:
    """Each router has its own, initially zero; a leading layer without experts has none."""
    architecture = small("leading dense layers")
    biases = initial_weights(architecture, 0, torch.bfloat16).model.balance_biases
    assert list(biases) == [2, 3]
    assert all(bias.dtype == torch.float32 and bias.shape == (5,) and not bias.any() for bias in biases.values())
    assert biases[2].data_ptr() != biases[3].data_ptr()
    assert not model_of(SMALL).balance_biases


def test_adapters_begin_as_nothing_and_alone_are_trained() -> None:
    adapted, plain = (
        initial_weights(small("adapters"), 3),
        initial_weights(dataclasses.replace(SMALL, bias=ALL_BIASES), 3),
    )
    ids = torch.arange(6)[None]
    assert torch.equal(adapted.logits(ids), plain.logits(ids))
    executor = Executor(adapted)
    executor.train(ids, ids, 6)
    assert sum(gradient.numel() for gradient in executor.gradients.computed.values()) == num_trained_params(
        small("adapters")
    )
    assert all("lora" in name for name in executor.gradients.computed)


def test_initial_values_are_of_the_right_size() -> None:
    numerics = Numerics(norm_offset=1.0)
    architecture = dataclasses.replace(SMALL, d_model=64, d_ff=96, norm="layer", norm_bias=True, numerics=numerics)
    values = initial_weights(architecture, 0).tensors
    assert values["layers.0.w_up"].std().item() == pytest.approx(0.02, rel=0.05)
    assert values["layers.0.w_down"].std().item() == pytest.approx(0.01, rel=0.05)
    assert not values["layers.0.mlp_norm_weight"].any()  # to which the norm adds its offset
    assert not values["layers.0.mlp_norm_bias"].any()
