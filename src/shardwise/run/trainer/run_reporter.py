"""Reports of a run on its first rank: the log, progress lines, TensorBoard on request, and the summary."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, TextIO

from shardwise.batch_size.noise_scale import noise_payload
from shardwise.batch_size.run_noise import estimate_run_noise, noise_sample_of
from shardwise.hardware import LOCAL, Chip
from shardwise.model import model_flops_per_token, num_params
from shardwise.price import Pricing, Reliability, mfu_format
from shardwise.price.training_run import checkpoint_bytes, checkpoint_seconds
from shardwise.records import RunFolder, StepLog, StepRecord, read_log
from shardwise.records.run_summary import DataSummary, SourceUsage, summarise_run
from shardwise.records.step_log import (
    EVENT,
    INSPECTED,
    SCHEMA,
    VALIDATION_LOSS,
    LogWriter,
    MfuFormula,
    format_step_line,
)
from shardwise.run.faults.rank_status import restart_reason
from shardwise.run.kernels.device_dispatch import kernel_library
from shardwise.run.trainer.flags import RunSettings
from shardwise.run.trainer.preflight import RunData
from shardwise.search import Plan
from shardwise.search.plan import software_versions
from shardwise.values import (
    MissingValueError,
    format_count,
    format_percent,
    format_seconds,
    pluralize,
    write_json_atomic,
)

SECONDS_BETWEEN = 10.0  # seconds between progress lines if there is no terminal, on which one is rewritten
RECENT_STEPS = 20  # steps from which the remaining time is estimated


def throughput_of(plan: Plan, device: str) -> MfuFormula:
    """Return the formula for rates and MFU of a plan's steps on the devices that it runs on."""
    peak_format, chip = mfu_format(plan.job), plan.cluster.chip
    elsewhere = device == "cpu" and chip.platform is not None
    return MfuFormula(
        num_devices=plan.layout.num_devices, chip=f"a CPU (the plan is for {chip.name})" if elsewhere else chip.name,
        peak_format=peak_format, peak_flops_per_s=None if elsewhere else _peak(chip, peak_format),
        flops_per_token=model_flops_per_token(plan.model, plan.job.attended_tokens),
        hardware_ratio=Pricing(plan.problem, plan.layout).hardware_ratio(),
    )  # fmt: skip


def _peak(chip: Chip, peak_format: str) -> float | None:
    """Return a device's peak FLOP/s; None without a source, and for a local host, which may be any machine."""
    try:
        return None if chip.name == LOCAL else chip.peak(peak_format)
    except MissingValueError:
        return None


def planned_checkpoints(plan: Plan) -> tuple[float, float]:
    """Return the bytes of a checkpoint and the seconds to write it, as the plan has them, or by default."""
    reliability = plan.run.reliability if plan.run else Reliability()
    return (
        checkpoint_bytes(plan.model, plan.job),
        checkpoint_seconds(plan.model, plan.job, plan.layout.num_devices, reliability),
    )


class RunReporter:
    """Writes the log, progress lines and TensorBoard metrics. `first_step` is the number of steps done before."""

    def __init__(
        self, plan: Plan, settings: RunSettings, *, device: str, first_step: int, stream: TextIO | None = None
    ) -> None:
        self.throughput, self.steps = throughput_of(plan, device), settings.recipe.steps
        self._stream = stream or sys.stderr
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._printed_at, self._rewrites_line = -SECONDS_BETWEEN, self._stream.isatty()
        self._resources = ExitStack()
        self._log = self._resources.enter_context(LogWriter(settings.out.log))
        self._board = self._open_board(settings) if settings.tensorboard else None
        self._start(plan, settings, device, first_step)

    def _open_board(self, settings: RunSettings) -> Any:
        from torch.utils.tensorboard.writer import SummaryWriter  # an optional package

        board = SummaryWriter(str(settings.out.tensorboard))
        self._resources.callback(board.close)
        return board

    def _start(self, plan: Plan, settings: RunSettings, device: str, first_step: int) -> None:
        formula, kernels = self.throughput.formula(), kernel_library(device)
        self._log.write(
            {
                "schema": SCHEMA, "model": plan.model.name, "layout": str(plan.layout), "num_devices": plan.layout.num_devices,
                "device": device, "kernels": kernels, "first_step": first_step, "steps": self.steps, "formula": formula,
                "flops_per_token": self.throughput.flops_per_token, "hardware_ratio": self.throughput.hardware_ratio,
                "peak_flops_per_s": self.throughput.peak_flops_per_s, "versions": software_versions(), "after": restart_reason(),
            }
        )  # fmt: skip
        ranks = pluralize(plan.layout.num_devices, "rank")
        self.print_line(
            f"{plan.model.name}, {format_count(num_params(plan.model))} parameters, {ranks} on {device.partition(':')[0]}, "
            f"kernels of {kernels}: {plan.layout}\n{formula}\n"
            + (f"after {pluralize(first_step, 'step')}: " if first_step else "")
            + f"{pluralize(self.steps - first_step, 'step')} to {settings.out.log}"
        )

    def step(self, record: StepRecord, extra_fields: Mapping[str, Any]) -> None:
        """Report a completed step."""
        line = format_step_line(record, self.throughput, extra_fields)
        self._log.write(line)
        self._to_board(line, record.step)
        if INSPECTED not in extra_fields or not self._recent:  # inspected steps are slower
            self._recent.append(record.step_time_s)
        self._progress(record)

    def validation(self, step: int, loss: float, losses_by_source: Mapping[str, float]) -> None:
        """Report the held-out loss after so many steps, and for a mixture that of each source."""
        line = {"step": step, VALIDATION_LOSS: loss}
        line |= {f"{VALIDATION_LOSS}/{name}": source_loss for name, source_loss in losses_by_source.items()}
        self._log.write(line)
        self._to_board(line, step)
        self.print_line(f"step {step}: held-out loss {loss:.4f}")

    def event(self, event: str, step: int, details: Mapping[str, Any], text: str = "") -> None:
        """Log an event after so many steps, and print `text` if there is any."""
        self._log.write({EVENT: event, "step": step, **details})
        if text:
            self.print_line(text)

    def print_line(self, text: str) -> None:
        """Print a line."""
        self._print(("\r\x1b[K" if self._rewrites_line else "") + text)

    def _print(self, text: str, end: str = "\n") -> None:
        """Print to the stream; if its reader is gone, the run continues, and its log has the report."""
        with suppress(OSError):
            print(text, end=end, file=self._stream, flush=True)

    def _to_board(self, line: Mapping[str, Any], step: int) -> None:
        if self._board:
            for name, value in line.items():
                self._board.add_scalar(name, float(value), step)

    def _progress(self, record: StepRecord) -> None:
        text = self._progress_text(record)
        now = time.monotonic()
        at_tenth = record.step % max(self.steps // 10, 1) == 0
        if self._rewrites_line:
            self._print(f"\r\x1b[K{text}", end="")
        elif at_tenth or record.step == self.steps or now - self._printed_at >= SECONDS_BETWEEN:
            self._printed_at = now
            self.print_line(text)

    def _progress_text(self, record: StepRecord) -> str:
        mfu = self.throughput.mfu(record)
        left_s = (self.steps - record.step) * sum(self._recent) / len(self._recent)
        return (
            f"step {record.step}/{self.steps}  loss {record.loss:.4f}  {self.throughput.tokens_per_s(record):,.0f} tokens/s  "
            f"MFU {'n/a' if mfu is None else format_percent(mfu)}  {format_seconds(left_s)} left"
        )

    def __enter__(self) -> RunReporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rewrites_line:
            self._print("")
        self._resources.close()


def write_summary(
    plan: Plan, settings: RunSettings, data: RunData, *, device: str, steps: int, held_out: Mapping[str, float]
) -> dict[str, Any]:
    """Write the summary of a run of `steps` steps and return it; `held_out` are the losses of each source's held-out
    text."""
    out, log = settings.out, read_log(settings.out.log)
    write_noise(out, log)
    data_summary = DataSummary(
        data.unigram_entropy_nats, data.mean_loss(held_out), _drawn_sources(data, steps, held_out)
    )
    summary = summarise_run(
        log, throughput_of(plan, device), data_summary, log_path=str(out.log), planned=planned_checkpoints(plan)
    )
    write_json_atomic(out.summary, summary)
    return summary


def _drawn_sources(data: RunData, steps: int, held_out: Mapping[str, float]) -> dict[str, SourceUsage]:
    """Return the share, epochs and held-out loss of each source."""
    epochs = data.train.epochs(steps)
    return {
        name: SourceUsage(share, num_epochs, held_out.get(name))
        for (name, share), num_epochs in zip(data.shares.items(), epochs, strict=True)
    }


def write_noise(out: RunFolder, log: StepLog) -> None:
    """Write the noise scale that a run measured into its folder, where plans find it (`batch_size.noise_scale`)."""
    if any(noise_sample_of(record) for record in log.steps):
        noise_scale = estimate_run_noise(log.steps, out.path).noise_scale
        if noise_scale is not None:
            write_json_atomic(out.noise, noise_payload(noise_scale))
