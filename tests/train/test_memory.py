"""A step of the engine holds the memory that a plan predicts, by term."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from executing import Executor, batch_of

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.optimizers.definition import get_optimizer, optimizer_names
from shardwise.records.step_inspection import MeasuredMemory
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.engine.model_builder import initial_weights
from shardwise.run.parallel.flat_parameters import FlatParameterGroup
from shardwise.run.parallel.world import World
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.step_inspector import MemoryTracker, StorageRecorder, inspect_step, process_memory
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.search.plan import Plan, plan_layout
from shardwise.step.rank_program import RankProgram
from shardwise.values import estimate_term_names
from shardwise.values.precision import get_precision

TOLERANCE = 0.05
OF_PEAK = 0.003  # shared by layers: angles, masks, ids
SMALL: dict[str, Any] = {
    "name": "small", "num_layers": 4, "d_model": 128, "d_ff": 344, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32,
    "vocab_size": 2048,
}  # fmt: skip
SHAPES: dict[str, tuple[dict[str, Any], int, int]] = {  # with positions and sequences of a micro-batch
    "small": ({}, 256, 2),
    "deep": ({"num_layers": 8, "num_kv_heads": 4}, 512, 1),
    "wide": ({"num_layers": 2, "d_model": 256, "d_ff": 688, "num_heads": 8, "vocab_size": 8192}, 128, 4),
    "experts": ({"num_experts": 4, "experts_per_token": 2}, 256, 2),
    "predicting": ({"num_predict_layers": 1}, 256, 2),
    "predicting further": ({"num_predict_layers": 3, "num_layers": 2, "vocab_size": 1024}, 256, 4),
}
# Of few words, so that the peak is in a block.
FEW_WORDS: dict[str, tuple[dict[str, Any], int, int]] = {
    "equal": ({"vocab_size": 48}, 256, 2),
    "fat": ({"vocab_size": 48, "d_ff": 1024}, 256, 2),
    "long": (
        {"vocab_size": 48, "num_layers": 8, "d_model": 64, "d_ff": 176, "num_heads": 2, "num_kv_heads": 1},
        512,
        1,
    ),
    "few words, predicting": ({"vocab_size": 48, "num_predict_layers": 1}, 256, 2),
    "few words, predicting further": ({"vocab_size": 48, "num_predict_layers": 2, "num_layers": 2}, 256, 2),
}
# Whose matrices are blocks of 256 elements, with sides that are soon done.
BLOCKS: dict[str, tuple[dict[str, Any], int, int]] = {
    "blocks": ({"num_layers": 2, "d_model": 256, "d_ff": 256, "num_heads": 8, "num_kv_heads": 4}, 256, 2),
}
POLICIES = ("none", "selective", "full")


def shape(name: str) -> tuple[Architecture, int, int]:
    changed, num_positions, num_seqs = {**SHAPES, **FEW_WORDS, **BLOCKS}[name]
    return Architecture(**{**SMALL, **changed}), num_positions, num_seqs


def planned_memory(name: str, policy: str, precision: str, optimizer: str = "adamw") -> Mapping[str, float]:
    """Return the planned memory by term for one device."""
    return plan_of(name, policy, precision, optimizer).estimate.memory


def plan_of(name: str, policy: str, precision: str, optimizer: str = "adamw") -> Plan:
    """Return a plan for one device."""
    architecture, num_positions, num_seqs = shape(name)
    cluster = load_cluster("cpu:1")
    peak = cluster.chip.peak_flops_per_s["fp32"]
    cluster = replace(cluster, chip=replace(cluster.chip, peak_flops_per_s={"fp32": peak, "bf16": peak}))
    tokens = num_positions * num_seqs
    job = Job(
        global_batch_tokens=tokens, seq_len=num_positions, precision=precision, loss="in_place", optimizer=optimizer
    )
    layout = Layout(micro_batch_seqs=num_seqs, recompute=policy)
    return plan_layout(architecture, cluster, job, layout)


def measure_step(name: str, policy: str, dtype: torch.dtype, *, updated: bool) -> MeasuredMemory:
    """Measure a step whose gradients and optimizer state exist before it; with `updated` it ends in an update."""
    architecture, num_positions, num_seqs = shape(name)
    executor = Executor(initial_weights(architecture, 0, dtype), policy)
    ids = torch.randint(architecture.vocab_size, (num_seqs, num_positions), generator=torch.Generator().manual_seed(0))
    parameters = [torch.nn.Parameter(tensor) for tensor in executor.weights.tensors.values()]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for parameter, gradient in zip(parameters, executor.gradients.tensors.values(), strict=True):
        parameter.grad = gradient.zero_()
    if updated:
        optimizer.step()
    with MemoryTracker(architecture.vocab_size) as tracker:
        tracker.name(estimate_term_names.PARAMETERS, executor.weights.tensors.values())
        tracker.name(estimate_term_names.GRADIENTS, executor.gradients.tensors.values())
        tracker.name(
            estimate_term_names.OPTIMIZER, (moment for state in optimizer.state.values() for moment in state.values())
        )
        passes = executor.model.forward(batch_of(ids, ids), ids.numel(), trains=True)
        tracker.forward_ended()
        executor.model.backward(passes)
        if updated:
            optimizer.step()
    return tracker.memory()


@pytest.mark.thinned(4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SHAPES)
def test_in_fp32_a_step_holds_what_is_planned(name: str, policy: str) -> None:
    plan, memory = planned_memory(name, policy, "fp32"), measure_step(name, policy, torch.float32, updated=True)
    for term in ("parameters", "gradients", "optimizer", "activations"):
        assert memory.largest[term] == pytest.approx(plan[term], rel=TOLERANCE), term
    assert memory.peak_bytes == sum(memory.at_peak.values())
    assert memory.peak_bytes == pytest.approx(sum(plan.values()), rel=OF_PEAK)
    assert (memory.at_peak["logits"] > 0) == (plan["logits"] > 0)
    if plan["logits"]:  # the peak is at the loss
        assert memory.largest["logits"] == pytest.approx(plan["logits"], rel=TOLERANCE)
        assert memory.at_peak["workspace"] == pytest.approx(plan["workspace"], rel=0.01)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Switch Python's cycle collector off, so that a step's memory does not depend on when it runs."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("optimizer", optimizer_names())
def test_a_step_of_the_engine_holds_the_moments_that_are_planned(optimizer: str) -> None:
    """Two of AdamW, one of Lion, of Muon one of matrices, of Adafactor rows and columns, of AdamW in 8 bits a byte of each and a
    scale of every 256, of Shampoo squares of rows and columns; what formulas make on their way is gone again before the peak."""
    architecture, num_positions, num_seqs = shape("blocks")
    plan = planned_memory("blocks", "none", "fp32", optimizer)
    layout = Layout(micro_batch_seqs=num_seqs)
    instance = RankProgram(
        architecture=architecture, layout=layout, precision=get_precision("fp32"), optimizer=optimizer
    )
    engine = TrainingEngine(instance, TrainingRecipe(steps=2), World(instance.mesh))
    engine.initialize(0)
    ids = torch.randint(architecture.vocab_size, (num_seqs, num_positions), generator=torch.Generator().manual_seed(0))
    with MemoryTracker(architecture.vocab_size) as tracker:
        for term, tensor in list(engine.stored_tensors()):
            tracker.name(term, [tensor])
        engine.observe(tracker.forward_ended, lambda whole: tracker.name(estimate_term_names.GATHERED, [whole]))
        engine.step([MicroBatch(ids, ids)], ids.numel(), 1, 0)
    memory = tracker.memory()
    described, matrices = get_optimizer(optimizer), 2 * (256 * 32 * 24 + 3 * 256 * 256)  # of two blocks: attention, MLP
    num_other_elements = plan["parameters"] / 4 - matrices
    expected = 4 * (
        len(described.moments) * matrices + len(described.for_weight(is_matrix=False).moments) * num_other_elements
    )
    if described.max_preconditioned_side:  # squares of both sides of each matrix, each with its root
        sides = 2 * [256, 256] + 2 * [128, 256] + 3 * [256, 256]
        expected = 4 * (matrices + 2 * num_other_elements + 2 * 2 * sum(side**2 for side in sides))
    if described.reduces_means:
        expected = 4 * (2 * (3 * 256 + 2 * 256 + 2 * 128 + 7 * 256) + 2 * (2048 + 256) + 5 * 256)  # the last are norms
    if described.block > 1:
        expected = 2 * (matrices + 2 * 2048 * 256) * (1 + 4 / 256) + 8 * 5 * 256
    assert memory.largest["optimizer"] == plan["optimizer"] == expected
    for term in ("parameters", "gradients", "activations"):
        assert memory.largest[term] == pytest.approx(plan[term], rel=TOLERANCE), term
    assert memory.peak_bytes == pytest.approx(sum(plan.values()), rel=0.01)


@pytest.mark.usefixtures("uncollected")
def test_an_inspected_step_counts_what_was_made_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `train` too, where a second copy of all gradients was seen only if the step read it."""
    build, copies = FlatParameterGroup._make_gradients, list[torch.Tensor]()

    def build_twice(self: FlatParameterGroup) -> None:
        build(self)
        copies.append(self.gradients.clone())

    monkeypatch.setattr(FlatParameterGroup, "_make_gradients", build_twice)
    architecture, num_positions, num_seqs = shape("small")
    instance = RankProgram(
        architecture=architecture, layout=Layout(micro_batch_seqs=num_seqs), precision=get_precision("fp32")
    )
    with StorageRecorder() as constructed:
        engine = TrainingEngine(instance, TrainingRecipe(steps=2), World(instance.mesh))
    engine.initialize(0)
    ids = torch.randint(architecture.vocab_size, (num_seqs, num_positions), generator=torch.Generator().manual_seed(0))
    with inspect_step(engine, constructed) as inspector:
        engine.step([MicroBatch(ids, ids)], ids.numel(), 1, 0)
    memory = inspector.inspection.memory
    assert memory.undeclared_bytes == sum(copy.nbytes for copy in copies) == memory.largest["gradients"]
    assert memory.at_peak["inputs"] > memory.undeclared_bytes
    assert memory.peak_bytes == sum(memory.at_peak.values())


@pytest.mark.thinned(4)
@pytest.mark.parametrize("share", [0.8, 0.5, 0.3])
@pytest.mark.parametrize("name", ["small", "deep", "wide", "experts", "equal", "fat"])
def test_a_step_under_a_budget_holds_what_is_planned(name: str, share: float) -> None:
    """A budget keeps a share of what could be kept, and no more."""
    smallest, largest = (planned_memory(name, policy, "fp32")["activations"] for policy in ("full", "none"))
    budget = smallest + share * (largest - smallest)
    plan = plan_of(name, f"budget:{budget / 1e6:.6f}MB", "fp32")
    terms, memory = plan.estimate.memory, measure_step(name, plan.layout.recompute, torch.float32, updated=True)
    assert smallest < terms["activations"] <= budget
    assert memory.largest["activations"] == pytest.approx(terms["activations"], rel=0.02)
    assert memory.peak_bytes == pytest.approx(sum(terms.values()), rel=0.02)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FEW_WORDS)
def test_a_block_that_runs_backward_holds_what_is_alive(name: str, policy: str) -> None:
    plan, memory = planned_memory(name, policy, "fp32"), measure_step(name, policy, torch.float32, updated=True)
    named_bytes = sum(memory.largest[term] for term in ("parameters", "gradients", "optimizer", "activations"))
    assert memory.at_peak["logits"] == plan["logits"]  # of modules of multi-token prediction that have not run backward
    assert memory.peak_bytes - named_bytes == pytest.approx(plan["workspace"] + plan["logits"], rel=0.015)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("policy", ["none", "full"])
def test_in_bf16_a_step_holds_what_is_planned(policy: str) -> None:
    plan, memory = planned_memory("wide", policy, "bf16"), measure_step("wide", policy, torch.bfloat16, updated=False)
    for term in ("parameters", "gradients", "activations"):
        assert memory.largest[term] == pytest.approx(plan[term], rel=TOLERANCE), term
    if plan["logits"]:
        assert memory.largest["logits"] == pytest.approx(plan["logits"], rel=TOLERANCE)


def test_storages_count_once_and_while_they_live() -> None:
    with MemoryTracker(vocab_size=7) as tracker:
        flat = torch.zeros(100)
        views = [flat[:40].view(4, 10), flat[40:]]
        tracker.name(estimate_term_names.GRADIENTS, views)
        passing = torch.ones(50)
        logits = torch.ones(3, 7)
        del passing, flat
        tracker.forward_ended()
        del logits, views
        half = torch.zeros(10, dtype=torch.bfloat16)
        tracker.forward_ended()
        assert half.nbytes == 20
    memory = tracker.memory()
    assert memory.peak_bytes == 400 + 200 + 84
    assert memory.at_peak == {
        **dict.fromkeys(estimate_term_names.MEASURED_MEMORY_TERMS, 0),
        "gradients": 400,
        "workspace": 200,
        "logits": 84,
    }
    assert memory.largest["activations"] == 20


def test_storages_that_shrink_hold_less() -> None:
    with MemoryTracker(vocab_size=7) as tracker:
        flat = torch.zeros(100)
        tracker.name(estimate_term_names.GATHERED, [flat])
        flat.untyped_storage().resize_(0)
        tracker.name(estimate_term_names.GATHERED, [flat])
        newer = torch.zeros(60)
        flat.untyped_storage().resize_(400)
        flat.zero_()
        assert newer.nbytes == 240
    memory = tracker.memory()
    assert (memory.peak_bytes, memory.largest["gathered"]) == (640, 400)


def test_tensors_made_before_are_named_terms_or_inputs() -> None:
    weight, ids = torch.ones(5, 5), torch.zeros(3, dtype=torch.long)
    with MemoryTracker(vocab_size=7) as tracker:
        tracker.name(estimate_term_names.PARAMETERS, [weight])
        kept = weight[ids]
        tracker.forward_ended()
        assert kept.shape == (3, 5)
    largest = tracker.memory().largest
    assert (largest["parameters"], largest["inputs"], largest["activations"]) == (100, 24, 60)


def test_the_process_holds_at_least_what_it_touches() -> None:
    device = torch.device("cpu")
    before = process_memory(device)
    allocated = torch.ones(before.resident_bytes // 4 + 2**20)
    after = process_memory(device)
    assert after.resident_bytes >= allocated.nbytes
    assert after.allocated_bytes is after.reserved_bytes is None
