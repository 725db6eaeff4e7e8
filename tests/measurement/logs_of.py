"""Lines of logs as each framework prints them, by its own format strings."""

from __future__ import annotations

import json

RED, GREEN, RESET = "\033[31m", "\033[32m", "\033[39m"


def torchtitan(step: int, tps: float, loss: float = 8.0, mfu: float | None = 38.04, memory: float = 47.31) -> str:
    """torchtitan 0.3.0, components/metrics.py, MetricsProcessor.log, in colours, behind what tools/logging.py and
    torchrun write in front."""
    mfu_str = f"{mfu:.2f}%" if mfu is not None else "N/A"
    return (
        "[rank0]:[titan] 2026-05-01 10:00:00,123 - root - INFO - "
        f"{RED}step: {step:2}  "
        f"{GREEN}loss: {loss:8.5f}  "
        f"\033[38;2;180;60;0mgrad_norm: {1.25:7.4f}  "
        f"\033[38;2;54;234;195mmemory: {memory:5.2f}GiB"
        f"({59.79:.2f}%)  "
        f"\033[34mtps: {round(tps):,}  "
        f"\033[36mtflops: {1376.2:,.2f}  "
        f"\033[35mmfu: {mfu_str}{RESET}"
    )


def torchtitan_validation(step: int) -> str:
    """torchtitan 0.3.0, MetricsProcessor.log_validation."""
    return (
        f"[titan] 2026-05-01 10:00:00,123 - root - INFO - {RED}validate step: {step:2}  {GREEN}loss: {3.0:7.4f}  "
        f"memory: {47.3:5.2f}GiB({59.7:.2f}%)  tps: {round(123.4):,}{RESET}"
    )


def transformers(seconds: float, steps: int, samples: int, loss: float = 5.555) -> list[str]:
    """transformers 5.24.0: the last lines of Trainer, by trainer_utils.py, speed_metrics, and trainer_callback.py,
    ProgressCallback.on_log (numbers are texts of four digits), behind a progress bar without a line break."""
    rates = {
        "train_runtime": seconds,
        "train_samples_per_second": samples / seconds,
        "train_steps_per_second": steps / seconds,
    }
    values = {name: f"{value:.4}" for name, value in {**rates, "train_loss": loss, "epoch": 0.125}.items()}
    step = {"loss": "5.558", "grad_norm": "0.6103", "learning_rate": "6.25e-06", "epoch": "0.125"}
    return [
        f" 12%|#2        | 1/{steps} [00:00<00:03,  1.87it/s]\r{' ' * 45}\r{step}",
        f"{' ' * 45}\r{values}",
        f"100%|##########| {steps}/{steps} [00:02<00:00,  3.09it/s]",
    ]


def megatron(iteration: int, ms: float, loss: float = 8.0, batch: int = 128, throughput: bool = True) -> str:
    """Megatron-LM d98e8a64, megatron/training/training.py, training_log."""
    line = " [2026-05-04 09:10:12.123456]"
    line += " iteration {:8d}/{:8d} |".format(iteration, 300)  # noqa: UP032
    line += " consumed samples: {:12d} |".format(iteration * batch)  # noqa: UP032
    line += " elapsed time per iteration (ms): {:.1f} |".format(ms)  # noqa: UP032
    if throughput:
        line += f" throughput per GPU (TFLOP/s/GPU): {498.25:.1f} |"
    line += f" learning rate: {3e-4:.6E} | global batch size: {batch:5d} |"
    line += " {}: {:.6E} |".format("lm loss", loss)
    return line + f" loss scale: {1.0:.1f} | grad norm: {1.2:.3f} | number of skipped iterations: {0:3d} |"


def megatron_memory(rank: int, max_reserved: float) -> str:
    """Megatron-LM d98e8a64, megatron/training/utils/common_utils.py, report_memory."""
    return (
        f"[Rank {rank}] (after 10 iterations) memory (MB) | allocated: {21034.1:.2f} | max allocated: {58112.3:.2f}"
        f" | reserved: {60000.0:.2f} | max reserved: {max_reserved:.2f}"
    )


def human_format(num: float) -> str:
    """Three digits and a decimal prefix, as nanotron 0.4, logging.py, human_format gives them."""
    if abs(num) < 1:
        return f"{num:.3g}"
    num, magnitude = float(f"{num:.3g}"), 0
    while abs(num) >= 1000 and magnitude < 6:
        num, magnitude = num / 1000.0, magnitude + 1
    return f"{num:f}".rstrip("0").rstrip(".") + ["", "K", "M", "G", "T", "P", "E"][magnitude]


def nanotron(
    step: int, ms: float, tokens_per_s: float, gpus: int = 8, time: str = "elapsed_time_per_iteration_ms"
) -> str:
    """nanotron 0.4, trainer.py, train_step_logs and logging.py, LoggerWriter. Later commits say `time_per_iteration_ms`."""
    logged = {
        "consumed_tokens": step * 1048576, time: ms, "tokens_per_sec": tokens_per_s,
        "tokens_per_sec_per_gpu": tokens_per_s / gpus,
        "global_batch_size": 128, "lm_loss": 7.123456, "lr": 0.0003, "model_tflops_per_gpu": 345.678,
        "hardware_tflops_per_gpu": 350.1, "grad_norm": 1.25, "cuda_max_memory_reserved": 60.25e9,
        "hd_total_memory_tb": 1.9e12,
    }  # fmt: skip
    fields = " | ".join(
        [f"iteration: {step} / 500", *(f"{tag}: {human_format(value)}" for tag, value in logged.items())]
    )
    return f"03/05/2026 09:41:00 [INFO|DP=0|PP=0|TP=0|node-1]: {fields}"


def nemo(step: int, seconds: float, loss: float = 8.0, batch: int = 128, memory: int | None = None) -> str:
    """NeMo 2.6, nemo/lightning/pytorch/callbacks/progress_printer.py, format_string: what has no fraction is whole, all else of
    four digits. The first step has no consumed samples yet."""
    metrics = {"lr": 1.469e-05, "global_batch_size": float(batch), "global_step": float(step)}
    metrics |= {"max_memory_reserved": float(memory), "max_memory_allocated": 6e10} if memory else {}
    metrics |= {"reduced_train_loss": loss, "train_step_timing in s": seconds, "TFLOPS_per_GPU": 865.71}
    metrics |= {"consumed_samples": float(batch * (step + 1))} if step else {}
    line = f"Training epoch 0, iteration {step}/99"
    for metric, val in metrics.items():
        line += f" | {metric}: {int(val)}" if val.is_integer() else f" | {metric}: {val:.4}"
    return line


def automodel(step: int, tokens: float) -> str:
    """nemo-automodel 0.7.0, components/loggers/metric_logger.py, MetricsSample.to_dict, of recipes/llm/train_ft.py."""
    logged = {
        "step": step, "epoch": 0, "timestamp": "2026-05-01T10:00:00.123Z", "loss": 8.0, "grad_norm": 1.25, "lr": 3e-4,
        "mem": 47.5, "tps": tokens * 64, "tps_per_gpu": tokens, "mfu": 40.5, "num_tokens_per_step": 1048576,
    }  # fmt: skip
    return json.dumps(logged)


def maxtext(step: int, seconds: float, tokens: float, loss: float = 8.0, ramp: bool = False) -> str:
    """MaxText e591f30c, src/maxtext/common/metric_logger.py, _log_training_metrics."""
    parts = ["[Rampup Batch Size Phase]"] if ramp else []
    parts += [f"completed step: {step}", f"seconds: {seconds:.3f}"]
    if not ramp:
        parts += [f"TFLOP/s/device: {412.3456:.3f}", f"Tokens/s/device: {tokens:.3f}"]
    return ", ".join(
        [*parts, "total_weights: 65536", f"loss: {loss:.3f}", f"lm_loss: {loss:.3f}", f"perplexity: {2.5:.3f}"]
    )
