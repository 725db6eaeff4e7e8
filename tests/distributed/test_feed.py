"""Each rank reads, holds and copies only its own positions of a batch whose sequences are split over `cp`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from train.shard_files import write_shards
from training import MODELS

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.records.step_log import StepRecord
from shardwise.run.data.batches import Batches
from shardwise.run.data.sample_order import Int64s
from shardwise.run.data.token_shard_reader import TokenShards
from shardwise.run.parallel.world import World
from shardwise.run.rank_threads import run_rank_threads
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.engine_prediction import engine_instance
from shardwise.run.trainer.trainer import Trainer
from shardwise.search.plan import Plan, plan_layout

SEQ_LEN, SEQS, STEPS = 48, 4, 2
VOCABULARY = MODELS["dense"].vocab_size


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of one token to a few dozens."""
    folder, rng = tmp_path_factory.mktemp("data") / "tokens", np.random.default_rng(0)
    documents = [rng.integers(1, VOCABULARY, size).tolist() for size in rng.integers(1, 40, 40)]
    write_shards(folder, documents, vocab_size=VOCABULARY, shard_tokens=100)
    return folder


def make_plan(model: str, layout: Layout) -> Plan:
    job = Job(global_batch_tokens=SEQS * SEQ_LEN, seq_len=SEQ_LEN, precision="fp32")
    return plan_layout(MODELS[model], load_cluster(f"local:{layout.num_devices}"), job, layout)


def train_steps(plan: Plan, data: Path) -> tuple[list[StepRecord], int, int]:
    """The steps of a run; the tokens that this rank reads from the shards for one, and the bytes that wait on its host."""
    count, read = [0], TokenShards.tokens

    def counted(self: TokenShards, start: int, stop: int) -> Int64s:
        count[0] += stop - start
        return read(self, start, stop)

    recipe = TrainingRecipe(steps=STEPS, learning_rate=1e-2, seed=3, balance="none", respect_documents=True)
    batches = Batches(TokenShards(data), seq_len=SEQ_LEN, batch=SEQS, seed=3, ignore_boundaries=True)
    trainer = Trainer(plan, recipe, batches, World(engine_instance(plan, recipe).mesh))
    records = [trainer.train_step() for _ in range(STEPS)]
    TokenShards.tokens = counted  # type: ignore[method-assign]
    try:
        host_batches = list(trainer.loader.on_host(batches, 0))
    finally:
        TokenShards.tokens = read  # type: ignore[method-assign]
    tensors = [tensor for batch in host_batches for tensor in (batch.ids_BT, batch.targets_BT)]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors), "no view of more"
    assert all(batch.to(torch.device("cpu")).documents_BT is not None for batch in host_batches)
    return records, count[0], sum(tensor.nbytes for tensor in tensors)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("model", "layout", "runs"),
    [
        ("dense", Layout(cp=2, cp_variant="all_gather", micro_batch_seqs=2), 2),
        ("dense", Layout(cp=4, cp_variant="zigzag", micro_batch_seqs=4), 2),
        ("dense", Layout(cp=2, cp_variant="ulysses", micro_batch_seqs=4), 2),
        ("predicting", Layout(cp=4, cp_variant="ring", micro_batch_seqs=2), 1),
        ("predicting", Layout(cp=2, tp=2, sequence_parallel=True, cp_variant="zigzag", micro_batch_seqs=2), 2),
        ("tied predicting", Layout(cp=2, dp=2, cp_variant="zigzag", micro_batch_seqs=2), 2),
        ("predicting", Layout(cp=2, pp=2, schedule="1f1b", cp_variant="all_gather", micro_batch_seqs=2), 2),
    ],
    ids=str,
)
def test_a_rank_reads_its_own_positions(model: str, layout: Layout, runs: int, data: Path) -> None:
    """And the run is that of one process: losses, those of further tokens among them, and norms."""
    ((expected, all_read, all_bytes),) = run_rank_threads(
        train_steps, 1, make_plan(model, Layout(micro_batch_seqs=SEQS)), data
    )
    further = MODELS[model].num_predict_layers
    assert (all_read, all_bytes) == (SEQS * (SEQ_LEN + 1), 2 * 8 * SEQS * SEQ_LEN)
    seqs = SEQS // layout.num_replicas
    for records, read, num_bytes in run_rank_threads(train_steps, layout.num_devices, make_plan(model, layout), data):
        beyond = runs * further  # places behind each run from which further tokens are predicted
        positions = SEQ_LEN // layout.cp
        assert seqs * positions < read <= seqs * (positions + beyond + runs), (
            "a share of 1/cp, and what is beyond each cut"
        )
        assert num_bytes <= 2 * 8 * seqs * (positions + beyond)
        for actual, reference in zip(records, expected, strict=True):
            assert actual.loss == pytest.approx(reference.loss, rel=1e-5)
            assert actual.grad_norm == pytest.approx(reference.grad_norm, rel=1e-4)
            assert (actual.prediction_loss is None) == (further == 0)
            assert actual.prediction_loss == (
                reference.prediction_loss and pytest.approx(reference.prediction_loss, rel=1e-5)
            )
            assert actual.num_targets == reference.num_targets < SEQS * SEQ_LEN
