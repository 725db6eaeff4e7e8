"""Passes of a step captured and replayed: when, how often, and with the results of a step issued operation by
operation. The graph here records the operations that PyTorch dispatches and repeats them on their tensors: like a CUDA
graph it runs no Python, and cannot record an operation whose result the host reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.hardware import load_cluster, with_calibration
from shardwise.layout.layout import Layout
from shardwise.model import Architecture, load_model
from shardwise.model.job import Job
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.kernels import experts
from shardwise.run.parallel.world import World
from shardwise.run.recipe import BalanceMethod, TrainingRecipe
from shardwise.run.trainer.engine_prediction import issue_policy
from shardwise.run.trainer.step_graph import (
    MOST_CAPTURES,
    WARM_UPS,
    GraphedPasses,
    PassLoad,
    find_obstacle,
    predict_load,
)
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.search.plan import plan_layout
from shardwise.step.rank_program import RankProgram
from shardwise.values.precision import get_precision

CUDA = torch.device("cuda")
NARROW = ("fp8_torchao_rowwise", "fp8_current", "fp8_delayed", "fp8_deepseek_v3", "mxfp8")
SEQ_LEN = 16


def small_model(**changes: Any) -> Any:
    sizes = {
        "num_layers": 2, "d_model": 32, "d_ff": 48, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 64
    }  # fmt: skip
    return replace(load_model("llama-3.2-1b"), **{**sizes, **changes})


def program(
    precision: str = "fp32", layout: Layout | None = None, architecture: Architecture | None = None
) -> RankProgram:
    return RankProgram(
        architecture=architecture or small_model(),
        layout=layout or Layout(micro_batch_seqs=2),
        precision=get_precision(precision),
    )


class RecordedGraph(TorchDispatchMode):
    """Operations of PyTorch as they were dispatched, with the tensors that they read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def capture(self, work: Callable[[], list[Tensor]]) -> list[Tensor]:
        with self:
            return work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ != "_local_scalar_dense", "the host reads a result of the device"
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.operations:
            again = func(*args, **kwargs)
            pairs = zip(flat(result), flat(again), strict=True)
            for recorded, repeated in pairs:
                if recorded.data_ptr() != repeated.data_ptr():  # views and operations in place are there already
                    recorded.copy_(repeated)


def flat(result: Any) -> list[Tensor]:
    if isinstance(result, (tuple, list)):
        return [tensor for part in result for tensor in flat(part)]
    return [result] if isinstance(result, Tensor) else []


def batches(step: int, num_seqs: int = 2) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(64, (2, num_seqs, SEQ_LEN + 1), generator=generator)
    return [MicroBatch(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in ids]


def train(
    graphed: GraphedPasses | None, steps: int = 6, eager_step: int | None = None, precision: str = "fp32"
) -> tuple[list[float], list[Tensor]]:
    recipe = TrainingRecipe(steps=steps, schedule="constant", learning_rate=1e-2)
    instance = program(precision)
    engine = TrainingEngine(instance, recipe, World(instance.mesh, "cpu"))
    engine.graphed = graphed
    engine.initialize(0)
    losses = []
    for step in range(steps):
        with engine.eager_passes() if step == eager_step else nullcontext():
            losses.append(float(engine.step(batches(step), 4 * SEQ_LEN, 2, step).loss))
    return losses, [group.weights.clone() for group in engine.groups]


def test_replayed_steps_train_as_issued_ones_do() -> None:
    """Bit by bit, with another batch in each step, and a step that an observer sees between two replays."""
    graphed = GraphedPasses(make_graph=RecordedGraph)
    losses, weights = train(graphed, eager_step=4)
    assert (graphed.num_captures, graphed.num_replays) == (1, 6 - WARM_UPS - 1)
    expected, expected_weights = train(None)
    assert losses == expected
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, expected_weights, strict=True))


@pytest.mark.parametrize("precision", NARROW)
def test_replayed_steps_of_narrow_products_train_as_issued_ones_do(precision: str) -> None:
    """Scales are computed on the device: those of each operand in its cast, delayed ones from what earlier steps wrote."""
    graphed = GraphedPasses(make_graph=RecordedGraph)
    losses, weights = train(graphed, precision=precision)
    assert (graphed.num_captures, graphed.num_replays) == (1, 6 - WARM_UPS)
    expected, expected_weights = train(None, precision=precision)
    assert losses == expected
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, expected_weights, strict=True))


EXPERTS = {"num_experts": 4, "experts_per_token": 2}


@pytest.mark.parametrize("balance", ["auxiliary", "bias", "none"])
def test_replayed_steps_of_experts_count_rows_as_issued_ones_do(
    balance: BalanceMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 with grouped products, as on a GPU: weights, biases of the routers, the auxiliary loss and the imbalance."""
    monkeypatch.setattr(experts, "has_grouped_kernel", lambda rows, weight: True)
    recipe = TrainingRecipe(steps=6, schedule="constant", learning_rate=1e-2, balance=balance, balance_rate=0.05)
    instance = RankProgram(
        architecture=small_model(**EXPERTS), layout=Layout(micro_batch_seqs=2), precision=get_precision("bf16"),
        policy=issue_policy(recipe, routed=True),
    )  # fmt: skip
    assert find_obstacle(instance, recipe, CUDA) is None

    def train_experts(graphed: GraphedPasses | None) -> tuple[list[Any], list[Tensor]]:
        engine = TrainingEngine(instance, recipe, World(instance.mesh, "cpu"))
        engine.graphed = graphed
        engine.initialize(0)
        log: list[Any] = []
        for step in range(6):
            loss = float(engine.step(batches(step), 4 * SEQ_LEN, 2, step).loss)
            auxiliary = engine.balancer.loss
            log.append((loss, engine.balancer.imbalance, None if auxiliary is None else float(auxiliary)))
        return log, [*(group.weights.clone() for group in engine.groups), *engine.balancer.biases.values()]

    graphed = GraphedPasses(make_graph=RecordedGraph)
    log, state = train_experts(graphed)
    assert (graphed.num_captures, graphed.num_replays) == (1, 6 - WARM_UPS)
    expected_log, expected_state = train_experts(None)
    assert log == expected_log
    assert len({imbalance for _, imbalance, _ in log}) > 1
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(state, expected_state, strict=True))


class CountedGraph:
    """Graph that counts what is asked of it."""

    log: list[str]

    def capture(self, work: Callable[[], list[Tensor]]) -> list[Tensor]:
        self.log.append("capture")
        return work()

    def replay(self) -> None:
        self.log.append("replay")


def run_shapes(shapes: Sequence[int]) -> tuple[list[str], GraphedPasses]:
    """The log of steps with so many sequences each."""
    log: list[str] = []

    def make_graph() -> CountedGraph:
        graph = CountedGraph()
        graph.log = log
        return graph

    def passes(micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        if not log or log[-1] != "capture":
            log.append("eager")
        return [torch.zeros(())]

    graphed = GraphedPasses(make_graph=make_graph)
    for num_seqs in shapes:
        graphed.run(passes, batches(0, num_seqs), 100)
    return log, graphed


def test_two_steps_of_a_shape_are_issued_before_it_is_captured() -> None:
    log, graphed = run_shapes([2, 2, 2, 2, 2])
    assert log == ["eager", "eager", "capture", "replay", "replay", "replay"]
    assert graphed.obstacle is None


class RefusedGraph:
    """Graph whose capture fails halfway through the passes, as CUDA's does where the host waits."""

    def capture(self, work: Callable[[], list[Tensor]]) -> list[Tensor]:
        work()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    def replay(self) -> None:
        raise AssertionError("nothing was captured")


def test_a_capture_that_fails_leaves_steps_issued_as_usual() -> None:
    graphed = GraphedPasses(make_graph=RefusedGraph)
    losses, weights = train(graphed)
    assert graphed.obstacle == "the capture failed: operation not permitted when stream is capturing"
    expected, expected_weights = train(None)
    assert losses == expected
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, expected_weights, strict=True))


def test_another_shape_begins_anew_and_many_end_it() -> None:
    log, _ = run_shapes([2, 2, 2, 3, 3, 3])
    assert log == ["eager", "eager", "capture", "replay"] * 2
    log, graphed = run_shapes([2, 2, 2, 3, 3, 3] * MOST_CAPTURES)
    assert log.count("capture") == graphed.num_captures == MOST_CAPTURES
    assert log[-1] == "eager"
    assert graphed.obstacle == f"shapes of steps changed after {MOST_CAPTURES} graphs"


@pytest.mark.parametrize(
    ("instance", "recipe", "device", "obstacle"),
    [
        (program(), {}, CUDA, None),
        (program("bf16"), {}, CUDA, None),
        (program(), {}, torch.device("cpu"), "the device is no GPU"),
        (program("bf16", architecture=small_model(**EXPERTS)), {}, CUDA, None),
        (program("bf16", architecture=small_model(**EXPERTS)), {"capacity_factor": 1.0}, CUDA, "rows of each expert"),
        (program("fp32", architecture=small_model(**EXPERTS)), {}, CUDA, "rows of each expert"),
        (program("mxfp8", architecture=small_model(**EXPERTS)), {}, CUDA, "rows of each expert"),
        (program("bf16", architecture=small_model(**EXPERTS, d_ff=50)), {}, CUDA, "rows of each expert"),
        (program(layout=Layout(dp=2, micro_batch_seqs=2)), {}, CUDA, "several ranks"),
        (program("fp16"), {}, CUDA, "loss scale"),
        *((program(name), {}, CUDA, None) for name in NARROW),
        (program(), {"respect_documents": True}, CUDA, "masks of documents"),
        (program(), {"noise_scale_every": 5}, CUDA, "noise scale"),
    ],
)
def test_steps_that_cannot_be_captured_have_a_reason(
    instance: RankProgram, recipe: dict[str, Any], device: torch.device, obstacle: str | None
) -> None:
    reason = find_obstacle(instance, TrainingRecipe(steps=10, **recipe), device)
    assert reason is None if obstacle is None else obstacle in str(reason)


def test_launches_bound_small_models_and_not_large_ones() -> None:
    """On one H100 under the engine's constants: two layers 32 wide, and Llama 3.2 1B at 4,096 tokens."""
    cluster = load_cluster("h100:1", stack="shardwise")
    small = plan_layout(
        small_model(), cluster, Job(global_batch_tokens=64, seq_len=16, precision="bf16"), Layout(micro_batch_seqs=2)
    )
    large = plan_layout(
        load_model("llama-3.2-1b"), cluster, Job(global_batch_tokens=8192, seq_len=4096, precision="bf16"),
        Layout(micro_batch_seqs=2),
    )  # fmt: skip
    assert predict_load(small).is_launch_bound
    assert not predict_load(large).is_launch_bound
    assert not PassLoad(kernels_s=1.0, launches_s=1.0).is_launch_bound


def test_the_measured_time_of_the_host_decides_where_it_is_known() -> None:
    """A host that issues a kernel in 1 ms bounds the 1B model too, whose kernels take less; one that takes 1 us bounds nothing.
    Gaps between kernels then belong to the device."""
    cluster = load_cluster("h100:1", stack="shardwise")
    assert cluster.calibration is not None
    job = Job(global_batch_tokens=8192, seq_len=4096, precision="bf16")
    loads = {}
    for host_s in (None, 1e-6, 1e-3):
        measured = {} if host_s is None else {"host_s": host_s}
        constants = {**cluster.calibration.constants, **measured}
        known = with_calibration(cluster, replace(cluster.calibration, constants=constants))
        plan = plan_layout(load_model("llama-3.2-1b"), known, job, Layout(micro_batch_seqs=2))
        loads[host_s] = predict_load(plan), plan.estimate.step_time_s
    gaps_s = loads[None][0].launches_s
    assert loads[1e-6][0].kernels_s == pytest.approx(loads[None][0].kernels_s + gaps_s)
    num_kernels = gaps_s / cluster.calibration["launch_s"]
    assert [load.launches_s for load, _ in (loads[1e-6], loads[1e-3])] == pytest.approx(
        [1e-6 * num_kernels, 1e-3 * num_kernels]
    )
    assert [load.is_launch_bound for load, _ in loads.values()] == [False, False, True]
    assert loads[1e-6][1] == loads[None][1]
    assert loads[1e-3][1] > 1.2 * loads[None][1], "the price has the same rule"
