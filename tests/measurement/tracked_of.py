"""What each framework logs by its own tags, and files of it as trackers of experiments write them.

    python tests/measurement/tracked_of.py

writes tests/measurement/tracked anew, with torch, tensorboard, tensorboardX and wandb (PyTorch 2.13.0, tensorboard 2.21.0,
tensorboardX 2.6.5 and wandb 0.31.0 wrote what is there).
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tracked"
GIB = 2**30
SECONDS = {step: 4.0 if step < 3 else 2.0 + step % 3 / 64 for step in range(1, 21)}  # which float32 holds exactly
BATCH_SEQS, SEQ_LEN, DEVICES, START_S = 128, 8192, 64, 1.7e9
Logged = dict[str, float]


def loss_of(step: int) -> float:
    return 10.0 - step / 8


def tokens_per_s(step: int) -> float:
    """Of one device."""
    return BATCH_SEQS * SEQ_LEN / DEVICES / SECONDS[step]


def torchtitan(step: int) -> Logged:
    """torchtitan 0.3.0, components/metrics.py, MetricsProcessor.log."""
    return {
        "loss_metrics/global_avg_loss": loss_of(step), "loss_metrics/global_max_loss": 11.0, "grad_norm": 1.5,
        "throughput(tps)": tokens_per_s(step), "tflops": 400.0, "time_metrics/end_to_end(s)": SECONDS[step],
        "time_metrics/data_loading(s)": 0.01, "memory/max_active(GiB)": 40.0, "memory/max_reserved(GiB)": 47.5,
        "memory/num_ooms": 0.0, "mfu(%)": 40.5,
    }  # fmt: skip


def megatron(step: int) -> Logged:
    """Megatron-LM d98e8a64, megatron/training/training.py, training_log, with --log-timers-to-tensorboard."""
    return {
        "learning-rate": 3e-4, "batch-size": BATCH_SEQS, "lm loss": loss_of(step), "grad-norm": 1.5,
        "mem-reserved-bytes": 60e9, "iteration-time": SECONDS[step], "throughput": 400.0,
    }  # fmt: skip


def nemo(step: int) -> Logged:
    """NeMo 2.6, lightning/pytorch/strategies/megatron_strategy.py; utils/exp_manager.py."""
    return {
        "lr": 3e-4, "global_batch_size": BATCH_SEQS, "global_step": step, "max_memory_reserved": 60e9,
        "reduced_train_loss": loss_of(step), "train_step_timing in s": SECONDS[step], "consumed_samples": step * BATCH_SEQS,
    }  # fmt: skip


def maxtext(step: int) -> Logged:
    """MaxText e591f30c, src/maxtext/common/metric_logger.py, record_train_metrics: without rates where the batch grows."""
    rates = {} if step < 3 else {
        "perf/per_device_tokens_per_sec": tokens_per_s(step), "perf/per_device_tflops_per_sec": 400.0,
    }  # fmt: skip
    return {"learning/loss": loss_of(step), "perf/step_time_seconds": SECONDS[step], **rates}


def nanotron(step: int) -> Logged:
    """nanotron 0.4, trainer.py, train_step_logs."""
    return {
        "elapsed_time_per_iteration_ms": SECONDS[step] * 1e3, "tokens_per_sec": tokens_per_s(step) * DEVICES,
        "tokens_per_sec_per_gpu": tokens_per_s(step), "global_batch_size": BATCH_SEQS, "lm_loss": loss_of(step),
        "model_tflops_per_gpu": 400.0, "cuda_max_memory_reserved": 60e9, "iteration_step": step,
    }  # fmt: skip


def automodel(step: int) -> Logged:
    """nemo-automodel 0.7.0, recipes/llm/train_ft.py, _run_train_optim_step."""
    return {
        "loss": loss_of(step), "grad_norm": 1.5, "lr": 3e-4, "mem": 47.5, "tps": tokens_per_s(step) * DEVICES,
        "tps_per_gpu": tokens_per_s(step), "mfu": 40.5, "num_tokens_per_step": BATCH_SEQS * SEQ_LEN,
    }  # fmt: skip


LOGGED: Mapping[str, Any] = {
    logger.__name__: logger for logger in (torchtitan, megatron, nemo, maxtext, nanotron, automodel)
}
OF_TENSORBOARD = ("torchtitan", "megatron", "nemo", "maxtext")


def write_events(folder: Path) -> None:
    """Event files, and one of tensors as `tf.summary.scalar` and new_style make them."""
    from tensorboardX import SummaryWriter as OfMaxText
    from torch.utils.tensorboard import SummaryWriter

    for name in OF_TENSORBOARD:
        writer = (OfMaxText if name == "maxtext" else SummaryWriter)(str(folder / name))
        for step in SECONDS:
            for tag, value in LOGGED[name](step).items():
                writer.add_scalar(tag, value, step, walltime=START_S + 2.5 * step)
            if name == "megatron":
                writer.add_scalar("lm loss vs samples", loss_of(step), step * BATCH_SEQS)
        writer.close()
    writer = SummaryWriter(str(folder / "tensors"))
    writer.add_text("config", "not a number")
    for step in SECONDS:
        writer.add_scalar("lm loss", loss_of(step), step, new_style=True)
        writer.add_scalar("iteration-time", SECONDS[step], step, new_style=True, double_precision=True)
    writer.close()
    for number, path in enumerate(sorted(folder.rglob("*tfevents*"))):
        path.rename(path.with_name(f"events.out.tfevents.{int(START_S)}.host.{number}"))


def write_history(folder: Path) -> None:
    """A file of W&B's own, of a run that was never uploaded, with a record that takes several of its blocks."""
    import wandb

    with tempfile.TemporaryDirectory() as place:
        quiet = wandb.Settings(x_disable_stats=True, console="off", x_disable_machine_info=True, silent=True)
        run = wandb.init(project="project", id="run", mode="offline", dir=place, settings=quiet)
        for step in SECONDS:
            more = {"text": "x" * 40_000} if step == 10 else {"norm": math.nan}
            run.log({**nanotron(step), **more})
        run.finish()
        wandb.teardown()  # which waits for the file
        (written,) = Path(place).rglob("*.wandb")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(written, folder / "run-1.wandb")


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    write_events(FOLDER)
    write_history(FOLDER / "wandb")
