"""The model's loss and every gradient are those of the derivation's program, executed in NumPy in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.derive.derivation import derive, derive_unit
from shardwise.engine.numpy.step import run_step
from shardwise.errors import InputError
from shardwise.layout.family import Family
from shardwise.lowering.parameters import parameters
from shardwise.lowering.weights import Sync
from shardwise.model.architecture import Architecture
from shardwise.model.counts import num_params, num_trained_params
from shardwise.model.decoder import unit_counts, whole_program
from shardwise.model.load import load_model
from shardwise.model.numerics import Numerics
from shardwise.sharding import Mesh
from shardwise.train.model import IGNORED, Decoder, build, initialise, parameter_weights

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


def made(architecture: Architecture, seed: int = 0) -> Decoder:
    """A model in float64 whose weights are all random and none small."""
    model = build(architecture, dtype=torch.float64)
    initialise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.5, generator=generator)
    return model


def whole_names(model: Decoder) -> dict[str, str]:
    """Names in the program of the whole model, which tells layers apart by a prefix, by the parameters' names."""
    layer = {name: f"{name.split('.')[1]}." if name.startswith("layers.") else "" for name in parameter_weights(model)}
    return {name: f"{layer[name]}{weight.name}" for name, weight in parameter_weights(model).items()}


def tokens(architecture: Architecture, seed: int = 1) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(architecture.vocab_size, size=(SEQS, POSITIONS)) for _ in range(2))


def judged(
    architecture: Architecture, model: Decoder, ids: Any, targets: Any, num_targets: int
) -> tuple[float, dict[str, Any]]:
    """Loss and gradients by parameter of the derivation's unsharded step with the model's weights."""
    family = Family(0, False, "none")
    unit = derive_unit("whole", whole_program(architecture), family, recompute="none")
    parameters, names = dict(model.named_parameters()), whole_names(model)
    state = {whole: parameters[name].detach().numpy() for name, whole in names.items()}
    zeros = {f"{name}.{part}": np.zeros_like(a) for name, a in state.items() for part in ("master", "first", "second")}
    batch = {"ids": ids, "targets": targets, "positions": np.arange(POSITIONS), "loss_scale": np.array(1 / num_targets)}
    sizes = {**architecture.dims, "B": SEQS, "T": POSITIONS}
    result = run_step(unit, family, Mesh(tuple((axis, 1) for axis in AXES)), sizes, {**state, **zeros}, [batch])
    trained = {name: unit.gradients[whole] for name, whole in names.items() if whole in unit.gradients}
    assert len(result.gradients) == len(trained)
    return result.loss, {name: result.gradients[gradient] for name, gradient in trained.items()}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_loss_and_gradients_are_the_derivations(structure: str) -> None:
    architecture = small(structure)
    model, (ids, targets), num_targets = made(architecture), tokens(architecture), 3 * SEQS * POSITIONS
    output = model(torch.tensor(ids), torch.tensor(targets), num_targets)
    output.loss.backward()
    loss, gradients = judged(architecture, model, ids, targets, num_targets)
    assert output.loss.item() == pytest.approx(loss, rel=1e-12)
    # the bias of keys that are not rotated moves all scores of a query alike: its gradient is rounding alone
    least = 1e-6 * np.linalg.norm([np.linalg.norm(gradient) for gradient in gradients.values()])
    assert set(gradients) == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in model.named_parameters():
        if name not in gradients:
            assert parameter.grad is None
            continue
        assert parameter.grad is not None
        error = np.linalg.norm(parameter.grad.numpy() - gradients[name]) / max(np.linalg.norm(gradients[name]), least)
        assert error <= TOLERANCE, f"{name}: relative error {error}"


FAMILIES = [Family(zero_stage, parallel, "none") for zero_stage in (0, 1, 2, 3) for parallel in (False, True)]


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_parameters_are_the_weights_of_the_derived_units(structure: str, family: Family) -> None:
    """None is missing, none is more, and each has the shape that the derivation's spec has on one device."""
    architecture = small(structure)
    model, units = build(architecture), derive(architecture, family)
    alone = Mesh(tuple((axis, 1) for axis in AXES))
    found = {one.name: one for one in parameters(architecture, family)}
    assert list(found) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        spec = found[name]
        sizes = architecture.dense().dims if spec.unit == "dense_block" else architecture.dims
        assert spec.trained == parameter.requires_grad
        assert spec.use.dims == units[spec.unit].weights[spec.weight]
        assert spec.use.local_shape(alone, sizes) == tuple(parameter.shape)
    held: dict[str, list[tuple[str, ...]]] = {name: [] for name in unit_counts(architecture)}
    for module in (model.embedding, *model.layers.values(), model.head):
        (unit,) = {weight.unit for weight in module.weights.values()}
        held[unit].append(tuple(weight.name for weight in module.weights.values()))
    lent = {"head"} if architecture.tied_embeddings else set()
    for unit, count in unit_counts(architecture).items():
        wanted = tuple(name for name in units[unit].weights if unit != "head" or name not in lent)
        assert held[unit] == [wanted] * count


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
    assert sum(parameter.numel() for parameter in build(architecture).parameters()) == num_params(architecture)


def test_what_the_engine_lacks_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"not yet runnable: multi-token prediction .--set model.num_predict_layers=0"):
        build(load_model("deepseek-v3"))


def test_layers_with_a_window_are_as_many_as_are_counted() -> None:
    for every in (0, 2, 3, 6):
        shape = dataclasses.replace(SMALL, num_layers=7, sliding_window=4, global_every=every)
        windows = [shape.window(layer) for layer in range(shape.num_layers)]
        assert windows.count(4) == shape.num_windowed_layers == len(windows) - windows.count(None)
    assert [dataclasses.replace(SMALL, sliding_window=4, global_every=2).window(layer) for layer in (0, 1)] == [4, None]


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    shallow, deep = (build(dataclasses.replace(SMALL, num_layers=n, **EXPERTS)) for n in (2, 4))
    again = build(dataclasses.replace(SMALL, **EXPERTS), dtype=torch.bfloat16)
    for model in (shallow, deep, again):
        initialise(model, 7)
    values, other = dict(shallow.named_parameters()), dict(deep.named_parameters())
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, values[name].to(torch.bfloat16))
        scale = 2**0.5 if name.endswith(("wo", "experts_down")) else 1.0  # of what is added to the residual stream
        torch.testing.assert_close(other[name] * scale, values[name])
    assert not torch.equal(values["layers.0.wq"], values["layers.1.wq"])
    initialise(again, 8)
    assert not torch.equal(again.get_parameter("layers.0.wq"), values["layers.0.wq"].to(torch.bfloat16))
    assert again.get_buffer("layers.0.balance_bias").dtype == torch.float32
    assert all(not buffer.any() for buffer in again.buffers())


def test_adapters_begin_as_nothing_and_alone_are_trained() -> None:
    adapted, plain = build(small("adapters")), build(dataclasses.replace(SMALL, bias=ALL_BIASES))
    for model in (adapted, plain):
        initialise(model, 3)
    ids = torch.arange(6)[None]
    assert torch.equal(adapted.logits(ids), plain.logits(ids))
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert trained == num_trained_params(small("adapters"))


def test_initial_values_are_of_the_right_size() -> None:
    numerics = Numerics(norm_offset=1.0)
    model = build(dataclasses.replace(SMALL, d_model=64, d_ff=96, norm="layer", norm_bias=True, numerics=numerics))
    initialise(model, 0)
    assert model.get_parameter("layers.0.w_up").std().item() == pytest.approx(0.02, rel=0.05)
    assert model.get_parameter("layers.0.w_down").std().item() == pytest.approx(0.01, rel=0.05)
    assert not model.get_parameter("layers.0.mlp_norm_weight").any()  # to which the norm adds its offset
    assert not model.get_parameter("layers.0.mlp_norm_bias").any()


@pytest.mark.parametrize("structure", ["llama", "gpt-2"])
@pytest.mark.parametrize("window", [None, 3])
def test_documents_packed_together_are_as_they_are_alone(structure: str, window: int | None) -> None:
    architecture = dataclasses.replace(small(structure), sliding_window=window, global_every=2)
    model = made(architecture)
    lengths = [(4, 3, 7), (6, 8)]
    generator = torch.Generator().manual_seed(2)
    ids, targets = torch.randint(architecture.vocab_size, (2, len(lengths), 14), generator=generator)
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    whole = model.logits(ids[:, :7], None)
    assert not torch.allclose(model.logits(ids[:, :7], torch.stack(rows)[:, :7]), whole)
    if structure == "gpt-2":  # its table of positions is shorter than the sequence
        ids, targets, rows, lengths = ids[:, :7], targets[:, :7], [row[:7] for row in rows], [(4, 3), (6, 1)]
    together = model(ids, targets, 10, torch.stack(rows)).loss
    apart = [
        model(i[None], t[None], 10).loss
        for row, length in enumerate(lengths)
        for i, t in zip(ids[row].split(length), targets[row].split(length), strict=True)
    ]
    torch.testing.assert_close(together, torch.stack(apart).sum(), rtol=1e-12, atol=0)


def test_a_window_shuts_out_what_is_further_back() -> None:
    model = made(dataclasses.replace(SMALL, num_layers=1, sliding_window=3))
    ids = torch.arange(8)[None]
    changed = ids.clone()
    changed[0, 2] = 9
    moved = (model.logits(ids) != model.logits(changed)).any(dim=-1)[0]
    assert moved.tolist() == [False, False, True, True, True, False, False, False]


def test_targets_that_are_ignored_do_not_count() -> None:
    model = made(SMALL)
    ids, targets = map(torch.tensor, tokens(SMALL))
    logits = model.logits(ids)
    targets[0, 1:] = IGNORED
    kept = targets != IGNORED
    each = -logits[kept].log_softmax(dim=-1).gather(-1, targets[kept][:, None])
    torch.testing.assert_close(model(ids, targets, 40).loss, each.sum() / 40, rtol=1e-12, atol=0)


def test_sequences_longer_than_the_table_of_positions_are_refused() -> None:
    with pytest.raises(InputError, match="learned table of positions has 7 rows"):
        made(small("gpt-2")).logits(torch.zeros(1, 8, dtype=torch.long))
