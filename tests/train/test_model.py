"""The executor's loss and every gradient, in float64: those of the derivation's program in NumPy, and of a decoder by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from executing import Executor, decoder_of, errors, random_weights, weights_of
from plain import build, initialise

from shardwise.data.batches import IGNORED
from shardwise.derive.derivation import derive, derive_unit
from shardwise.engine.numpy.step import run_step
from shardwise.engine.torch.initialise import initial_weights
from shardwise.engine.torch.model import TorchModel
from shardwise.engine.torch.weights import Weights, parameter_shapes
from shardwise.errors import InputError
from shardwise.layout.family import Family
from shardwise.lowering.parameters import parameters
from shardwise.lowering.weights import Sync
from shardwise.model.architecture import Architecture
from shardwise.model.counts import num_params, num_trained_params
from shardwise.model.decoder import unit_counts, whole_program
from shardwise.model.load import load_model
from shardwise.model.numerics import Numerics, Rotary
from shardwise.sharding import Mesh

TOLERANCE = 1e-10
AXES = ("dp", "fsdp", "ep", "cp", "tp_kv", "tp_rep")
SEQS, POSITIONS = 2, 5
SMALL = Architecture(
    name="small", num_layers=2, d_model=6, d_ff=4, num_heads=4, num_kv_heads=2, head_dim=4, vocab_size=11
)
ALL_BIASES = ("qkv", "attention_out", "mlp")
EXPERTS = {"num_experts": 5, "experts_per_token": 2}
STRUCTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied qwen": {"tied_embeddings": True, "bias": ("qkv",)},
    "qk-norm and post-norms": {"mlp": "geglu", "qk_norm": True, "post_norms": True},
    "post-norms alone": {"qk_norm": True, "qk_norm_over": "projection", "pre_norms": False, "post_norms": True},
    "gpt-2": {
        "mlp": "gelu", "norm": "layer", "norm_bias": True, "positions": "learned", "max_positions": 7, "bias": ALL_BIASES,
        "tied_embeddings": True,
    },
    "parallel": {"mlp": "relu", "norm": "layer", "parallel": True, "separate_norms": True},
    "parallel from one norm": {"norm": "layer", "parallel": True, "embedding_norm": True, "positions": "none"},
    "mixtral": EXPERTS,
    "shared expert": {**EXPERTS, "shared_expert_width": 3, "shared_gate": True},
    "leading dense layers": {
        **EXPERTS, "num_layers": 3, "num_dense_layers": 1, "dense_d_ff": 7, "shared_expert_width": 3, "qk_norm": True,
    },
    "latent": {
        "num_kv_heads": 4, "head_dim": 6, "kv_lora_rank": 5, "rope_head_dim": 2, "v_head_dim": 3, "q_lora_rank": 3,
    },
    "latent keys alone": {"num_kv_heads": 4, "kv_lora_rank": 5, "rope_head_dim": 2, "v_head_dim": 4},
    "sinks": {"sinks": True, "bias": ("qkv", "attention_out")},
    "adapters": {"lora_rank": 2, "lora_targets": ("qkv", "attention_out", "mlp"), "bias": ALL_BIASES},
    "adapters of attention": {**EXPERTS, "lora_rank": 2, "lora_targets": ("attention_out",)},
    "biased experts": {**EXPERTS, "mlp": "clamped_swiglu", "bias": ("qkv", "attention_out", "router", "experts")},
}  # fmt: skip


def small(structure: str) -> Architecture:
    return dataclasses.replace(SMALL, **STRUCTURES[structure])


def whole_names(architecture: Architecture) -> dict[str, str]:
    """Names in the program of the whole model, which tells layers apart by a prefix, by the parameters' names."""
    found = parameters(architecture, Family(0, False, "none"))
    layer = {one.name: f"{one.path.split('.')[1]}." if one.path.startswith("layers.") else "" for one in found}
    return {one.name: f"{layer[one.name]}{one.weight}" for one in found}


def tokens(architecture: Architecture, seed: int = 1) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(architecture.vocab_size, size=(SEQS, POSITIONS)) for _ in range(2))


def judged(weights: Weights, ids: Any, targets: Any, num_targets: int) -> tuple[float, dict[str, Any]]:
    """Loss and gradients by parameter of the derivation's unsharded step with these weights."""
    architecture, family = weights.architecture, Family(0, False, "none")
    unit = derive_unit("whole", whole_program(architecture), family, recompute="none")
    names = whole_names(architecture)
    state = {whole: weights.tensors[name].numpy() for name, whole in names.items()}
    zeros = {f"{name}.{part}": np.zeros_like(a) for name, a in state.items() for part in ("master", "first", "second")}
    batch = {"ids": ids, "targets": targets, "positions": np.arange(POSITIONS), "loss_scale": np.array(1 / num_targets)}
    sizes = {**architecture.dims, "B": SEQS, "T": POSITIONS}
    result = run_step(unit, family, Mesh(tuple((axis, 1) for axis in AXES)), sizes, {**state, **zeros}, [batch])
    trained = {name: unit.gradients[whole] for name, whole in names.items() if whole in unit.gradients}
    assert len(result.gradients) == len(trained)
    return result.loss, {name: result.gradients[gradient] for name, gradient in trained.items()}


def assert_near(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, error in errors(found, wanted).items():
        assert error <= TOLERANCE, f"{name}: relative error {error}"


@pytest.mark.parametrize("takes_products", [True, False])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_loss_and_gradients_are_the_derivations(structure: str, takes_products: bool) -> None:
    """Whether products write gradients where these rest, or hand them over."""
    weights = random_weights(small(structure))
    (ids, targets), num_targets = tokens(weights.architecture), 3 * SEQS * POSITIONS
    executor = Executor(weights, takes_products=takes_products)
    found = executor.train(ids, targets, num_targets)
    loss, gradients = judged(weights, ids, targets, num_targets)
    assert found.item() == pytest.approx(loss, rel=1e-12)
    assert_near(executor.gradients.found, gradients)


LAYERS = {"num_layers": 3, "sliding_window": 3, "global_every": 2}
BENT = Rotary(base=10.0, factor=4.0, original_positions=12)
# What the NumPy kernels lack; with documents, or without.
FURTHER: dict[str, tuple[dict[str, Any], Numerics, bool]] = {
    "documents": ({}, Numerics(), True),
    "documents and learned positions": (STRUCTURES["gpt-2"], Numerics(), True),
    "documents and experts": (EXPERTS, Numerics(), True),
    "windows": (LAYERS, Numerics(), False),
    "windows and documents": (LAYERS, Numerics(), True),
    "windows and narrow values": ({**STRUCTURES["latent"], **LAYERS}, Numerics(), False),
    "capped scores": ({}, Numerics(attention_cap=0.7), False),
    "capped scores, windows and documents": (LAYERS, Numerics(attention_cap=0.7), True),
    "capped scores and narrow values": (STRUCTURES["latent"], Numerics(attention_cap=0.7), False),
    "capped logits": ({}, Numerics(logit_cap=1.5), False),
    "capped logits, tied": ({"tied_embeddings": True}, Numerics(logit_cap=1.5), False),
    "offset of norms": ({"qk_norm": True, "post_norms": True}, Numerics(norm_offset=1.0), False),
    "offset of layer norms": ({"norm": "layer", "norm_bias": True}, Numerics(norm_offset=1.0), False),
    "epsilon": ({}, Numerics(norm_epsilon=0.3), False),
    "scaled embedding": ({"tied_embeddings": True}, Numerics(embedding_scale=3.0), False),
    "scaled embedding and learned positions": (STRUCTURES["gpt-2"], Numerics(embedding_scale=3.0), True),
    "scaled scores": ({}, Numerics(attention_scale=0.2), False),
    "scaled and capped scores": ({}, Numerics(attention_scale=0.2, attention_cap=0.7), False),
    "other angles in windows": (LAYERS, Numerics(local_rotary=Rotary(base=50.0)), True),
    "gates as they are": (EXPERTS, Numerics(normalised_gates=False), False),
    "angles of long sequences": ({}, Numerics(rotary=BENT), True),
    "divided angles": ({}, Numerics(rotary=Rotary(base=10.0, factor=4.0)), False),
    "sinks and windows": ({**STRUCTURES["sinks"], **LAYERS}, Numerics(), False),
    "sinks, windows, documents and caps": ({**STRUCTURES["sinks"], **LAYERS}, Numerics(attention_cap=0.7), True),
}  # fmt: skip
HAND_WRITTEN = {**{name: (structure, Numerics(), False) for name, structure in STRUCTURES.items()}, **FURTHER}


@pytest.mark.parametrize("case", HAND_WRITTEN)
def test_loss_and_gradients_are_those_of_a_decoder_by_hand(case: str) -> None:
    """Under PyTorch's autograd; of two micro-batches, so that gradients are added up."""
    structure, numerics, with_documents = HAND_WRITTEN[case]
    weights = random_weights(dataclasses.replace(SMALL, **structure, numerics=numerics))
    executor, decoder, num_targets = Executor(weights), decoder_of(weights), 3 * SEQS * POSITIONS
    documents = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 2, 2, 2]]) if with_documents else None
    for seed in (1, 2):
        ids, targets = map(torch.tensor, tokens(SMALL, seed))
        output = decoder(ids, targets, num_targets, documents)
        output.loss.backward()
        assert executor.train(ids, targets, num_targets, documents).item() == pytest.approx(
            output.loss.item(), rel=1e-12
        )
        logits = weights.logits(ids, documents)
        torch.testing.assert_close(logits, decoder.logits(ids, documents).detach(), rtol=1e-10, atol=1e-12)
    wanted = {name: one.grad for name, one in decoder.named_parameters() if one.grad is not None}
    assert_near(executor.gradients.found, wanted)


@pytest.mark.parametrize("case", HAND_WRITTEN)
def test_a_micro_batch_without_sequences_has_no_loss_and_gradients_of_nothing(case: str) -> None:
    """As a rank has it whose replica gets none of a last, smaller batch."""
    structure, numerics, with_documents = HAND_WRITTEN[case]
    weights = random_weights(dataclasses.replace(SMALL, **structure, numerics=numerics))
    executor, ids = Executor(weights), torch.zeros(0, POSITIONS, dtype=torch.long)
    assert executor.train(ids, ids, 7, ids if with_documents else None).item() == 0.0
    assert executor.gradients.found.keys() == executor.gradients.tensors.keys()
    assert not any(gradient.any() for gradient in executor.gradients.found.values())


@pytest.mark.parametrize("case", FURTHER)
def test_what_numpy_lacks_is_not_without_effect(case: str) -> None:
    """Otherwise it would prove nothing that both decoders agree."""
    structure, numerics, with_documents = FURTHER[case]
    plain = dataclasses.replace(SMALL, **{**structure, "sliding_window": None}, numerics=Numerics())
    weights = random_weights(dataclasses.replace(SMALL, **structure, numerics=numerics))
    documents = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 2, 2, 2]]) if with_documents else None
    ids = torch.tensor(tokens(SMALL)[0])
    assert not torch.allclose(weights.logits(ids, documents), Weights(plain, weights.tensors).logits(ids))


FAMILIES = [Family(zero_stage, parallel, "none") for zero_stage in (0, 1, 2, 3) for parallel in (False, True)]


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_parameters_are_the_weights_of_the_derived_units(structure: str, family: Family) -> None:
    """None is missing, none is more, and each has the shape that the derivation's spec has on one device."""
    architecture = small(structure)
    shapes, units = parameter_shapes(architecture), derive(architecture, family)
    by_hand = dict(build(architecture).named_parameters())
    alone = Mesh(tuple((axis, 1) for axis in AXES))
    found = parameters(architecture, family)
    assert [one.name for one in found] == list(shapes) == list(by_hand)
    for one in found:
        sizes = architecture.dense().dims if one.unit == "dense_block" else architecture.dims
        assert one.trained == by_hand[one.name].requires_grad
        assert one.use.dims == units[one.unit].weights[one.weight]
        assert one.use.local_shape(alone, sizes) == shapes[one.name] == tuple(by_hand[one.name].shape)
    held: dict[str, dict[str, list[str]]] = {name: {} for name in unit_counts(architecture)}
    for one in found:
        held[one.unit].setdefault(one.path, []).append(one.weight)
    lent = {"head"} if architecture.tied_embeddings else set()
    for unit, count in unit_counts(architecture).items():
        wanted = [name for name in units[unit].weights if unit != "head" or name not in lent]
        assert list(held[unit].values()) == [wanted] * count


def model_of(architecture: Architecture) -> TorchModel:
    return Executor(random_weights(architecture)).model


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_unit_is_given_the_weights_that_it_has(structure: str) -> None:
    """All of them and no others; layers that are alike share what was compiled for them, and no layer has another's weights."""
    architecture = small(structure)
    model = model_of(architecture)
    for layer in model.layers:
        assert set(layer.weights) == set(layer.unit.unit.weights) <= set(layer.unit.place)
    assert len({id(layer.unit) for layer in model.layers}) == len(unit_counts(architecture))
    given = [tensor.data_ptr() for layer in model.layers for tensor in layer.weights.values()]
    assert len(given) - len(set(given)) == (1 if architecture.tied_embeddings else 0)


# Of w_up [F, D] by stage of ZeRO: what a use gathers; what a micro-batch and a step scatter, reduce and gather.
SHARDED = ("fsdp", "cp")
SYNCS = {
    0: Sync(reduce=("cp", "dp", "fsdp")),
    1: Sync(step_scatter=SHARDED, reduce=("dp",), step_gather=SHARDED),
    2: Sync(scatter=SHARDED, reduce=("dp",), step_gather=SHARDED),
    3: Sync(gather=SHARDED, scatter=SHARDED, reduce=("dp",)),
}


@pytest.mark.parametrize("zero_stage", SYNCS)
def test_weights_are_kept_in_step_as_their_stage_asks(zero_stage: int) -> None:
    (spec,) = (one for one in parameters(SMALL, Family(zero_stage, False, "none")) if one.name == "layers.1.w_up")
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


def test_what_the_engine_lacks_is_refused_by_name() -> None:
    architecture = dataclasses.replace(SMALL, num_predict_layers=1)
    with pytest.raises(InputError, match=r"not yet runnable: multi-token prediction .--set model.num_predict_layers=0"):
        _ = Weights(architecture, {"embedding.embedding": torch.zeros(11, 6)}).model


def test_layers_with_a_window_are_as_many_as_are_counted() -> None:
    for every in (0, 2, 3, 6):
        shape = dataclasses.replace(SMALL, num_layers=7, sliding_window=4, global_every=every)
        windows = [shape.window(layer) for layer in range(shape.num_layers)]
        assert windows.count(4) == shape.num_windowed_layers == len(windows) - windows.count(None)
    assert [dataclasses.replace(SMALL, sliding_window=4, global_every=2).window(layer) for layer in (0, 1)] == [4, None]


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    shallow, deep = (initial_weights(dataclasses.replace(SMALL, num_layers=n, **EXPERTS), 7) for n in (2, 4))
    again = initial_weights(dataclasses.replace(SMALL, **EXPERTS), 7, torch.bfloat16)
    assert again.dtype == torch.bfloat16
    assert shallow.dtype == torch.float32
    values, other = shallow.tensors, deep.tensors
    for name, tensor in again.tensors.items():
        assert torch.equal(tensor, values[name].to(torch.bfloat16))
        scale = 2**0.5 if name.endswith(("wo", "experts_down")) else 1.0  # of what is added to the residual stream
        torch.testing.assert_close(other[name] * scale, values[name])
    assert not torch.equal(values["layers.0.wq"], values["layers.1.wq"])
    another = initial_weights(dataclasses.replace(SMALL, **EXPERTS), 8)
    assert not torch.equal(another.tensors["layers.0.wq"], values["layers.0.wq"])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_initial_values_are_those_of_the_decoder_by_hand(structure: str) -> None:
    model = build(small(structure))
    initialise(model, 5)
    found, wanted = initial_weights(small(structure), 5).tensors, weights_of(model).tensors
    assert found.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


def test_biases_of_the_choice_begin_as_nothing_in_float32() -> None:
    """Each router has its own; a leading layer without experts has none."""
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
    assert sum(gradient.numel() for gradient in executor.gradients.found.values()) == num_trained_params(
        small("adapters")
    )
    assert all("lora" in name for name in executor.gradients.found)


def test_initial_values_are_of_the_right_size() -> None:
    numerics = Numerics(norm_offset=1.0)
    architecture = dataclasses.replace(SMALL, d_model=64, d_ff=96, norm="layer", norm_bias=True, numerics=numerics)
    values = initial_weights(architecture, 0).tensors
    assert values["layers.0.w_up"].std().item() == pytest.approx(0.02, rel=0.05)
    assert values["layers.0.w_down"].std().item() == pytest.approx(0.01, rel=0.05)
    assert not values["layers.0.mlp_norm_weight"].any()  # to which the norm adds its offset
    assert not values["layers.0.mlp_norm_bias"].any()


@pytest.mark.parametrize("structure", ["llama", "gpt-2"])
@pytest.mark.parametrize("window", [None, 3])
def test_documents_packed_together_are_as_they_are_alone(structure: str, window: int | None) -> None:
    """Their losses, and what they add to every gradient."""
    architecture = dataclasses.replace(small(structure), sliding_window=window, global_every=2)
    weights = random_weights(architecture)
    lengths = [(4, 3, 7), (6, 8)]
    generator = torch.Generator().manual_seed(2)
    ids, targets = torch.randint(architecture.vocab_size, (2, len(lengths), 14), generator=generator)
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    whole = weights.logits(ids[:, :7], None)
    assert not torch.allclose(weights.logits(ids[:, :7], torch.stack(rows)[:, :7]), whole)
    if structure == "gpt-2":  # its table of positions is shorter than the sequence
        ids, targets, rows, lengths = ids[:, :7], targets[:, :7], [row[:7] for row in rows], [(4, 3), (6, 1)]
    packed, alone = Executor(weights), Executor(weights)
    together = packed.train(ids, targets, 10, torch.stack(rows))
    apart = [
        alone.train(i[None], t[None], 10)
        for row, length in enumerate(lengths)
        for i, t in zip(ids[row].split(length), targets[row].split(length), strict=True)
    ]
    torch.testing.assert_close(together, torch.stack(apart).sum(), rtol=1e-12, atol=0)
    assert_near(packed.gradients.found, alone.gradients.found)


def test_a_window_shuts_out_what_is_further_back() -> None:
    weights = random_weights(dataclasses.replace(SMALL, num_layers=1, sliding_window=3))
    ids = torch.arange(8)[None]
    changed = ids.clone()
    changed[0, 2] = 9
    moved = (weights.logits(ids) != weights.logits(changed)).any(dim=-1)[0]
    assert moved.tolist() == [False, False, True, True, True, False, False, False]


def test_targets_that_are_ignored_do_not_count() -> None:
    weights = random_weights(SMALL)
    ids, targets = map(torch.tensor, tokens(SMALL))
    logits = weights.logits(ids)
    targets[0, 1:] = IGNORED
    kept = targets != IGNORED
    each = -logits[kept].log_softmax(dim=-1).gather(-1, targets[kept][:, None])
    executor = Executor(weights)
    torch.testing.assert_close(executor.train(ids, targets, 40), each.sum() / 40, rtol=1e-12, atol=0)
    torch.testing.assert_close(executor.loss(ids, targets, 40), each.sum() / 40, rtol=1e-12, atol=0)
    decoder = decoder_of(weights)
    decoder(ids, targets, 40).loss.backward()
    assert_near(executor.gradients.found, {name: one.grad for name, one in decoder.named_parameters()})


@pytest.mark.parametrize("of", [Weights.logits, lambda weights, ids: Executor(weights).train(ids, ids, 8)])
def test_sequences_longer_than_the_table_of_positions_are_refused(
    of: Callable[[Weights, torch.Tensor], object],
) -> None:
    with pytest.raises(InputError, match="learned table of positions has 7 rows"):
        of(random_weights(small("gpt-2")), torch.zeros(1, 8, dtype=torch.long))
