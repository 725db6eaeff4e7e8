"""Memory by term on several ranks whose parameters and gradients are views of flat arrays."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from executing import Executor, batch_of

from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.records.step_inspection import MeasuredMemory
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.engine.model_builder import initial_weights
from shardwise.run.parallel.world import World
from shardwise.run.rank_threads import run_rank_threads
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.step_inspector import MemoryTracker
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.step.rank_program import RankProgram
from shardwise.values import estimate_term_names
from shardwise.values.precision import get_precision

ARCHITECTURE = Architecture(
    name="small", num_layers=2, d_model=32, d_ff=49, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=65
)
IDS = torch.arange(32).view(2, 16)
LAYOUTS = {
    "dp=2": {"dp": 2},
    "zero-1 of 3": {"fsdp": 3, "zero_stage": 1},
    "zero-2 of 3": {"fsdp": 3, "zero_stage": 2},
    "zero-3 of 3": {"fsdp": 3, "zero_stage": 3},
}


def instance_of(layout: str, policy: str) -> RankProgram:
    shape = Layout(**LAYOUTS[layout], micro_batch_seqs=len(IDS), recompute=policy)
    return RankProgram(architecture=ARCHITECTURE, layout=shape, precision=get_precision("fp32"))


def step_of(layout: str, policy: str) -> MeasuredMemory:
    """Return the memory that a rank holds in a step."""
    instance = instance_of(layout, policy)
    engine = TrainingEngine(instance, TrainingRecipe(steps=1), World(instance.mesh))
    engine.initialize(0)
    tracker = MemoryTracker(ARCHITECTURE.vocab_size)
    for term, tensor in list(engine.stored_tensors()):
        tracker.name(term, [tensor])
    engine.observe(tracker.forward_ended, lambda whole: tracker.name(estimate_term_names.GATHERED, [whole]))
    with tracker:
        engine.step([MicroBatch(IDS, IDS)], instance.layout.num_replicas * IDS.numel(), 1, 0)
    return tracker.memory()


def single_device(policy: str) -> MeasuredMemory:
    """Return the memory of a step whose weights and gradients are tensors of their own."""
    executor = Executor(initial_weights(ARCHITECTURE, 0), policy)
    with MemoryTracker(ARCHITECTURE.vocab_size) as tracker:
        tracker.name(estimate_term_names.PARAMETERS, executor.weights.tensors.values())
        tracker.name(estimate_term_names.GRADIENTS, executor.gradients.tensors.values())
        passes = executor.model.forward(batch_of(IDS, IDS), IDS.numel(), trains=True)
        tracker.forward_ended()
        executor.model.backward(passes)
    return tracker.memory()


def resting_bytes(layout: str) -> Mapping[str, int]:
    """Bytes that rest: flat arrays count whole, with what pads them, and once however many views there are."""
    groups = instance_of(layout, "none").groups
    whole, shard = (4 * sum(sizes) for sizes in zip(*((g.padded_size, g.shard_size) for g in groups), strict=True))
    stage = LAYOUTS[layout].get("zero_stage", 0)
    return {"parameters": shard if stage >= 3 else whole, "gradients": shard if stage >= 2 else whole}


@pytest.mark.parametrize("policy", ["none", "selective"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flat_arrays_count_whole_and_once(layout: str, policy: str) -> None:
    single, resting, world_size = (
        single_device(policy),
        resting_bytes(layout),
        instance_of(layout, policy).layout.num_devices,
    )
    elements = sum(tensor.numel() for tensor in initial_weights(ARCHITECTURE, 0).tensors.values())
    assert single.largest["parameters"] == single.largest["gradients"] == 4 * elements
    ranks = run_rank_threads(step_of, world_size, layout, policy)
    for measured in ranks:
        assert {term: measured.largest[term] for term in resting} == resting
        assert measured.largest["logits"] == single.largest["logits"]
        assert measured.largest["activations"] == single.largest["activations"]
        assert (measured.largest["gathered"] > 0) == (layout != "dp=2")
    moments = sum(measured.largest["optimizer"] for measured in ranks)  # which have no padding
    assert moments == 2 * 4 * elements * (world_size if layout == "dp=2" else 1)


def test_cases_include_padded_arrays() -> None:
    """Otherwise it would not be tested that they count whole."""
    elements = sum(tensor.numel() for tensor in initial_weights(ARCHITECTURE, 0).tensors.values())
    assert resting_bytes("dp=2")["gradients"] >= 4 * elements
    assert resting_bytes("zero-1 of 3")["gradients"] > 4 * elements
