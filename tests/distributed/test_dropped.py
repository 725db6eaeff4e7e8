"""Every collective of a step matters: without any one of them, loss or norm differ from those of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from training import Case, engine_of, plain, run_step

from shardwise.layout.layout import Layout
from shardwise.run.engine import expert_parallel
from shardwise.run.parallel.mesh_collectives import MeshCollectives
from shardwise.run.rank_threads import RankThreadOptions, run_rank_threads
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.sharding.spec import Axes

CASES = {
    "tp 2 sp": Case(layout=Layout(tp=2, sequence_parallel=True, micro_batch_seqs=4), num_seqs=4),
    "tp 2": Case("biased", Layout(tp=2, micro_batch_seqs=4), num_seqs=4),
    "cp 2": Case(layout=Layout(cp=2, micro_batch_seqs=4, zero_stage=3), num_seqs=4),
    "cp 2 zigzag": Case(layout=Layout(cp=2, cp_variant="zigzag", micro_batch_seqs=4), num_seqs=4),
    "cp 2 ulysses": Case(layout=Layout(cp=2, cp_variant="ulysses", micro_batch_seqs=4), num_seqs=4),
    "ep 2": Case("routed", Layout(fsdp=2, ep=2, zero_stage=1, micro_batch_seqs=2), num_seqs=4),
    "ep 2 tp 2": Case("routed", Layout(fsdp=2, ep=2, tp=2, zero_stage=2), num_seqs=2),
}


class Dropped(threading.local):
    """Collectives of a rank in the order in which it issues them; the one with the number `place` does not leave it."""

    place, count, telling = 0, 0, False

    def drops(self) -> bool:
        """Return whether the next collective is dropped. Row counts are not numbered: a process with wrong ones ends."""
        if self.telling:
            return False
        self.count += 1
        return self.count - 1 == self.place


class _Done:
    def wait(self) -> None:
        """Nothing was sent."""


def patch_exchange(dropped: Dropped, patch: pytest.MonkeyPatch) -> None:
    """Have the exchange leave out a collective: the process has its own part, wherever others' would come."""

    def wrapped(name: str, local: Callable[..., None]) -> None:
        issue = getattr(MeshCollectives, name)

        def issued(self: MeshCollectives, *operands: Any, **options: Any) -> Any:
            if not dropped.drops():
                return issue(self, *operands, **options)
            local(self, *operands, **options)
            return _Done()

        patch.setattr(MeshCollectives, name, issued)

    wrapped("all_reduce", lambda self, values, axes, reduction="sum", carries=None: None)
    wrapped(
        "all_gather", lambda self, whole, part, axes, carries=None: whole.view(-1, part.numel()).copy_(part.view(-1))
    )
    wrapped("reduce_scatter", _own_part)
    wrapped("all_to_all", lambda self, received, sent, axes, rows=None: _as_sent(received, sent))
    wrapped("shift", lambda self, received, sent, axes: _all_as_sent(received, sent))
    patch.setattr(MeshCollectives, "sum_and_wait", _sum_now)
    counts = expert_parallel.start_counts

    def telling(*operands: Any, **options: Any) -> Any:
        dropped.telling = True
        try:
            return counts(*operands, **options)
        finally:
            dropped.telling = False

    patch.setattr(expert_parallel, "start_counts", telling)


def _own_part(self: MeshCollectives, part: Tensor, whole: Tensor, axes: Axes, carries: object = None) -> None:
    place = self.world.position(axes)
    part.view(-1).copy_(whole.view(-1)[place * part.numel() : (place + 1) * part.numel()])


def _sum_now(self: MeshCollectives, values: Tensor, axes: Axes) -> Tensor:
    if axes:
        self.all_reduce(values, axes).wait()
    return values


def _all_as_sent(received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
    for target, source in zip(received, sent, strict=True):
        target.copy_(source)


def _as_sent(received: Tensor, sent: Tensor) -> None:
    received.zero_()
    size = min(received.numel(), sent.numel())
    received.view(-1)[:size].copy_(sent.reshape(-1)[:size])


def without_each(case: Case, expected: Sequence[float]) -> tuple[list[bool], list[float]]:
    """Return the result of `steps` on the first rank."""
    with pytest.MonkeyPatch.context() as patch:
        dropped = Dropped()
        patch_exchange(dropped, patch)
        outcome: tuple[list[bool], list[float]] = run_rank_threads(
            steps, case.layout.num_devices, case, expected, dropped, options=RankThreadOptions(copies_arguments=False)
        )[0]
    return outcome


def steps(case: Case, expected: Sequence[float], leaving: Dropped) -> tuple[list[bool], list[float]]:
    """Of each collective of the first step, whether loss and norm of two steps are `right` without it; and what they are with
    all of them.

    The second step is taken where the first process has noticed nothing in the first.
    """
    dropped, place = [], 0
    while True:
        engine = engine_of(case)
        leaving.place, leaving.count = place, 0
        first = run_step(engine, case, 0)
        count, leaving.place = leaving.count, -1
        numbers = [first.loss.item(), first.norm.item()]
        if same_for_all(engine, numbers == pytest.approx(expected[:2], rel=1e-10)):
            second = run_step(engine, case, 1)
            numbers += [second.loss.item(), second.norm.item()]
        if place == count:
            return dropped, numbers
        dropped.append(numbers == pytest.approx(expected, rel=1e-10))
        place += 1


def same_for_all(engine: TrainingEngine, local: bool) -> bool:
    """Return the first rank's value on every rank."""
    agreed = torch.tensor(local)
    engine.world.transport.world.broadcast(agreed, 0).wait()
    return bool(agreed)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("tp 2 sp", "cp 2 zigzag", "ep 2") else pytest.mark.matrix)
        for name in CASES
    ],
)
def test_dropping_any_collective_changes_loss_or_norm(name: str) -> None:
    case = CASES[name]
    reference = plain(case)
    expected = [number for step in (0, 1) for number in (reference.losses[step], reference.norms[step])]
    dropped, whole = without_each(case, expected)
    assert whole == pytest.approx(expected, rel=1e-12)
    assert len(dropped) > 5
    assert not any(dropped), [number for number, same in enumerate(dropped) if same]
