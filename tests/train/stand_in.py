"""A small trainer for tests of what surrounds a trainer: a bigram model on any number of ranks. As a module it runs one
rank: `python -m train.stand_in FLAGS`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from train.shard_files import write_shards

import shardwise as sw
from shardwise.batch_size.batch_schedule import BatchRamp
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.records.step_inspection import MeasuredMemory, RankTrace, StepInspection
from shardwise.records.step_log import StepRecord
from shardwise.run.checkpoints import Checkpointer, TensorShard, writer
from shardwise.run.data.batches import Batches
from shardwise.run.faults.rank_status import wait_for_ranks
from shardwise.run.faults.rendezvous import Rendezvous
from shardwise.run.parallel import world
from shardwise.run.recipe import Device, TrainingRecipe
from shardwise.run.trainer.anomaly_detector import AnomalyDetector, StepAnomaly
from shardwise.run.trainer.interfaces import RunComponents
from shardwise.run.transport.current import current_transport
from shardwise.run.transport.interface import Transport
from shardwise.search.plan import Plan, plan_layout
from shardwise.search.plan_file import dump_plan
from shardwise.values.errors import InputError

VOCAB, SEQ_LEN = 32, 16


def small_plan(
    devices: int = 1, *, batch_seqs: int = 8, vocab_size: int = VOCAB, num_layers: int = 2, optimizer: str = "adamw",
    **layout: Any,
) -> Plan:  # fmt: skip
    """Return a plan of a small model for processes of this machine."""
    model = replace(sw.load_model("gpt-2"), num_layers=num_layers, d_model=32, d_ff=64, num_heads=2, num_kv_heads=2, head_dim=16,
                    vocab_size=vocab_size)  # fmt: skip
    job = Job(global_batch_tokens=batch_seqs * SEQ_LEN, seq_len=SEQ_LEN, precision="fp32", optimizer=optimizer)
    shape = layout or {"dp": devices}
    return plan_layout(model, sw.load_cluster(f"local:{devices}"), job, Layout(**shape))


def write_inputs(place: Path, plan: Plan | None = None, *, held_out: bool = True, seed: int = 0) -> list[str]:
    """Write a plan and data into a folder; return the flags that name them and a run."""
    drawn = np.random.default_rng(seed)
    documents = [np.minimum(drawn.geometric(0.2, 50), VOCAB - 1).tolist() for _ in range(20)]
    write_shards(place / "data", documents, documents[:2] if held_out else (), vocab_size=VOCAB)
    dump_plan(plan or small_plan(), place / "plan.json")
    return [str(place / "plan.json"), "--data", str(place / "data"), "--out", str(place / "run")]


def hang() -> None:
    """Hold the interpreter's lock forever: no thread of this process runs again, and only SIGKILL ends it."""
    while True:
        ctypes.PyDLL(None).sleep(1000)


def arm() -> None:
    """Make a rank hang while it writes its part of a checkpoint, if the environment asks for it."""
    write = writer._write_rank_file

    def hanging(path: Path, pieces: Sequence[TensorShard]) -> Any:
        if os.environ.get("STAND_IN_HANGS_WRITING") == os.environ.get("RANK"):
            hang()
        return write(path, pieces)

    writer._write_rank_file = hanging


@dataclass
class World:
    rank: int
    size: int
    device: torch.device
    rendezvous: Rendezvous | None
    transport: Transport
    stage: int = 0


def join(plan: Plan, recipe: TrainingRecipe, device: Device) -> World:
    place, rendezvous = world.join_world("cpu", timedelta(seconds=recipe.timeout_s))
    transport = current_transport()
    return World(transport.rank, transport.size, place, rendezvous, transport)


class Bigram:
    """Logits of the next token by the one before [V, V], trained by SGD; its loss starts at ln V.

    The loss and the gradients of the steps in `spikes` are so many times as large as they should be.
    """

    spikes: ClassVar[Mapping[int, float]] = {}

    def __init__(self, plan: Plan, recipe: TrainingRecipe, batches: Batches, world: World) -> None:
        self.plan, self.recipe, self.batches, self.world = plan, recipe, batches, world
        self.logits = torch.zeros(plan.model.vocab_size, plan.model.vocab_size, dtype=torch.float64)
        self.step = self.num_left_out = 0
        self.detector = AnomalyDetector(recipe.policies, window=recipe.spike_window, deviations=recipe.spike_deviations)
        self.anomaly: StepAnomaly | None = None
        self.pause_s = float(os.environ.get("STAND_IN_PAUSE_S", "0"))
        if os.environ.get("STAND_IN_DIES_IN_START") == str(world.rank):
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("STAND_IN_REFUSES") == str(world.rank):
            raise InputError(f"rank {world.rank} refuses")

    def _trouble(self) -> None:
        """Before a step, of "RANK:STEP" in the environment: to hang, to stop, to fail, to wait for a file, to have no room."""
        moment = f"{self.world.rank}:{self.step + 1}"
        if os.environ.get("STAND_IN_HANGS") == moment:
            hang()
        if os.environ.get("STAND_IN_IS_FULL") == moment:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (1, hard)
            )  # no file may grow: the system refuses, as on a full disk
        if os.environ.get("STAND_IN_FAILS") == moment:
            raise InputError(f"rank {self.world.rank} fails")
        if os.environ.get("STAND_IN_IS_STOPPED") == moment:
            os.kill(os.getpid(), signal.SIGSTOP)
        if os.environ.get("STAND_IN_WAITS") == moment:
            print(f"step {self.step + 1}: rank {self.world.rank} waits for the file", file=sys.stderr, flush=True)
        while os.environ.get("STAND_IN_WAITS") == moment and not Path(os.environ["STAND_IN_GO"]).exists():
            time.sleep(0.02)

    step_graph = None

    def train_step(self) -> StepRecord:
        start = time.perf_counter()
        self._trouble()
        time.sleep(self.pause_s)
        step, num_targets = self.step, self.batches.num_targets(self.step)
        logits = self.logits.clone().requires_grad_()
        loss = torch.zeros((), dtype=torch.float64)
        for batch in self.batches.sequences(step, self.world.rank, self.world.size, self.plan.layout.micro_batch_seqs):
            loss = loss + summed_loss(logits, batch.inputs_BT, batch.targets_BT) / num_targets
        loss.backward()
        assert logits.grad is not None
        whole = torch.cat([loss.detach().reshape(1), logits.grad.flatten()])
        if self.world.size > 1:
            with wait_for_ranks("AllReduce of the gradients"):
                self.world.transport.world.all_reduce(whole).wait()
        whole *= self.spikes.get(step + 1, 1.0)
        self._update(float(whole[0]), whole[1:])
        rate = self._rate(step)
        noise = self._noise() if self.recipe.measures_noise_at(step) else {}
        return StepRecord(
            step=self.step, loss=float(whole[0]), grad_norm=float(whole[1:].norm()), learning_rate=rate,
            num_tokens=self.batches.global_batch_seqs(step) * SEQ_LEN, num_targets=num_targets,
            step_time_s=time.perf_counter() - start, seconds={"forward": 1e-4, "data": 1e-5}, **noise,
        )  # fmt: skip

    def _update(self, loss: float, gradient: torch.Tensor) -> None:
        rate, norm = self._rate(self.step), float(gradient.norm())
        self.step += 1
        self.anomaly = self.detector.check(self.step, loss, norm)
        if self.anomaly is not None:
            self.num_left_out += 1
            return
        self.detector.record(loss, norm)
        self.logits -= rate * gradient.reshape(self.logits.shape)

    def _noise(self) -> dict[str, float]:
        """Squared norms of a gradient of norm 1 at a noise scale of 64 tokens a step, and more on other ranks than the first."""
        noise = 64.0 * self.step * (1 + self.world.rank)
        return {
            "small_norm_squared": 1 + noise / 16,
            "big_norm_squared": 1 + noise / 32,
            "small_tokens": 16,
            "big_tokens": 32,
        }

    def _rate(self, step: int) -> float:
        return self.recipe.learning_rate_at(step, self.batches.global_batch_seqs(step) / self.plan.job.num_seqs)

    def resize(self, ramp: BatchRamp) -> None:
        self.batches.ramp = ramp

    def skip_to(self, step: int) -> None:
        self.num_left_out += step - self.step
        self.step = step

    def inspected_step(self) -> tuple[StepRecord, StepInspection]:
        peak = 1000 + self.world.rank
        memory = MeasuredMemory(peak_bytes=peak, at_peak={"parameters": peak}, largest={"parameters": peak})
        return self.train_step(), StepInspection(memory, Counter())

    def profiled_step(self) -> tuple[StepRecord, RankTrace]:
        record = self.train_step()
        return record, RankTrace(
            rank=self.world.rank, step=record.step, device="cpu", coordinate={"dp": self.world.rank}, begin_ns=0, step_ns=1000,
            offset_ns=0, error_ns=0, events=(),
        )  # fmt: skip

    def validation_loss(self, held_out: Batches) -> float:
        batch = held_out.batch(0)
        return float(summed_loss(self.logits, batch.inputs_BT, batch.targets_BT)) / held_out.num_targets(0)

    def state(self) -> dict[str, Any]:
        logits = TensorShard(tuple(self.logits.shape), (0, 0), self.logits)
        return {"logits": logits, "step": self.step, "num_left_out": self.num_left_out}

    def restore(self, values: Mapping[str, Any]) -> None:
        self.step, self.num_left_out = values["step"], values["num_left_out"]


def summed_loss(logits: torch.Tensor, inputs_BT: Any, targets_BT: Any) -> torch.Tensor:
    rows = logits[torch.from_numpy(inputs_BT).flatten()]
    return torch.nn.functional.cross_entropy(rows, torch.from_numpy(targets_BT).flatten(), reduction="sum")


def parts() -> RunComponents:
    return RunComponents(
        join=join, leave=world.leave_world, trainer=Bigram,
        checkpoints=lambda folder, recipe: Checkpointer(
            folder, keep=recipe.keep_checkpoints, keep_every=recipe.keep_every, timeout=timedelta(seconds=recipe.timeout_s)
        ),
        probe=lambda plan, world: {"products": 1e-3, "memory": 2e-3},
    )  # fmt: skip


if __name__ == "__main__":
    from shardwise import train

    arm()
    train.run_and_exit(lambda: train.rank_main(parts=parts()))
