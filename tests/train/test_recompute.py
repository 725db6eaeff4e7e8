"""What is run again for the backward pass: the gradients are the same, and it is what the derivation says and no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.derive.derivation import derived_unit
from shardwise.layout.family import Family
from shardwise.model.architecture import Architecture
from shardwise.model.recompute import policy_names
from shardwise.train.clock import Clock
from shardwise.train.model import Decoder, block, build, initialise
from shardwise.train.recompute import recompute

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
    "experts": {**EXPERTS, "num_dense_layers": 1, "dense_d_ff": 7, "shared_expert_width": 3, "shared_gate": True},
    "biased experts": {**EXPERTS, "mlp": "clamped_swiglu", "bias": ("router", "experts")},
    "latent": {"num_kv_heads": 4, "kv_lora_rank": 5, "rope_head_dim": 2, "v_head_dim": 4, "q_lora_rank": 3},
    "sinks": {"sinks": True, "mlp": "geglu"},
    "adapters": {"lora_rank": 2, "lora_targets": ("qkv", "attention_out", "mlp")},
}
IDS, TARGETS = torch.randint(11, (2, 2, 7), generator=torch.Generator().manual_seed(0))


def made(structure: str) -> Decoder:
    model = build(Architecture(**{**SMALL, **STRUCTURES[structure]}), dtype=torch.float64)
    initialise(model, 0)
    return model


def gradients(model: Decoder) -> dict[str, Tensor]:
    model.zero_grad()
    model(IDS, TARGETS, IDS.numel()).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradients_are_those_without_recomputation(structure: str, policy: str) -> None:
    model = made(structure)
    wanted = gradients(model)
    recompute(model, policy)
    found = gradients(model)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-15)


class Operations(TorchDispatchMode):
    """Counts the operations of the slices that are run again."""

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
        kinds = {"mm": "contract", "addmm": "contract", "mv": "contract"}
        self.slices[-1][kinds.get(name, "scan" if "scaled_dot_product" in name else "other")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("structure", ["dense", "tied and biased", "gpt-2", "latent"])
def test_products_and_attention_are_run_again_as_derived(structure: str, policy: str) -> None:
    model, found = made(structure), Operations()
    recompute(model, policy, clock=found.clock)
    gradients(model)
    unit = derived_unit(model.architecture.structure, Family(0, False, policy), "block")
    wanted = Counter(step.operation.kind for step in unit.recompute_steps if hasattr(step, "operation"))
    assert len(found.slices) == SMALL["num_layers"]
    for one in found.slices:
        assert (one["contract"], one["scan"]) == (wanted["contract"], wanted["scan"])


@pytest.mark.parametrize("bias", [(), ("router", "experts")])
@pytest.mark.parametrize(("policy", "products"), [("selective", 0), ("full", 5 + 2 * 5)])
def test_the_products_of_experts_are_kept(policy: str, products: int, bias: tuple[str, ...]) -> None:
    """Run again by `full`: queries, keys, values, attention's output, the router, and up and gate of five experts."""
    model, found = build(Architecture(**{**SMALL, **EXPERTS}, bias=bias), dtype=torch.float64), Operations()
    initialise(model, 0)
    recompute(model, policy, clock=found.clock)
    gradients(model)
    down = 5 if policy == "full" else 0  # what came back from the experts is read again, so all of it is made
    assert [one["contract"] for one in found.slices] == [products + down] * SMALL["num_layers"]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_router_chooses_alike(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Tensor] = []
    route = block.route

    def watched(*operands: Any, **options: Any) -> Any:
        routing = route(*operands, **options)
        chosen.append(routing.choices.clone())
        return routing

    monkeypatch.setattr(block, "route", watched)
    model = made("experts")
    recompute(model, policy)
    gradients(model)
    forward, again = chosen[:2], chosen[2:]
    assert len(again) == len(forward) == 2
    assert all(torch.equal(one, other) for one, other in zip(forward, reversed(again), strict=True))
    assert not torch.equal(*forward)


@pytest.mark.parametrize("num_layers", [1, 2, None])
def test_the_first_layers_alone_are_run_again(num_layers: int | None) -> None:
    model, found = made("dense"), Operations()
    recompute(model, "full", num_layers, found.clock)
    gradients(model)
    assert len(found.slices) == (num_layers or SMALL["num_layers"])


def test_without_gradients_nothing_is_run_again() -> None:
    model, found = made("dense"), Operations()
    recompute(model, "selective", clock=found.clock)
    with torch.no_grad():
        loss = model(IDS, TARGETS, IDS.numel()).loss
    torch.testing.assert_close(loss, made("dense")(IDS, TARGETS, IDS.numel()).loss.detach(), rtol=1e-14, atol=0)
    assert not found.slices


def test_the_policy_none_changes_nothing() -> None:
    model = made("dense")
    recompute(model, "none")
    assert all(one.around is block.at_once for one in model.layers.values())


class Ticks:
    """A clock that goes on by a second for each run of a block's steps."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def counting(self, steps: Callable[..., Any]) -> Callable[..., Any]:
        def run(*operands: Any) -> Any:
            self.now += 1.0
            return steps(*operands)

        return run


def test_the_seconds_of_what_is_run_again_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks()
    monkeypatch.setattr("shardwise.train.clock.time", ticks)
    model, clock = made("dense"), Clock(torch.device("cpu"))
    for one in model.layers.values():
        monkeypatch.setattr(one, "steps", ticks.counting(one.steps))
    recompute(model, "selective", 2, lambda: clock("recompute"))
    clock.begin()
    loss = model(IDS, TARGETS, IDS.numel()).loss
    assert "recompute" not in clock.end()
    clock.begin()
    with clock("backward"):
        loss.backward()
        ticks.now += 5.0  # what else the backward pass takes
    found = clock.end()
    assert (found["recompute"], found["backward"]) == (2.0, 5.0)
