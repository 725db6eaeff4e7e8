"""Recomputation: gradients are unchanged, and exactly the operations that the derivation lists are run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch
from executing import Executor, batch_of, random_weights
from schemes import scheme_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.derive.sharded_unit import derived_unit
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.backward import saveable_results
from shardwise.model.recompute_policies import format_tensor_set, policy_names
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.engine.model_builder import ModelWeights, initial_weights
from shardwise.run.kernels import experts
from shardwise.run.parallel.world import World
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.step.rank_program import RankProgram
from shardwise.values.precision import get_precision

POLICIES = tuple(name for name in policy_names() if name != "none")
SMALL: dict[str, Any] = {
    "name": "small", "num_layers": 3, "d_model": 12, "d_ff": 10, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4,
    "vocab_size": 11,
}  # fmt: skip
EXPERTS = {"num_experts": 5, "experts_per_token": 2}
STRUCTURES: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied and biased": {"tied_embeddings": True, "bias": ("qkv", "attention_out", "mlp"), "qk_norm": True},
    "gpt-2": {"mlp": "gelu", "norm": "layer", "norm_bias": True, "positions": "learned", "max_positions": 7},
    "parallel": {"mlp": "relu", "norm": "layer", "parallel": True, "post_norms": False},
    "post-norms": {"qk_norm": True, "qk_norm_over": "projection", "pre_norms": False, "post_norms": True},
    "experts": {**EXPERTS, "num_dense_layers": 1, "dense_d_ff": 7, "shared_expert_width": 3, "shared_gate": True},
    "biased experts": {**EXPERTS, "mlp": "clamped_swiglu", "bias": ("router", "experts")},
    "latent": {"num_kv_heads": 4, "kv_lora_rank": 5, "rope_head_dim": 2, "v_head_dim": 4, "q_lora_rank": 3},
    "sinks": {"sinks": True, "mlp": "geglu"},
    "adapters": {"lora_rank": 2, "lora_targets": ("qkv", "attention_out", "mlp")},
    "multi-token prediction": {**EXPERTS, "num_predict_layers": 2},
}
IDS, TARGETS = torch.randint(11, (2, 2, 7), generator=torch.Generator().manual_seed(0))


def weights_of(structure: str) -> ModelWeights:
    return initial_weights(Architecture(**{**SMALL, **STRUCTURES[structure]}), 0, torch.float64)


def gradients(executor: Executor) -> dict[str, Tensor]:
    executor.train(IDS, TARGETS, IDS.numel())
    return executor.gradients.computed


@pytest.mark.thinned(4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradients_are_those_without_recomputation(structure: str, policy: str) -> None:
    weights = weights_of(structure)
    expected, actual = gradients(Executor(weights)), gradients(Executor(weights, policy))
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-15)


def some_set(structure: str, seed: int) -> str:
    """Return a policy that keeps about half of the candidates, by kind of layer if there are two."""
    architecture, chance = weights_of(structure).architecture, Random(seed)
    kinds = {}
    for kind in architecture.layer_counts:
        unit = derived_unit(scheme_of(architecture.structure), kind)
        may = saveable_results(unit.forward.program, unit.backward.program.inputs)
        kinds[kind] = [name for name in may if chance.random() < 0.5]
    return format_tensor_set(kinds)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradients_with_any_set_of_kept_tensors_are_those_without_recomputation(structure: str, seed: int) -> None:
    weights = weights_of(structure)
    expected, actual = gradients(Executor(weights)), gradients(Executor(weights, some_set(structure, seed)))
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("structure", ["dense", "gpt-2", "latent"])
def test_only_tensors_outside_the_kept_set_are_recomputed(structure: str, seed: int) -> None:
    weights, policy = weights_of(structure), some_set(structure, seed)
    unit = derived_unit(scheme_of(weights.architecture.structure, recompute=policy), "block")
    expected = Counter(step.operation.kind for step in unit.recompute_steps if hasattr(step, "operation"))
    for layer_counts in run_again(weights, policy):
        assert (layer_counts["contract"], layer_counts["scan"]) == (expected["contract"], expected["scan"])


class Operations(TorchDispatchMode):
    """Counts the operations of what is run again, layer by layer."""

    KINDS = dict.fromkeys(("mm", "addmm", "mv", "bmm", "addmv", "dot"), "contract")

    def __init__(self) -> None:
        super().__init__()
        self.slices: list[Counter[str]] = []

    @contextmanager
    def clock(self) -> Iterator[None]:
        self.slices.append(Counter())
        with self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.slices[-1][self.KINDS.get(name, "scan" if "scaled_dot_product" in name else "other")] += 1
        return func(*args, **(kwargs or {}))


def run_again(weights: ModelWeights, policy: str, num_layers: int | None = None) -> list[Counter[str]]:
    """Return the operations that each layer runs again, from the last layer to the first."""
    operations = Operations()
    gradients(Executor(weights, policy, num_layers=num_layers, recomputing=operations.clock))
    return operations.slices


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "structure", ["dense", "tied and biased", "gpt-2", "parallel", "post-norms", "latent", "adapters"]
)
def test_products_and_attention_are_run_again_as_derived(structure: str, policy: str) -> None:
    weights = weights_of(structure)
    unit = derived_unit(scheme_of(weights.architecture.structure, recompute=policy), "block")
    expected = Counter(step.operation.kind for step in unit.recompute_steps if hasattr(step, "operation"))
    layer_counts = run_again(weights, policy)
    assert len(layer_counts) == SMALL["num_layers"] * bool(
        unit.recompute_steps
    )  # modules that the structure lacks run nothing
    for counts in layer_counts:
        assert (counts["contract"], counts["scan"]) == (expected["contract"], expected["scan"])


@pytest.mark.parametrize("bias", [(), ("router", "experts")])
@pytest.mark.parametrize(("policy", "products"), [("selective", 0), ("full", 5 + 2 * 5)])
def test_products_of_experts_are_kept_by_selective(policy: str, products: int, bias: tuple[str, ...]) -> None:
    """Run again by `full`: queries, keys, values, attention's output, the router, and up and gate of five experts."""
    weights = initial_weights(Architecture(**{**SMALL, **EXPERTS}, bias=bias), 0, torch.float64)
    down = 5 if policy == "full" else 0  # what came back from the experts is read again, so all of it is made
    assert [counts["contract"] for counts in run_again(weights, policy)] == [products + down] * SMALL["num_layers"]


@pytest.mark.parametrize("policy", POLICIES)
def test_recomputed_routers_choose_the_same_experts(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They use the same scores and biases; otherwise other experts would be recomputed."""
    chosen: list[Tensor] = []
    route = experts.route_tokens

    def watched(*operands: Any, **options: Any) -> Any:
        routing = route(*operands, **options)
        chosen.append(routing.choices.clone())
        return routing

    monkeypatch.setattr(experts, "route_tokens", watched)
    executor = Executor(random_weights(weights_of("experts").architecture), policy)
    for bias in executor.model.balance_biases.values():
        bias.copy_(torch.linspace(-0.2, 0.2, len(bias)))
    gradients(executor)
    forward, again = chosen[:2], chosen[2:]
    unit = derived_unit(scheme_of(weights_of("experts").architecture.structure, recompute=policy), "block")
    routes = any(step.operation.kind == "route" for step in unit.recompute_steps if hasattr(step, "operation"))
    assert (len(forward), len(again)) == (2, 2 * routes)
    assert all(torch.equal(first, recomputed) for first, recomputed in zip(forward, reversed(again), strict=False))
    assert not torch.equal(*forward)


@pytest.mark.parametrize("num_layers", [1, 2, None])
def test_only_the_first_layers_are_recomputed(num_layers: int | None) -> None:
    weights, expected = weights_of("dense"), SMALL["num_layers"] if num_layers is None else num_layers
    assert len(run_again(weights, "full", num_layers)) == expected
    executor = Executor(weights, "full", num_layers=num_layers)
    passes = executor.model.forward(batch_of(IDS, TARGETS), IDS.numel(), trains=True)
    kept = [sum(isinstance(value, Tensor) for value in slot) for slot in list(passes.slots.values())[1:-1]]
    assert kept == sorted(kept)
    assert len(set(kept)) == (1 if expected == SMALL["num_layers"] else 2)


def test_without_gradients_nothing_is_run_again_or_held() -> None:
    weights, operations = weights_of("dense"), Operations()
    executor = Executor(weights, "selective", recomputing=operations.clock)
    passes = executor.model.forward(batch_of(IDS, TARGETS), IDS.numel(), trains=False)
    torch.testing.assert_close(passes.loss, Executor(weights).train(IDS, TARGETS, IDS.numel()), rtol=1e-14, atol=0)
    assert not passes.slots
    assert not operations.slices
    assert not executor.gradients.computed


def test_the_policy_none_runs_nothing_again() -> None:
    assert run_again(weights_of("dense"), "none") == []


class Ticks(TorchDispatchMode):
    """A clock that goes on by a second for each kernel of attention, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.now += 1.0 if "scaled_dot_product" in func.overloadpacket.__name__ else 0.0
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("policy", "num_layers", "again"), [("full", 2, 2.0), ("full", None, 3.0), ("none", None, None)]
)
def test_the_seconds_of_what_is_run_again_are_added_up(
    policy: str, num_layers: int | None, again: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the trainer's step, and are none of its backward pass's."""
    ticks = Ticks()
    monkeypatch.setattr("shardwise.run.step_clock.time", ticks)
    layout = Layout(micro_batch_seqs=len(IDS), recompute=policy, recompute_layers=num_layers)
    architecture = weights_of("dense").architecture
    instance = RankProgram(architecture=architecture, layout=layout, precision=get_precision("fp32"))
    engine = TrainingEngine(instance, TrainingRecipe(steps=1), World(instance.mesh))
    engine.initialize(0)
    engine.clock.begin()
    with ticks:
        engine.step([MicroBatch(IDS, TARGETS)], IDS.numel(), 1, 0)
    seconds = engine.clock.end()
    assert seconds.get("recompute") == again
    assert (seconds["forward"], seconds["backward"]) == (3.0, 3.0)
