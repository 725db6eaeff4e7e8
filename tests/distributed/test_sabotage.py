"""Faults between ranks are noticed: each sabotage of the engine gives numbers other than one process does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor
from training import Case, RunResult, plain, trained

from shardwise.layout.layout import Layout
from shardwise.run.kernels import experts
from shardwise.run.parallel.flat_parameters import FlatParameterGroup, WeightGatherer
from shardwise.run.parallel.gradient_buffers import GradientBuffer
from shardwise.run.parallel.mesh_collectives import MeshCollectives
from shardwise.run.rank_threads import run_rank_threads
from shardwise.sharding.spec import Axes


@dataclass
class Late:
    """A collective that does not begin before it is waited for."""

    begin: Callable[[], Any]

    def wait(self) -> None:
        self.begin().wait()


def gathers_come_late(patch: pytest.MonkeyPatch) -> None:
    """Harmless by itself: weights are present after the wait, and not before."""
    gather = MeshCollectives.all_gather

    def late(self: MeshCollectives, whole: Tensor, part: Tensor, axes: Axes, *carries: Any) -> Any:
        whole.zero_()
        return Late(lambda: gather(self, whole, part, axes))

    patch.setattr(MeshCollectives, "all_gather", late)


def dropped_wait(patch: pytest.MonkeyPatch) -> None:
    gathers_come_late(patch)
    require = WeightGatherer._require

    def forgetful(self: WeightGatherer, groups: Sequence[FlatParameterGroup]) -> None:
        if groups is not self.forward[1]:
            return require(self, groups)
        self._start(groups)
        for group in groups:
            self.pending.pop(id(group), None)

    patch.setattr(WeightGatherer, "_require", forgetful)


def dropped_reduction(patch: pytest.MonkeyPatch) -> None:
    send = GradientBuffer.send

    def forgetful(self: GradientBuffer) -> None:
        if "layers.1.wq" not in self.members:
            send(self)

    patch.setattr(GradientBuffer, "send", forgetful)


def wrong_axis(patch: pytest.MonkeyPatch) -> None:
    reduce = MeshCollectives.all_reduce

    def narrow(self: MeshCollectives, values: Tensor, axes: Axes, **carries: Any) -> Any:
        return reduce(self, values, axes[:1], **carries)

    patch.setattr(MeshCollectives, "all_reduce", narrow)


def scaled_expert_gradient(patch: pytest.MonkeyPatch) -> None:
    gradient = experts.expert_gradient

    def scaled(first_operand: Tensor, second_operand: Tensor, routing: Any, out: Tensor, **options: Any) -> Tensor:
        return gradient(first_operand, second_operand * 1.001, routing, out, **options)

    patch.setattr(experts, "expert_gradient", scaled)


def copies_counted(patch: pytest.MonkeyPatch) -> None:
    """Each rank's squares of gradients that several ranks have alike: a norm that is off by the number of ranks."""
    patch.setattr(FlatParameterGroup, "copies", lambda self, axes, among: 1)


SABOTAGES: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    sabotage.__name__: sabotage
    for sabotage in (
        gathers_come_late,
        dropped_wait,
        dropped_reduction,
        wrong_axis,
        scaled_expert_gradient,
        copies_counted,
    )
}
HYBRID = Case(layout=Layout(dp=2, fsdp=2))
SHARDED = Case(layout=Layout(fsdp=2, zero_stage=3, micro_batch_seqs=2))
CASES: Mapping[str, Case] = {
    "dropped_wait": SHARDED,
    "dropped_reduction": Case(layout=Layout(dp=2, micro_batch_seqs=2)),
    "wrong_axis": HYBRID,
    "scaled_expert_gradient": Case("routed", Layout(fsdp=2, ep=2, zero_stage=1, micro_batch_seqs=2)),
    "copies_counted": Case(layout=Layout(tp=2, sequence_parallel=True, micro_batch_seqs=2)),
}


def run_sabotaged(name: str, case: Case) -> list[RunResult]:
    """Run ranks with a changed engine."""
    with pytest.MonkeyPatch.context() as patch:
        SABOTAGES[name](patch)
        return run_rank_threads(trained, case.layout.num_devices, case)


def differs(actual: RunResult, expected: RunResult) -> bool:
    """Return whether gradient norms of the first step, whose weights are equal, differ by more than rounding."""
    return actual.norms[0] != pytest.approx(expected.norms[0], rel=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_every_sabotage_changes_the_norms(name: str) -> None:
    case = CASES[name]
    expected = plain(case)
    assert any(differs(actual, expected) for actual in run_sabotaged(name, case))


def test_a_gather_that_comes_late_is_waited_for() -> None:
    expected = plain(SHARDED)
    for actual in run_sabotaged("gathers_come_late", SHARDED):
        assert not differs(actual, expected)
        assert actual.losses == pytest.approx(expected.losses, rel=1e-12)
