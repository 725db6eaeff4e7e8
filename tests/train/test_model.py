"""The executor's loss and gradients in float64 equal those of the derivation's NumPy program and of a decoder by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from executing import Executor, batch_of, decoder_of, errors, random_weights
from schemes import scheme_of

from shardwise.derive.sharded_program import ComputeStep
from shardwise.derive.sharded_unit import derive_unit
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import model_program
from shardwise.model.numerics import Gating, Numerics, Rotary
from shardwise.model.optimizers.definition import get_optimizer
from shardwise.run.data.batches import IGNORE_INDEX
from shardwise.run.engine import unit_passes
from shardwise.run.engine.calls import CallBuilder, KernelCall
from shardwise.run.engine.kernel_calls import build_call
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.engine.model_builder import ModelWeights
from shardwise.run.numpy.kernels import Router
from shardwise.run.numpy.step import run_step
from shardwise.run.trainer.expert_balance import auxiliary_loss
from shardwise.sharding import Mesh
from shardwise.step.parameters import list_parameters
from shardwise.values.errors import InputError

TOLERANCE = 1e-10
WEIGHT = 0.3  # of multi-token prediction
AXES = ("dp", "fsdp", "ep", "cp", "tp_kv", "tp_rep")
SEQS, POSITIONS = 2, 5
SMALL = Architecture(
    name="small", num_layers=2, d_model=6, d_ff=4, num_heads=4, num_kv_heads=2, head_dim=4, vocab_size=11
)
ALL_BIASES = ("qkv", "attention_out", "mlp")
EXPERTS = {"num_experts": 5, "experts_per_token": 2}
NO_EXPERTS = {"num_experts": 0, "experts_per_token": 0, "shared_expert_width": 0}
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
    "squared relu": {"mlp": "relu2", "bias": ALL_BIASES},
    "squared relu of a gate": {"mlp": "gated_relu2"},
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
    "multi-token prediction": {"num_predict_layers": 1},
    "tied multi-token prediction": {
        "num_predict_layers": 2, "tied_embeddings": True, "norm": "layer", "norm_bias": True, "positions": "learned",
        "max_positions": 7, "bias": ALL_BIASES, "mlp": "gelu", "sinks": True,
    },
    "deepseek-v3": {
        **EXPERTS, "num_layers": 3, "num_dense_layers": 1, "dense_d_ff": 7, "shared_expert_width": 3, "num_kv_heads": 4,
        "head_dim": 6, "kv_lora_rank": 5, "rope_head_dim": 2, "v_head_dim": 3, "q_lora_rank": 3, "num_predict_layers": 3,
    },
    "adapters and multi-token prediction": {
        "lora_rank": 2, "lora_targets": ("qkv", "attention_out", "mlp"), "num_predict_layers": 2,
    },
    "kinds of layers": {
        **EXPERTS, "num_layers": 6, "num_predict_layers": 1, "shared_expert_width": 3,
        "layer_pattern": ("dense", "block", "alone", "fed", "routed"),
        "layer_kinds": {
            "dense": {**NO_EXPERTS, "positions": "none"},
            "alone": {**NO_EXPERTS, "feed_forward": "none", "sinks": True},
            "fed": {**NO_EXPERTS, "mixer": "none", "post_norms": True},
            "routed": {"mixer": "none", "shared_expert_width": 0},
        },
    },
}  # fmt: skip


ROUTERS: dict[str, tuple[dict[str, Any], Numerics]] = {
    "gates as they are": (EXPERTS, Numerics(normalised_gates=False)),
    "sigmoid gates": (EXPERTS, Numerics(gating=Gating(scores="sigmoid", scale=2.5))),
    "sigmoid gates as they are": (EXPERTS, Numerics(gating=Gating(scores="sigmoid"), normalised_gates=False)),
    "experts of some groups": (
        {**EXPERTS, "num_experts": 6}, Numerics(gating=Gating(scores="sigmoid", groups=3, chosen_groups=2, votes=2))
    ),
    "experts of the group with the best": (
        {**EXPERTS, "num_experts": 6}, Numerics(gating=Gating(groups=3, chosen_groups=1, scale=16.0), normalised_gates=False),
    ),
}  # fmt: skip


def small(structure: str) -> Architecture:
    return dataclasses.replace(SMALL, **STRUCTURES[structure])


def whole_names(architecture: Architecture) -> dict[str, str]:
    """Names in the program of the whole model, which tells layers apart by a prefix, by the parameters' names."""
    parameters = list_parameters(architecture, scheme_of(architecture.structure))
    prefixes = {
        parameter.path: f"{parameter.path.removeprefix('layers.').replace('.', '')}."
        for parameter in parameters
        if "." in parameter.path
    }
    return {parameter.name: f"{prefixes.get(parameter.path, '')}{parameter.weight}" for parameter in parameters}


def tokens(architecture: Architecture, seed: int = 1) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(architecture.vocab_size, size=(SEQS, POSITIONS)) for _ in range(2))


def derive_reference(
    weights: ModelWeights, batches: Iterable[MicroBatch], num_targets: int
) -> tuple[float, dict[str, Any]]:
    """Loss and gradients by parameter of the derivation's unsharded step with these weights, of the ids and targets of the model
    and of each module of multi-token prediction."""
    architecture, scheme = weights.architecture, scheme_of(weights.architecture.structure)
    unit = derive_unit("whole", model_program(architecture), scheme)
    names = whole_names(architecture)
    state = {whole: weights.tensors[name].numpy() for name, whole in names.items()}
    kept = get_optimizer(scheme.optimizer).state
    zeros = {f"{name}.{part}": np.zeros_like(a) for name, a in state.items() for part in kept}
    batch: dict[str, Any] = {"positions": np.arange(POSITIONS)}
    for prefix, micro_batch in zip(
        ("", *(f"predict{n}." for n in range(architecture.num_predict_layers))), batches, strict=True
    ):
        scale = WEIGHT / architecture.num_predict_layers / num_targets if prefix else 1 / num_targets
        arrays = {
            "ids": micro_batch.ids_BT.numpy(),
            "targets": micro_batch.targets_BT.numpy(),
            "loss_scale": np.array(scale),
        }
        batch |= {f"{prefix}{name}": array for name, array in arrays.items()}
    sizes, router = {**architecture.dims, "B": SEQS, "T": POSITIONS}, Router.of(architecture.numerics)
    result = run_step(unit, Mesh(tuple((axis, 1) for axis in AXES)), sizes, {**state, **zeros}, [batch], router)
    trained = {name: unit.gradients[whole] for name, whole in names.items() if whole in unit.gradients}
    assert len(result.gradients) == len(trained)
    return result.loss, {name: result.gradients[gradient] for name, gradient in trained.items()}


def assert_near(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, error in errors(actual, expected).items():
        assert error <= TOLERANCE, f"{name}: relative error {error}"


@pytest.mark.thinned(4)
@pytest.mark.parametrize("takes_products", [True, False])
@pytest.mark.parametrize("case", [*STRUCTURES, *ROUTERS])
def test_loss_and_gradients_are_the_derivations(
    case: str, takes_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether products write gradients where these rest, or hand them over. What further tokens are is left to others: the
    program counts all targets."""
    structure, numerics, _ = HAND_WRITTEN[case]
    weights = random_weights(dataclasses.replace(SMALL, **structure, numerics=numerics))
    num_batches, num_targets = weights.architecture.num_predict_layers + 1, 3 * SEQS * POSITIONS
    batches = [batch_of(*tokens(weights.architecture, seed)) for seed in range(num_batches)]
    further = iter(batches[1:])
    monkeypatch.setattr(MicroBatch, "shift_to_next_token", lambda _: next(further))
    executor = Executor(weights, takes_products=takes_products, prediction_weight=WEIGHT)
    on_way = executor.model.forward(batches[0], num_targets, trains=True)
    executor.model.backward(on_way)
    loss, gradients = derive_reference(weights, batches, num_targets)
    assert (on_way.loss + sum(on_way.mtp_losses)).item() == pytest.approx(loss, rel=1e-12)
    assert len(on_way.mtp_losses) == weights.architecture.num_predict_layers
    assert_near(executor.gradients.computed, gradients)


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
    "kinds of layers of other sizes": (
        {
            **EXPERTS, "num_layers": 5, "shared_expert_width": 3, "layer_pattern": ("local", "dense", "block"),
            "layer_kinds": {
                "local": {"num_heads": 6, "num_kv_heads": 3, "head_dim": 2, "sliding_window": 3, "num_experts": 4, "d_ff": 5},
                "dense": {
                    **NO_EXPERTS, "num_kv_heads": 4, "d_ff": 7, "positions": "none", "qk_norm": True,
                },
            },
        },
        Numerics(local_rotary=Rotary(base=50.0)), True,
    ),
    "other angles in windows": (LAYERS, Numerics(local_rotary=Rotary(base=50.0)), True),
    "angles of long sequences": ({}, Numerics(rotary=BENT), True),
    "divided angles": ({}, Numerics(rotary=Rotary(base=10.0, factor=4.0)), False),
    "sinks and windows": ({**STRUCTURES["sinks"], **LAYERS}, Numerics(), False),
    "sinks, windows, documents and caps": ({**STRUCTURES["sinks"], **LAYERS}, Numerics(attention_cap=0.7), True),
    "documents and multi-token prediction": (STRUCTURES["deepseek-v3"], Numerics(), True),
    "windows, other angles, caps, scales and multi-token prediction": (
        {**STRUCTURES["tied multi-token prediction"], **LAYERS, "positions": "rotary"},
        Numerics(local_rotary=Rotary(base=50.0), logit_cap=1.5, embedding_scale=3.0, norm_offset=1.0), True,
    ),
}  # fmt: skip
HAND_WRITTEN = {
    **{name: (structure, Numerics(), False) for name, structure in STRUCTURES.items()},
    **{name: (*router, False) for name, router in ROUTERS.items()},
    **FURTHER,
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("case", HAND_WRITTEN)
def test_loss_and_gradients_are_those_of_a_decoder_by_hand(case: str) -> None:
    """Under PyTorch's autograd; of two micro-batches, so that gradients are added up."""
    structure, numerics, with_documents = HAND_WRITTEN[case]
    weights = random_weights(dataclasses.replace(SMALL, **structure, numerics=numerics))
    executor, decoder, num_targets = Executor(weights), decoder_of(weights), 3 * SEQS * POSITIONS
    documents = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 2, 2, 2]]) if with_documents else None
    for seed in (1, 2):
        ids, targets = map(torch.tensor, tokens(SMALL, seed))
        if documents is not None:
            targets[:, :-1][documents[:, 1:] != documents[:, :-1]] = IGNORE_INDEX
        output = decoder(ids, targets, num_targets, documents)
        output.total().backward()
        on_way = executor.model.forward(batch_of(ids, targets, documents), num_targets, trains=True)
        executor.model.backward(on_way)
        assert on_way.loss.item() == pytest.approx(output.loss.item(), rel=1e-12)
        further = [loss.item() / max(len(output.further), 1) for loss in output.further]
        assert [loss.item() for loss in on_way.mtp_losses] == pytest.approx(further, rel=1e-12)
        logits = weights.logits(ids, documents)
        torch.testing.assert_close(logits, decoder.logits(ids, documents).detach(), rtol=1e-10, atol=1e-12)
    expected = {name: parameter.grad for name, parameter in decoder.named_parameters() if parameter.grad is not None}
    assert_near(executor.gradients.computed, expected)


@pytest.mark.parametrize("structure", ["biased experts", "gpt-2", "adapters"])
def test_sums_beside_their_operands_are_those_over_them(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum is written over an operand that nothing reads any more; where all are read again it has a place of its own."""
    weights, (ids, targets) = random_weights(small(structure)), map(torch.tensor, tokens(SMALL))
    over = Executor(weights)
    loss = over.train(ids, targets, SEQS * POSITIONS)
    written_over: list[bool] = []

    def beside(calls: CallBuilder, step: ComputeStep, phase: str) -> KernelCall:
        call = build_call(calls, step, phase)
        written_over.append(bool(call.over))
        return dataclasses.replace(call, over={})

    monkeypatch.setattr(unit_passes, "build_call", beside)
    apart = Executor(weights)
    assert apart.train(ids, targets, SEQS * POSITIONS).item() == pytest.approx(loss.item(), rel=1e-14)
    assert any(written_over)
    assert_near(apart.gradients.computed, over.gradients.computed)


@pytest.mark.parametrize("case", HAND_WRITTEN)
def test_a_micro_batch_without_sequences_has_no_loss_and_gradients_of_nothing(case: str) -> None:
    """As a rank has it whose replica gets none of a last, smaller batch."""
    structure, numerics, with_documents = HAND_WRITTEN[case]
    weights = random_weights(dataclasses.replace(SMALL, **structure, numerics=numerics))
    executor, ids = Executor(weights), torch.zeros(0, POSITIONS, dtype=torch.long)
    assert executor.train(ids, ids, 7, ids if with_documents else None).item() == 0.0
    assert executor.gradients.computed.keys() == executor.gradients.tensors.keys()
    assert not any(gradient.any() for gradient in executor.gradients.computed.values())


@pytest.mark.parametrize("case", [*FURTHER, *ROUTERS])
def test_features_that_the_plain_program_lacks_change_the_loss(case: str) -> None:
    """Otherwise it would prove nothing that both decoders agree."""
    structure, numerics, with_documents = HAND_WRITTEN[case]
    plain = dataclasses.replace(SMALL, **{**structure, "sliding_window": None}, numerics=Numerics())
    weights = random_weights(dataclasses.replace(SMALL, **structure, numerics=numerics))
    documents = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 2, 2, 2]]) if with_documents else None
    ids = torch.tensor(tokens(SMALL)[0])
    assert not torch.allclose(weights.logits(ids, documents), ModelWeights(plain, weights.tensors).logits(ids))


def test_layers_with_a_window_are_as_many_as_are_counted() -> None:
    for every in (0, 2, 3, 6):
        shape = dataclasses.replace(SMALL, num_layers=7, sliding_window=4, global_every=every)
        windows = [shape.attention_window(layer) for layer in range(shape.num_layers)]
        assert windows.count(4) == shape.num_windowed_layers == len(windows) - windows.count(None)
    assert [
        dataclasses.replace(SMALL, sliding_window=4, global_every=2).attention_window(layer) for layer in (0, 1)
    ] == [4, None]


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("structure", ["leading dense layers", "biased experts", "deepseek-v3"])
def test_routers_are_biased_counted_and_penalised_each_for_itself(structure: str, policy: str) -> None:
    """By biases of their choice, and by the gradient of a loss that evens their shares out, against autograd of that loss."""
    weights = random_weights(small(structure))
    executor, decoder, (ids, targets) = Executor(weights, policy), decoder_of(weights), map(torch.tensor, tokens(SMALL))
    blocks = (*decoder.layers.values(), *decoder.predict)
    routers = [block for block in blocks if hasattr(block, "balance_bias")]
    for seed, (bias, block) in enumerate(zip(executor.model.balance_biases.values(), routers, strict=True)):
        bias.copy_(torch.linspace(0.0, 0.3, len(bias)).roll(seed))
        block.balance_bias.copy_(bias)
    output = decoder(ids, targets, ids.numel())
    auxiliary = output.auxiliary()
    assert auxiliary is not None
    (output.total() + 0.7 * auxiliary).backward()
    on_way = executor.model.forward(batch_of(ids, targets), ids.numel(), trains=True)
    assert list(on_way.routed) == list(executor.model.balance_biases)
    for (counts, probabilities), routing in zip(on_way.routed.values(), output.routings, strict=True):
        assert torch.equal(counts.long(), routing.counts)
        torch.testing.assert_close(probabilities, routing.probabilities.detach())
    loss, gradient = auxiliary_loss(*torch.stack(list(on_way.routed.values()), dim=1).unbind())
    torch.testing.assert_close(loss, auxiliary.detach())
    executor.model.backward(on_way, dict(zip(on_way.routed, 0.7 * gradient, strict=True)))
    assert_near(executor.gradients.computed, {name: parameter.grad for name, parameter in decoder.named_parameters()})


@pytest.mark.parametrize("structure", ["llama", "gpt-2", "multi-token prediction"])
@pytest.mark.parametrize("window", [None, 3])
def test_documents_packed_together_are_as_they_are_alone(structure: str, window: int | None) -> None:
    """Their losses, and their shares of every gradient."""
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
    for row, length in enumerate(lengths):
        targets[row, torch.tensor(length).cumsum(0) - 1] = IGNORE_INDEX
    packed, separate = Executor(weights), Executor(weights)
    together = packed.train(ids, targets, 10, torch.stack(rows))
    apart = [
        separate.train(i[None], t[None], 10)
        for row, length in enumerate(lengths)
        for i, t in zip(ids[row].split(length), targets[row].split(length), strict=True)
    ]
    torch.testing.assert_close(together, torch.stack(apart).sum(), rtol=1e-12, atol=0)
    assert_near(packed.gradients.computed, separate.gradients.computed)


def test_further_targets_stay_in_their_documents() -> None:
    """Tokens 1 to 5 with 6 behind them, in documents of one, three and two tokens; and whether all are one document."""
    ids, targets = (
        torch.tensor([[1, 2, 3, 4, 5]] * 2),
        torch.tensor([[IGNORE_INDEX, 3, 4, IGNORE_INDEX, 6], [2, 3, 4, 5, 6]]),
    )
    batch, shifted = batch_of(ids, targets, torch.tensor([[0, 1, 1, 1, 2], [0, 0, 0, 0, 0]])), []
    for _ in range(5):
        batch = batch.shift_to_next_token()
        shifted.append((batch.ids_BT[0].tolist(), batch.targets_BT.tolist()))
        assert torch.equal(batch.ids_BT[0], batch.ids_BT[1])
        assert batch.documents_BT is not None
    no = IGNORE_INDEX
    assert shifted == [
        ([2, 3, 4, 5, 5], [[no, 4, no, no, no], [3, 4, 5, 6, no]]),
        ([3, 4, 5, 5, 5], [[no, no, no, no, no], [4, 5, 6, no, no]]),
        ([4, 5, 5, 5, 5], [[no, no, no, no, no], [5, 6, no, no, no]]),
        ([5, 5, 5, 5, 5], [[no, no, no, no, no], [6, no, no, no, no]]),
        ([5, 5, 5, 5, 5], [[no] * 5] * 2),
    ]
    assert (ids[0].tolist(), targets[1].tolist()) == ([1, 2, 3, 4, 5], [2, 3, 4, 5, 6])


def test_a_part_has_the_further_tokens_of_the_whole() -> None:
    """Of runs of places with as many behind them as there are further tokens, also where these reach into the next run."""
    tokens = torch.arange(2 * 13).view(2, 13)
    documents = torch.tensor([[0] * 3 + [1] * 4 + [2] * 5, [0] * 12])
    targets = tokens[:, 1:].clone()
    targets[0, [2, 6]] = IGNORE_INDEX
    whole = MicroBatch(tokens[:, :-1], targets, documents)
    own_rows = ((0, 3), (4, 3), (9, 3))
    part = whole.restrict_to(((0, 5), (4, 5), (9, 3)))
    assert (part.ids_BT.shape, part.seq_len, part.documents_BT) == ((2, 13), 12, documents)
    for _ in range(3):
        rows = part.rows(own_rows)
        assert rows == [(0, 3), (5, 3), (10, 3)]
        for part_values, whole_values in ((part.ids_BT, whole.ids_BT), (part.targets_BT, whole.targets_BT)):
            for (row, count), (place, _) in zip(rows, own_rows, strict=True):
                assert torch.equal(part_values[:, row : row + count], whole_values[:, place : place + count])
        whole, part = whole.shift_to_next_token(), part.shift_to_next_token()
    for places in ((3, 4), (8, 2), (11, 2)):
        with pytest.raises(ValueError, match="are required"):
            whole.restrict_to(((0, 5), (4, 4), (9, 3))).rows((places,))


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
    targets[0, 1:] = IGNORE_INDEX
    kept = targets != IGNORE_INDEX
    losses = -logits[kept].log_softmax(dim=-1).gather(-1, targets[kept][:, None])
    executor = Executor(weights)
    torch.testing.assert_close(executor.train(ids, targets, 40), losses.sum() / 40, rtol=1e-12, atol=0)
    torch.testing.assert_close(executor.loss(ids, targets, 40), losses.sum() / 40, rtol=1e-12, atol=0)
    decoder = decoder_of(weights)
    decoder(ids, targets, 40).loss.backward()
    assert_near(executor.gradients.computed, {name: parameter.grad for name, parameter in decoder.named_parameters()})


@pytest.mark.parametrize("of", [ModelWeights.logits, lambda weights, ids: Executor(weights).train(ids, ids, 8)])
def test_sequences_longer_than_the_table_of_positions_are_refused(
    of: Callable[[ModelWeights, torch.Tensor], object],
) -> None:
    with pytest.raises(InputError, match="learned table of positions has 7 rows"):
        of(random_weights(small("gpt-2")), torch.zeros(1, 8, dtype=torch.long))
