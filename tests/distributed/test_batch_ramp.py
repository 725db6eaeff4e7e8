"""A run whose batch changes is the same on every layout, and after a restart, in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from training import FP64, MODELS

from shardwise.batch_size.batch_schedule import BatchRamp
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.run.checkpoints import Checkpointer
from shardwise.run.data.batches import Batches
from shardwise.run.data.corpus_writer import write_corpus
from shardwise.run.data.documents import find_text_files
from shardwise.run.data.token_shard_reader import TokenShards
from shardwise.run.parallel.world import World
from shardwise.run.rank_threads import run_rank_threads
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.engine_prediction import engine_instance
from shardwise.run.trainer.trainer import Trainer
from shardwise.search.plan import Plan, plan_layout
from shardwise.values.precision import PRECISIONS

SEQ_LEN, VOCABULARY, NUM_STEPS = 8, 281, 6
RAMP = BatchRamp(((0, 4), (2, 8), (4, 16)))  # of micro-batches of 1: 4, 8 and 16 of them, or 2, 4 and 8 of two replicas
LAYOUTS = {
    "dp=2": Layout(dp=2),
    "zero-2 of 2": Layout(fsdp=2, zero_stage=2, micro_batch_seqs=2),
    "zero-3 of 4, short": Layout(fsdp=4, zero_stage=3, micro_batch_seqs=3),
    "tp=2": Layout(tp=2, sequence_parallel=True, micro_batch_seqs=4),
    "pp=2 interleaved": Layout(pp=2, num_virtual_stages=2, schedule="interleaved"),
    "pp=2 zb_h1": Layout(pp=2, schedule="zb_h1", micro_batch_seqs=2),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = tmp_path_factory.mktemp("text")
    for number in range(12):
        (text / f"{number}.txt").write_text(f"{number} green bottles hanging on the wall, and {number * 7} more. " * 4)
    folder = tmp_path_factory.mktemp("data") / "tokens"
    write_corpus(find_text_files([text]), folder, vocab_size=VOCABULARY)
    return folder


@pytest.fixture(autouse=True)
def _in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRECISIONS, "fp64", FP64)


def make_plan(layout: Layout) -> Plan:
    job = Job(global_batch_tokens=16 * SEQ_LEN, seq_len=SEQ_LEN, precision="fp32")
    architecture = replace(MODELS["tied"], vocab_size=VOCABULARY)
    plan = plan_layout(architecture, load_cluster(f"local:{layout.num_devices}"), job, layout)
    return replace(plan, job=replace(job, precision="fp64"))


def trainer_of(plan: Plan, data: Path) -> Trainer:
    recipe = TrainingRecipe(steps=NUM_STEPS, learning_rate=1e-2, seed=3, batch_lr="sqrt")
    batches = Batches(TokenShards(data), seq_len=SEQ_LEN, batch=RAMP, seed=recipe.seed)
    return Trainer(plan, recipe, batches, World(engine_instance(plan, recipe).mesh))


def train_steps(plan: Plan, data: Path, folder: Path, first: int, last: int) -> list[tuple[int, float, float, float]]:
    """Tokens, loss, norm and learning rate of the steps up to `last`, of a run that goes on behind step `first`."""
    PRECISIONS["fp64"] = FP64
    trainer = trainer_of(plan, data)
    with Checkpointer(folder, keep=1) as checkpoints:
        if first:
            path = checkpoints.latest()
            assert path is not None
            trainer.restore(checkpoints.load(path, trainer.state()))
        records = [trainer.train_step() for _ in range(first, last)]
        checkpoints.save(trainer.step, trainer.state())
    return [(record.num_tokens, record.loss, record.grad_norm, record.learning_rate) for record in records]


@pytest.fixture(scope="module")
def single_process(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float, float]]:
    """Run one process without a restart."""
    PRECISIONS["fp64"] = FP64
    try:
        return train_steps(make_plan(Layout(micro_batch_seqs=16)), data, tmp_path_factory.mktemp("alone"), 0, NUM_STEPS)
    finally:
        del PRECISIONS["fp64"]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("before", "after"), [("dp=2", "pp=2 interleaved"), ("pp=2 zb_h1", "zero-3 of 4, short"),
                                               ("pp=2 interleaved", "tp=2"), ("zero-2 of 2", "zero-2 of 2")])  # fmt: skip
@pytest.mark.parametrize("stop", [2, 3])
def test_a_ramp_is_the_same_on_every_layout_and_after_a_restart(
    before: str,
    after: str,
    stop: int,
    data: Path,
    tmp_path: Path,
    single_process: list[tuple[int, float, float, float]],
) -> None:
    plans = [make_plan(LAYOUTS[name]) for name in (before, after)]
    spans = [(0, stop), (stop, NUM_STEPS)]
    parts = [
        run_rank_threads(train_steps, plan.layout.num_devices, plan, data, tmp_path, *span)
        for plan, span in zip(plans, spans, strict=True)
    ]
    for part in parts:
        assert all(of_rank == part[0] for of_rank in part), "ranks agree to the last bit"
    steps = [step for part in parts for step in part[0]]
    assert [tokens for tokens, *_ in steps] == [seqs * SEQ_LEN for seqs in (4, 4, 8, 8, 16, 16)]
    for actual, expected in zip(steps, single_process, strict=True):
        assert actual[1] == pytest.approx(expected[1], rel=1e-12)
        assert actual[2] == pytest.approx(expected[2], rel=1e-10)
        assert actual[3] == expected[3]
