"""`verify` finds faults that are planted in the engine, each in a plan whose layout runs the faulty code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from torch import Tensor

import shardwise as sw
from shardwise.layout.layout import Layout
from shardwise.run.engine.micro_batch import MicroBatchInputs
from shardwise.run.parallel.flat_parameters import FlatParameterGroup, WeightGatherer
from shardwise.run.parallel.gradient_buffers import GradientBuffer
from shardwise.run.parallel.mesh_collectives import MeshCollectives
from shardwise.search.plan import plan_layout
from shardwise.sharding.spec import Axes
from shardwise.verify.training.plan_verification import PlanVerification, verify_plan
from shardwise.verify.training.training_case import MIN_MICRO_BATCHES, small_recipe


class Finished:
    """A collective that is done, or was never issued."""

    is_done = True

    def wait(self) -> None:
        pass


def weights_read_before_they_arrive(patch: pytest.MonkeyPatch) -> None:
    gather = MeshCollectives.all_gather

    class Late(NamedTuple):
        begin: Callable[[], Any]

        def wait(self) -> None:
            self.begin().wait()

    def gather_late(self: MeshCollectives, full: Tensor, part: Tensor, axes: Axes, *carries: Any) -> Late:
        full.zero_()
        return Late(lambda: gather(self, full, part, axes))

    def require(self: WeightGatherer, groups: Any) -> None:
        self._start(groups)
        for group in groups:
            pending = self.pending.pop(id(group), None)
            if pending and groups is not self.forward[1]:
                pending.wait()

    patch.setattr(MeshCollectives, "all_gather", gather_late)
    patch.setattr(WeightGatherer, "_require", require)


def gradients_of_a_bucket_not_reduced(patch: pytest.MonkeyPatch) -> None:
    send = GradientBuffer.send
    patch.setattr(GradientBuffer, "send", lambda self: None if "layers.1.wq" in self.members else send(self))


def gradients_reduced_over_the_first_axis_only(patch: pytest.MonkeyPatch) -> None:
    reduce = MeshCollectives.all_reduce
    patch.setattr(
        MeshCollectives, "all_reduce", lambda self, tensor, axes, **options: reduce(self, tensor, axes[:1], **options)
    )


class DamagedOnArrival(NamedTuple):
    """A collective whose last row is lost."""

    work: Any
    received: Tensor

    def wait(self) -> None:
        self.work.wait()
        if self.received.dim() > 1:  # rows, not how many there are
            self.received[-1:] = 0


def row_lost_on_its_way_to_experts(patch: pytest.MonkeyPatch) -> None:
    exchange = MeshCollectives.all_to_all

    def lose_last_row(self: MeshCollectives, received: Tensor, *arguments: Any, **options: Any) -> DamagedOnArrival:
        return DamagedOnArrival(exchange(self, received, *arguments, **options), received)

    patch.setattr(MeshCollectives, "all_to_all", lose_last_row)


def copies_counted_in_the_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlatParameterGroup, "copies", lambda self, axes, reduced_axes: 1)


def gradients_averaged(patch: pytest.MonkeyPatch) -> None:
    scatter = GradientBuffer._scatter

    def scatter_average(self: GradientBuffer, gradients: Tensor, axes: Axes) -> None:
        scatter(self, gradients / 2, axes)

    patch.setattr(GradientBuffer, "_scatter", scatter_average)


def updated_weights_not_gathered(patch: pytest.MonkeyPatch) -> None:
    gather = MeshCollectives.all_gather

    def gather_first(self: MeshCollectives, full: Tensor, part: Tensor, axes: Axes, *carries: Any) -> Any:
        return Finished() if carries else gather(self, full, part, axes)  # initial weights carry no label

    patch.setattr(MeshCollectives, "all_gather", gather_first)


def message_to_another_stage_damaged(patch: pytest.MonkeyPatch) -> None:
    send = MeshCollectives.send

    def send_without_last_feature(self: MeshCollectives, tensor: Tensor, peer: int, axes: Axes) -> Any:
        damaged = tensor.clone()
        damaged[..., -1] = 0
        return send(self, damaged, peer, axes)

    patch.setattr(MeshCollectives, "send", send_without_last_feature)


def positions_from_zero_on_each_rank(patch: pytest.MonkeyPatch) -> None:
    cut = MicroBatchInputs.cut

    def cut_from_zero(self: MicroBatchInputs, name: str, axes: Axes) -> Tensor:
        values = cut(self, name, axes)
        return values - values[..., :1] if name == "positions" else values

    patch.setattr(MicroBatchInputs, "cut", cut_from_zero)


def master_weights_never_published(patch: pytest.MonkeyPatch) -> None:
    """On more than one rank; initial weights are published. In float64 there are no master weights."""
    publish, published = FlatParameterGroup.publish, set[int]()

    def publish_once(self: FlatParameterGroup) -> None:
        if self.world.size == 1 or id(self) not in published:
            published.add(id(self))
            publish(self)

    patch.setattr(FlatParameterGroup, "publish", publish_once)


def fifth_micro_batch_overwrites(patch: pytest.MonkeyPatch) -> None:
    """In a single process too."""
    accumulates, begin_step, begin_pass = (
        GradientBuffer.accumulates, GradientBuffer.begin_step, GradientBuffer.begin_pass,
    )  # fmt: skip
    passes: dict[GradientBuffer, int] = {}

    def count_from_zero(self: GradientBuffer, num_passes: int, *, measured: bool) -> None:
        passes[self] = 0
        begin_step(self, num_passes, measured=measured)

    def count(self: GradientBuffer, uses: Any) -> None:
        passes[self] += 1
        begin_pass(self, uses)

    patch.setattr(GradientBuffer, "begin_step", count_from_zero)
    patch.setattr(GradientBuffer, "begin_pass", count)
    patch.setattr(
        GradientBuffer, "accumulates",
        lambda self, name: accumulates(self, name) and passes[self] != MIN_MICRO_BATCHES,
    )  # fmt: skip


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], tuple[str, str]] = {
    weights_read_before_they_arrive: ("llama-3-8b", "fsdp=2 zero_stage=3"),
    gradients_of_a_bucket_not_reduced: ("llama-3-8b", "dp=2"),
    gradients_reduced_over_the_first_axis_only: ("llama-3-8b", "dp=2 fsdp=2"),
    row_lost_on_its_way_to_experts: ("mixtral-8x7b", "fsdp=2 ep=2 zero_stage=1"),
    copies_counted_in_the_norm: ("llama-3-8b", "tp=2"),
    gradients_averaged: ("llama-3-8b", "fsdp=2 zero_stage=2"),
    updated_weights_not_gathered: ("llama-3-8b", "fsdp=2 zero_stage=1"),
    message_to_another_stage_damaged: ("llama-3-8b", "pp=2"),
    positions_from_zero_on_each_rank: ("llama-3-8b", "cp=2 cp_variant=ring"),
    master_weights_never_published: ("llama-3-8b", "dp=2"),
    fifth_micro_batch_overwrites: ("llama-3-8b", "dp=2"),
}


def run_verify(model: str, layout: str, precision: str = "bf16", optimizer: str = "adamw") -> PlanVerification:
    parsed = Layout.parse(layout)
    job = sw.Job(global_batch_tokens=2**16, seq_len=2**10, precision=precision, optimizer=optimizer)
    plan = plan_layout(sw.load_model(model), sw.load_cluster(f"h100:{parsed.num_devices}"), job, parsed)
    return verify_plan(plan, small_recipe(plan, 2, 0, []))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert not run_verify(*FAULTS[fault]).ok


@pytest.mark.parametrize(("model", "layout"), sorted(set(FAULTS.values())))
def test_without_a_fault_the_layout_trains(model: str, layout: str) -> None:
    verification = run_verify(model, layout)
    assert verification.ok
    assert {name: ratio < 1.7 for name, ratio in verification.rounding.items()} == dict.fromkeys(
        verification.rounding, True
    )


@pytest.mark.parametrize("precision", ["fp8_current", "bf16_bf16_state", "fp16"])
def test_other_recipes_train(precision: str) -> None:
    verification = run_verify("llama-3-8b", "dp=2", precision)
    assert verification.ok
    assert verification.meshes[0].precision.precision == precision


def test_a_rank_with_nothing_but_padding_trains() -> None:
    """Blocks of 256 moments leave the last of four ranks no parameter of a model so small."""
    assert run_verify("llama-3-8b", "fsdp=4 zero_stage=3", optimizer="adamw_8bit").ok
