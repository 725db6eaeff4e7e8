"""A stopped run resumes on other ranks, degrees and ZeRO stages with the same results as an uninterrupted one."""

from __future__ import annotations

import gc
import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training import MODELS, gathered

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.interop.frameworks.huggingface_families import require_same_model
from shardwise.interop.weights import checkpoint_to_hf, load_hf, save_hf
from shardwise.interop.weights.convert import WEIGHT_FORMATS, ConvertOptions, open_stored_model
from shardwise.interop.weights.huggingface_folder import SafetensorsFolder, open_hf
from shardwise.interop.weights.megatron_rank_files import RankDegrees
from shardwise.interop.weights.stored_model import boxes_of_weights
from shardwise.interop.weights.stored_slices import WeightSource
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.numerics import Numerics, Rotary
from shardwise.records.step_log import StepRecord
from shardwise.run.checkpoints import Checkpointer, latest
from shardwise.run.checkpoints.reader import load_tensors
from shardwise.run.data.batches import Batches
from shardwise.run.data.corpus_writer import write_corpus
from shardwise.run.data.documents import find_text_files
from shardwise.run.data.token_shard_reader import TokenShards
from shardwise.run.engine.model_builder import initial_weights
from shardwise.run.parallel.world import World
from shardwise.run.rank_threads import run_rank_threads
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.engine_prediction import engine_instance
from shardwise.run.trainer.trainer import Trainer
from shardwise.search.plan import Plan, plan_layout
from shardwise.train import open_weights
from shardwise.values.boxes import Box
from shardwise.values.errors import InputError

SEQ_LEN, SEQS, VOCABULARY = 8, 6, 281  # words, which no tp divides
LAYOUTS = {
    "alone": Layout(micro_batch_seqs=6),
    "dp=2": Layout(dp=2, micro_batch_seqs=3),
    "zero-1 of 3": Layout(fsdp=3, zero_stage=1, micro_batch_seqs=2),
    "zero-2 of 2": Layout(fsdp=2, zero_stage=2, micro_batch_seqs=3),
    "hybrid zero-3 of 4": Layout(dp=2, fsdp=2, zero_stage=3),
    "tp=2 fsdp=2": Layout(tp=2, fsdp=2, zero_stage=3, sequence_parallel=True, micro_batch_seqs=3),
    "tp=2 cp=2": Layout(tp=2, cp=2, cp_variant="zigzag", sequence_parallel=True, micro_batch_seqs=6),
    "tp=4": Layout(tp=4, micro_batch_seqs=6),
    "pp=2 zb_v": Layout(pp=2, num_virtual_stages=2, schedule="zb_v"),
    "pp=2 dualpipe_v": Layout(pp=2, num_virtual_stages=2, schedule="dualpipe_v"),
    "pp=2 interleaved_zb": Layout(pp=2, num_virtual_stages=2, schedule="interleaved_zb"),
    "pp=3": Layout(pp=3, schedule="1f1b", micro_batch_seqs=2),
    "ep=2 tp=2": Layout(fsdp=2, ep=2, tp=2, zero_stage=1, micro_batch_seqs=3),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = tmp_path_factory.mktemp("text")
    for number in range(12):
        (text / f"{number}.txt").write_text(f"{number} green bottles hanging on the wall, and {number * 7} more. " * 4)
    folder = tmp_path_factory.mktemp("data") / "tokens"
    write_corpus(find_text_files([text]), folder, vocab_size=VOCABULARY)
    return folder


def make_plan(layout: Layout, model: str, optimizer: str = "adamw") -> Plan:
    job = Job(global_batch_tokens=SEQS * SEQ_LEN, seq_len=SEQ_LEN, precision="fp32", optimizer=optimizer)
    architecture = replace(MODELS[model], vocab_size=VOCABULARY)
    return plan_layout(architecture, load_cluster(f"local:{layout.num_devices}"), job, layout)


def trainer_of(plan: Plan, data: Path, initial: str | None = None) -> Trainer:
    recipe = TrainingRecipe(steps=6, learning_rate=1e-2, seed=3, balance="bias", balance_rate=0.01, initial=initial)
    batches = Batches(TokenShards(data), seq_len=SEQ_LEN, batch=SEQS, seed=recipe.seed)
    return Trainer(plan, recipe, batches, World(engine_instance(plan, recipe).mesh), open_weights)


def train_and_save(plan: Plan, data: Path, folder: Path) -> list[StepRecord]:
    """Run three steps, save a checkpoint, and run two more."""
    trainer = trainer_of(plan, data)
    for _ in range(3):
        trainer.train_step()
    with Checkpointer(folder, keep=1) as checkpoints:
        checkpoints.start(trainer.step, trainer.state())
        return [trainer.train_step() for _ in range(2)]


def resume_run(plan: Plan, data: Path, folder: Path) -> list[StepRecord]:
    """Run the two steps after the checkpoint."""
    trainer = trainer_of(plan, data)
    with Checkpointer(folder, keep=1) as checkpoints:
        path = checkpoints.latest()
        assert path is not None
        trainer.restore(checkpoints.load(path, trainer.state()))
    return [trainer.train_step() for _ in range(2)]


def test_steps_are_read_ahead_by_one_reader_and_leave_nothing_behind(data: Path) -> None:
    """A reader that began anew in every step was kept, 4.5 kB each."""
    trainer = trainer_of(make_plan(Layout(), "dense"), data)
    trainer.train_step()
    reader, counts = trainer._prefetched._reader, []
    for _ in range(4):
        trainer.train_step()
        assert trainer._prefetched._reader is reader
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[-1] - counts[0] < 30, "not ten objects a step"


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("model", "before", "after", "optimizer"),
    [
        ("dense", "dp=2", "zero-1 of 3", "adamw"),
        ("dense", "zero-1 of 3", "hybrid zero-3 of 4", "adamw"),
        ("dense", "hybrid zero-3 of 4", "alone", "adamw"),
        ("moe", "zero-2 of 2", "dp=2", "adamw"),
        ("tied", "alone", "zero-2 of 2", "adamw"),
        ("dense", "zero-1 of 3", "dp=2", "lion"),
        ("predicting", "hybrid zero-3 of 4", "zero-1 of 3", "adamw"),
        ("tied predicting", "dp=2", "alone", "adamw"),
        ("dense", "tp=2 fsdp=2", "zero-1 of 3", "adamw"),
        ("tied", "zero-2 of 2", "tp=2 cp=2", "adamw"),
        ("dense", "tp=2 fsdp=2", "tp=4", "adamw"),
        ("tied", "tp=4", "alone", "adamw"),
        ("routed", "ep=2 tp=2", "alone", "adamw"),
        ("routed", "dp=2", "ep=2 tp=2", "lion"),
        ("tied", "zero-2 of 2", "tp=2 cp=2", "muon"),
        ("tied", "zero-2 of 2", "tp=2 cp=2", "adafactor"),
        ("dense", "tp=2 fsdp=2", "zero-1 of 3", "adafactor"),
        ("dense", "tp=2 fsdp=2", "zero-1 of 3", "muon"),
        ("wide blocks", "zero-1 of 3", "tp=2 fsdp=2", "adamw_8bit"),
        ("wide blocks", "tp=4", "pp=2 zb_v", "adamw_8bit"),
        ("moe", "zero-1 of 3", "hybrid zero-3 of 4", "adamw_8bit"),
        ("routed", "ep=2 tp=2", "zero-2 of 2", "shampoo"),
        ("tied", "pp=2 zb_v", "pp=3", "adamw"),
        ("tied", "pp=2 dualpipe_v", "pp=2 interleaved_zb", "adamw"),
    ],
)
def test_resumed_run_equals_the_uninterrupted_one(
    model: str, before: str, after: str, optimizer: str, data: Path, tmp_path: Path
) -> None:
    plan, resumed_plan = (make_plan(LAYOUTS[layout], model, optimizer) for layout in (before, after))
    expected = run_rank_threads(train_and_save, plan.layout.num_devices, plan, data, tmp_path)[0]
    for records in run_rank_threads(resume_run, resumed_plan.layout.num_devices, resumed_plan, data, tmp_path):
        for record, reference in zip(records, expected, strict=True):
            assert record.step == reference.step
            assert record.learning_rate == reference.learning_rate
            assert record.loss == pytest.approx(reference.loss, rel=1e-5)
            assert record.prediction_loss == (
                reference.prediction_loss and pytest.approx(reference.prediction_loss, rel=1e-5)
            )
            assert (record.prediction_loss is None) == ("predicting" not in model)
            assert record.grad_norm == pytest.approx(reference.grad_norm, rel=1e-4)


def save_again(plan: Plan, data: Path, folder: Path, into: Path) -> list[float]:
    """Save a loaded state again from other ranks; return the losses of the two next steps."""
    trainer = trainer_of(plan, data)
    with Checkpointer(folder, keep=1) as checkpoints, Checkpointer(into, keep=1) as rewriter:
        path = checkpoints.latest()
        assert path is not None
        trainer.restore(checkpoints.load(path, trainer.state()))
        rewriter.save(trainer.step, trainer.state())
    return [trainer.train_step().loss for _ in range(2)]


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ("wide blocks", "tp=2 fsdp=2", "tp=4"),
        ("wide blocks", "hybrid zero-3 of 4", "pp=2 zb_v"),
        ("dense", "tp=2 fsdp=2", "tp=2 cp=2"),  # which both cut the same blocks
        ("dense", "tp=4", "tp=4"),
    ],
)
def test_other_ranks_have_the_same_codes_and_scales(
    model: str, before: str, after: str, data: Path, tmp_path: Path
) -> None:
    """Nothing is quantised again; and on the same layout a run goes on bit by bit."""
    plan, resumed_plan = (make_plan(LAYOUTS[layout], model, "adamw_8bit") for layout in (before, after))
    expected = run_rank_threads(train_and_save, plan.layout.num_devices, plan, data, tmp_path / "a")[0]
    losses = run_rank_threads(
        save_again, resumed_plan.layout.num_devices, resumed_plan, data, tmp_path / "a", tmp_path / "b"
    )[0]
    paths = [latest(tmp_path / name) for name in "ab"]
    assert None not in paths
    for prefix, dtypes in (("exp_avg", {torch.uint8, torch.float32}), ("model.", {torch.float32})):
        first, second = (load_tensors(path, prefix) for path in paths if path is not None)
        assert first.keys() == second.keys()
        assert {values.dtype for values in first.values()} == dtypes
        assert all(torch.equal(values.reshape(-1), second[name].reshape(-1)) for name, values in first.items())
    if before == after:
        assert losses == [record.loss for record in expected]


def test_blocks_that_tensor_parallelism_cuts_are_read_by_the_same_degree(data: Path, tmp_path: Path) -> None:
    plan, resumed_plan = (make_plan(LAYOUTS[layout], "dense", "adamw_8bit") for layout in ("tp=2 fsdp=2", "tp=4"))
    run_rank_threads(train_and_save, plan.layout.num_devices, plan, data, tmp_path)
    for problems in run_rank_threads(refused, resumed_plan.layout.num_devices, resumed_plan, data, tmp_path):
        assert [text.count("plan again with the degrees that it was saved with") for text in problems] == [1, 1]
        assert all("exp_avg_scales_of_" in text for text in problems)


def refused(plan: Plan, data: Path, folder: Path) -> list[str]:
    with pytest.raises(InputError) as caught:
        resume_run(plan, data, folder)
    return list(caught.value.problems)


def checkpointed(plan: Plan, data: Path, folder: Path) -> dict[str, torch.Tensor]:
    """A step and a checkpoint; every weight."""
    trainer = trainer_of(plan, data)
    trainer.train_step()
    with Checkpointer(folder, keep=1) as checkpoints:
        checkpoints.save(trainer.step, trainer.state())
    return gathered(trainer.engine, "state")


@pytest.mark.parametrize(
    ("model", "layout"), [("dense", "zero-1 of 3"), ("tied predicting", "zero-1 of 3"), ("dense", "tp=4")]
)
def test_a_checkpoint_of_many_ranks_is_a_model_of_transformers(
    model: str, layout: str, data: Path, tmp_path: Path
) -> None:
    plan = make_plan(LAYOUTS[layout], model)
    expected = run_rank_threads(checkpointed, plan.layout.num_devices, plan, data, tmp_path / "checkpoints")[0]
    path = latest(tmp_path / "checkpoints")
    assert path is not None
    checkpoint_to_hf(path, plan.model, tmp_path / "hf", seq_len=SEQ_LEN)
    exported = load_hf(tmp_path / "hf").tensors
    assert set(exported) == set(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(exported[name].flatten().double(), weight, rtol=0, atol=0)
    with pytest.raises(InputError, match=r"the weights of another model than .*: .*; the plan that the run was of"):
        checkpoint_to_hf(path, replace(plan.model, num_layers=2), tmp_path / "other", seq_len=SEQ_LEN)


def begun(plan: Plan, data: Path, folder: str) -> tuple[dict[str, torch.Tensor], StepRecord]:
    """A run that begins with a model's weights: these, and its first step."""
    trainer = trainer_of(plan, data, initial=folder)
    return gathered(trainer.engine, "state"), trainer.train_step()


@pytest.mark.parametrize(
    ("model", "layout"), [("dense", "zero-2 of 2"), ("tied predicting", "zero-2 of 2"), ("tied", "tp=4")]
)
def test_a_run_begins_with_the_weights_of_a_model_of_transformers(
    model: str, layout: str, data: Path, tmp_path: Path
) -> None:
    plan = make_plan(LAYOUTS[layout], model)
    plan = replace(plan, model=replace(plan.model, numerics=Numerics(rotary=Rotary(base=500.0))))
    initial = initial_weights(plan.model, 99)
    save_hf(initial, tmp_path / "hf", seq_len=SEQ_LEN)
    weights, record = run_rank_threads(begun, plan.layout.num_devices, plan, data, str(tmp_path / "hf"))[0]
    assert weights.keys() == initial.tensors.keys()
    for name, tensor in initial.tensors.items():
        torch.testing.assert_close(weights[name], tensor.flatten().double(), rtol=0, atol=0)
    batch = Batches(TokenShards(data), seq_len=SEQ_LEN, batch=SEQS, seed=3).batch(0)
    logits, targets = initial.logits(torch.tensor(batch.inputs_BT)), torch.tensor(batch.targets_BT)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten().long())
    assert record.loss == pytest.approx(expected.item(), rel=1e-5)
    stored = open_hf(tmp_path / "hf").architecture
    with pytest.raises(InputError, match="num_layers = 3; the plan's model has 2, which is required"):
        require_same_model(tmp_path / "hf", stored, replace(plan.model, num_layers=2))
    with pytest.raises(InputError, match=r"numerics = .*base=500.0.*; the plan's model has .*base=10000.0"):
        require_same_model(tmp_path / "hf", stored, replace(plan.model, numerics=Numerics()))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("layout", ["zero-2 of 2", "tp=4"])
@pytest.mark.parametrize("name", ["torchtitan", "megatron-ranks", "megatron"])
def test_a_run_begins_with_the_weights_of_another_framework(name: str, layout: str, data: Path, tmp_path: Path) -> None:
    plan = make_plan(LAYOUTS[layout], "dense")
    initial = initial_weights(plan.model, 99)
    degrees = RankDegrees(tp=2, divisible=16)
    model = WeightSource(plan.model, boxes_of_weights(initial), torch.float32)
    WEIGHT_FORMATS[name].write(tmp_path, model, ConvertOptions(degrees=degrees))
    weights, record = run_rank_threads(begun, plan.layout.num_devices, plan, data, str(tmp_path))[0]
    assert weights.keys() == initial.tensors.keys()
    for key, tensor in initial.tensors.items():
        torch.testing.assert_close(weights[key], tensor.flatten().double(), rtol=0, atol=0)
    assert math.isfinite(record.loss)
    deeper = replace(plan.model, num_layers=plan.model.num_layers + 1)
    with pytest.raises(InputError, match=r"lacks|has shape|has 0 of the"):
        open_stored_model(tmp_path, deeper)


class CountedTensors(threading.local):
    """Tensors of a model's files, and how many bytes of them this rank has read."""

    num_bytes = 0

    def read(self, tensors: SafetensorsFolder, file: str, name: str, box: Box) -> torch.Tensor:
        values = READ(tensors, file, name, box)
        self.num_bytes += values.nbytes
        return values


READ, COUNTED = SafetensorsFolder.read, CountedTensors()


def read_bytes(plan: Plan, data: Path, folder: str) -> tuple[int, int]:
    """Bytes of a model's files that this rank reads as a run begins with its weights, and those of what it keeps of them."""
    trainer = trainer_of(plan, data, initial=folder)
    return COUNTED.num_bytes, sum(
        values.nbytes for kind, _, values in trainer.engine.checkpoint_tensors() if kind == "model"
    )


@pytest.mark.parametrize(
    ("layout", "parts"),
    [("dp=2", 1), ("zero-1 of 3", 3), ("zero-2 of 2", 2), ("hybrid zero-3 of 4", 2), ("tp=2 fsdp=2", 4)],
)
def test_each_rank_reads_what_it_keeps_of_a_model(
    layout: str, parts: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SafetensorsFolder, "read", lambda *operands: COUNTED.read(*operands))
    plan = make_plan(LAYOUTS[layout], "moe")
    initial = initial_weights(plan.model, 99)
    save_hf(initial, tmp_path, seq_len=SEQ_LEN)
    size = sum(tensor.nbytes for tensor in initial.tensors.values())
    bytes_by_rank = run_rank_threads(read_bytes, plan.layout.num_devices, plan, data, str(tmp_path))
    assert all(read == kept for read, kept in bytes_by_rank), "nothing is read but what is kept, and that once"
    assert max(read for read, _ in bytes_by_rank) <= 1.5 * size / parts, "padding aside, all read alike"


def test_a_run_in_fp16_goes_on_with_its_scale_and_the_updates_that_were_made(data: Path, tmp_path: Path) -> None:
    """Of a scale from which the first steps overflow, that is how many steps the moments have seen too."""
    plan = make_plan(LAYOUTS["alone"], "dense")
    plan = replace(plan, job=replace(plan.job, precision="fp16"))
    recipe = TrainingRecipe(steps=6, learning_rate=1e-2, seed=3, loss_scale=2.0**32, loss_scale_backoff=2.0**-10)
    batches = Batches(TokenShards(data), seq_len=SEQ_LEN, batch=SEQS, seed=recipe.seed)

    def trainer() -> Trainer:
        return Trainer(plan, recipe, batches, World(engine_instance(plan, recipe).mesh))

    first, again = trainer(), trainer()
    before = [first.train_step() for _ in range(3)]
    assert before[-1].num_skipped in (1, 2)
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(first.step, first.state())
        path = checkpoints.latest()
        assert path is not None
        again.restore(checkpoints.load(path, again.state()))
    for _ in range(2):
        uninterrupted, resumed_record = first.train_step(), again.train_step()
        assert (uninterrupted.loss, uninterrupted.loss_scale, uninterrupted.num_skipped) == (
            resumed_record.loss,
            resumed_record.loss_scale,
            resumed_record.num_skipped,
        )
    for (name, _, original), (_, _, restored) in zip(
        first.engine.checkpoint_tensors(), again.engine.checkpoint_tensors(), strict=True
    ):
        assert torch.equal(original, restored), name


@pytest.mark.parametrize(("before", "after"), [("dp=2", "dp=2"), ("tp=2 cp=2", "tp=2 cp=2"), ("dp=2", "pp=2 zb_v")])
def test_a_run_goes_on_with_the_scales_of_its_earlier_steps(
    before: str, after: str, data: Path, tmp_path: Path
) -> None:
    """Bit for bit on the same ranks; on others from the same factors and history."""
    plans = [make_plan(LAYOUTS[name], "dense") for name in (before, after)]
    first, second = (replace(plan, job=replace(plan.job, precision="fp8_transformer_engine")) for plan in plans)
    (records, scales), *_ = run_rank_threads(saved_with_scales, first.layout.num_devices, first, data, tmp_path)
    for resumed_records, resumed_scales in run_rank_threads(
        resumed_with_scales, second.layout.num_devices, second, data, tmp_path
    ):
        for name, values in resumed_scales.items():
            assert torch.equal(values, scales[name]), name
        if first == second:
            assert [record.loss for record in resumed_records] == [record.loss for record in records]
        else:
            assert [record.loss for record in resumed_records] == pytest.approx(
                [record.loss for record in records], rel=1e-3
            )


def saved_with_scales(plan: Plan, data: Path, folder: Path) -> tuple[list[StepRecord], dict[str, torch.Tensor]]:
    trainer = trainer_of(plan, data)
    for _ in range(3):
        trainer.train_step()
    with Checkpointer(folder, keep=1) as checkpoints:
        checkpoints.start(trainer.step, trainer.state())
        scales = copied_scales(trainer)
        return [trainer.train_step() for _ in range(2)], scales


def resumed_with_scales(plan: Plan, data: Path, folder: Path) -> tuple[list[StepRecord], dict[str, torch.Tensor]]:
    trainer = trainer_of(plan, data)
    with Checkpointer(folder, keep=1) as checkpoints:
        path = checkpoints.latest()
        assert path is not None
        trainer.restore(checkpoints.load(path, trainer.state()))
    scales = copied_scales(trainer)
    return [trainer.train_step() for _ in range(2)], scales


def copied_scales(trainer: Trainer) -> dict[str, torch.Tensor]:
    copies = {name: scale.clone() for name, scale in trainer.engine.scales.state().items()}
    assert copies
    return copies
