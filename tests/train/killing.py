"""Runs of the engine on two processes that are killed by SIGKILL at random moments, and go on until they are done.

Launcher and ranks run what `shardwise train` runs, in float64. They begin as copies of a server that has PyTorch loaded already:
on a machine with other work, loading it would take nine tenths of the time.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import server
from train.copies import copy_ranks
from train.float64 import DENSE, EXPERTS, make_plan, register
from train.launching import pids_of
from train.stand_in import write_inputs

from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.search.plan_file import dump_plan

SEQS = 4
# By name: a model, the layout of a run, and another one that takes the run over.
LAYOUTS = {
    "dp": (DENSE, Layout(dp=2, micro_batch_seqs=2), Layout(tp=2, micro_batch_seqs=4)),
    "zero3": (DENSE, Layout(fsdp=2, zero_stage=3, micro_batch_seqs=2), Layout(pp=2, schedule="1f1b", micro_batch_seqs=2)),
    "tp": (DENSE, Layout(tp=2, sequence_parallel=True, micro_batch_seqs=4), Layout(fsdp=2, zero_stage=3, micro_batch_seqs=2)),
    "pp": (DENSE, Layout(pp=2, schedule="1f1b", micro_batch_seqs=2), Layout(dp=2, micro_batch_seqs=1)),
    "ep": (EXPERTS, Layout(fsdp=2, ep=2, zero_stage=1, micro_batch_seqs=2), Layout(dp=2, micro_batch_seqs=2)),
}  # fmt: skip
VICTIMS = ("rank 0", "rank 1", "all", "launcher")
MOMENTS = ("in a step", "in a step", "in a save", "in the start")
FOREVER_S = 900.0
TAIL_BYTES = 4096  # more than a line of the log


@dataclass(frozen=True)
class Kill:
    """One kill: the process, after how many logged steps, and how many seconds later."""

    victim: str
    moment: str
    step: int
    delay_s: float

    def __str__(self) -> str:
        return f"{self.victim} {self.moment}, from step {self.step} on"


def draw_kills(seed: str, count: int, steps: int) -> list[Kill]:
    """Draw the kills of a run with this many steps; each kill is later in the run than the one before."""
    random_ = random.Random(seed)
    part = steps / (count + 1)
    return [
        Kill(random_.choice(VICTIMS), random_.choice(MOMENTS), int(part * (number + random_.random())), random_.uniform(0, 0.3))
        for number in range(count)
    ]  # fmt: skip


class Killable:
    """A run in one folder that is started, killed and resumed, under several layouts."""

    def __init__(self, place: Path, model: Architecture, layout: Layout, steps: int, checkpoint_every: int) -> None:
        self.place, self.model = place, model
        place.mkdir(parents=True)
        self.flags = [
            *write_inputs(place, make_plan(model, layout, SEQS)),
            "--device",
            "cpu",
            "--learning-rate",
            "0.01",
        ]
        self.flags += ["--steps", str(steps), "--checkpoint-every", str(checkpoint_every)]
        self.out = place / "run"

    def started(self) -> Any:
        """Start or resume the run."""
        resume = ["--resume"] if (self.out / "run.json").exists() else []
        process = server().Process(target=launcher, args=([*self.flags, *resume], str(self.place / "said.txt")))
        process.start()
        return process

    def ends(self) -> None:
        """Start or resume the run, and wait until it ends."""
        process = self.started()
        process.join(FOREVER_S)
        assert process.exitcode == 0, (self.place / "said.txt").read_text()

    def killed(self, kill: Kill) -> bool:
        """Start or resume the run, and kill it; return whether it was still running."""
        process = self.started()
        try:
            while process.is_alive() and not self._is_time(kill, process.pid):
                time.sleep(0.002)
            time.sleep(kill.delay_s if kill.moment == "in a step" else 0.0)
            was_alive = process.is_alive()
            self._kill(process.pid, kill.victim)
            process.join(FOREVER_S)
        finally:
            _wait_for_end(process.pid)
        return was_alive

    def _is_time(self, kill: Kill, launcher: int) -> bool:
        if kill.moment == "in the start":
            return launcher not in _ranks(self.out, launcher)
        return self._last_step() >= kill.step and (kill.moment != "in a save" or self.has_draft())

    def has_draft(self) -> bool:
        """Return whether a checkpoint was half written when the processes died."""
        return any(self.out.glob("checkpoints/.step-*.writing/*"))

    def _last_step(self) -> int:
        """The step of the last whole line of the log."""
        with suppress(OSError, IndexError, ValueError), (self.out / "log.jsonl").open("rb") as file:
            file.seek(max(os.path.getsize(file.name) - TAIL_BYTES, 0))
            return int(json.loads(file.read().split(b"\n")[-2]).get("step", 0))
        return 0

    def _kill(self, launcher: int, victim: str) -> None:
        with suppress(ProcessLookupError):
            if victim == "all":
                os.killpg(launcher, signal.SIGKILL)
            else:
                os.kill(
                    launcher if victim == "launcher" else _ranks(self.out, launcher)[int(victim[-1])], signal.SIGKILL
                )

    def moved_to(self, layout: Layout, place: Path) -> Killable:
        """Copy the run to a folder, to be resumed under another layout."""
        shutil.copytree(self.place, place, symlinks=True)
        moved = Killable.__new__(Killable)
        moved.place, moved.model, moved.out = place, self.model, place / "run"
        moved.flags = [word.replace(str(self.place), str(place)) for word in self.flags]
        dump_plan(make_plan(self.model, layout, SEQS), place / "plan.json")
        return moved

    def first_step(self) -> int:
        """Return the number of steps done before the last start."""
        return max(line["first_step"] for line in _whole_lines(self.out / "log.jsonl") if "first_step" in line)

    def losses(self) -> dict[int, tuple[str, str]]:
        """Loss and norm of each step that is in the log, as it has them: floats to the last bit."""
        lines = _whole_lines(self.out / "log.jsonl")
        return {
            line["step"]: (repr(line["loss_metrics/global_avg_loss"]), repr(line["grad_norm"]))
            for line in lines
            if "loss_metrics/global_avg_loss" in line
        }


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from map(json.loads, path.read_text(encoding="utf-8").split("\n")[:-1])


def _ranks(out: Path, launcher: int) -> list[int]:
    """Return the processes of the ranks; before they have locked the folder, the launcher twice."""
    with suppress(OSError, ValueError):
        pids = pids_of(out)
        if all(os.getpgid(pid) == launcher for pid in pids):
            return pids
    return [launcher, launcher]


def _wait_for_end(group: int) -> None:
    """Wait until no process of a group is left."""
    until = time.monotonic() + FOREVER_S
    with suppress(ProcessLookupError):
        while True:
            os.killpg(group, 0)
            assert time.monotonic() < until, f"processes of {group} are left"
            time.sleep(0.02)


def largest_difference(first: dict[int, tuple[str, str]], second: dict[int, tuple[str, str]], steps: range) -> float:
    """The largest relative difference of loss or norm in these steps; infinite where one is missing."""
    if not first.keys() & second.keys() >= set(steps):
        return float("inf")
    pairs = [(float(a), float(b)) for step in steps for a, b in zip(first[step], second[step], strict=True)]
    return max(abs(a / b - 1) for a, b in pairs)


def launcher(flags: Sequence[str], log_path: str) -> None:
    """The process of `shardwise train`, in a process group of its own; what it and its ranks print is added to a file."""
    from shardwise.run import launcher

    os.setsid()
    with Path(log_path).open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    register()
    copy_ranks()
    sys.exit(launcher.run_ranks(flags, 2))
