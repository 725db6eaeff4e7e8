"""A simulated step: its schedule, hidden and exposed traffic, its memory, its critical path."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.pipeline.timeline import Durations, play_actions
from shardwise.present.traces import events, step_trace_text
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.price.layout_pricer import Pricing
from shardwise.price.simulation.critical_path import critical_passes
from shardwise.price.simulation.result import Simulation, simulate
from shardwise.price.simulation.simulated_step import StepSimulator, simulate_step
from shardwise.price.simulation.stage_passes import PassLists, StagePass, _delay_scatter_waits
from shardwise.price.simulation.streams import (
    StartTransfer,
    TimedKernel,
    Transfer,
    WaitTransfer,
    play_streams,
    started_transfers,
)
from shardwise.step.instructions import GATHER, GRADIENT
from shardwise.values.engine_policies import IssuePolicy
from shardwise.values.errors import InputError

MODEL = "llama-3-8b"


def simulation(
    layout: str, *, model: str = MODEL, cluster: str = "h100:16", tokens: int = 2**20, overlap: str = "list"
) -> Simulation:
    job = Job(global_batch_tokens=tokens, seq_len=4096)
    return simulate(Problem(load_model(model), load_cluster(cluster), job), Layout.parse(layout), overlap=overlap)


def pricing_of(layout: str) -> Pricing:
    job = Job(global_batch_tokens=2**20, seq_len=4096)
    return Pricing(Problem(load_model(MODEL), load_cluster("h100:16"), job), Layout.parse(layout))


V = "fsdp=4 pp=4 num_virtual_stages=2 zero_stage=1 schedule=zb_v"
LAYOUTS = [
    "fsdp=16", "fsdp=8 tp=2 zero_stage=1", "dp=2 fsdp=8 zero_stage=2", "fsdp=8 pp=2 zero_stage=1",
    "fsdp=4 pp=4 num_virtual_stages=2 zero_stage=1", "fsdp=4 pp=4 zero_stage=1 schedule=zb_h1",
    "fsdp=4 pp=4 zero_stage=1 schedule=dualpipe", "fsdp=4 pp=4 num_virtual_stages=2 zero_stage=1 schedule=dualpipe_v",
    "fsdp=4 pp=4 num_virtual_stages=2 zero_stage=1 schedule=interleaved_zb",
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_events_of_a_stream_do_not_overlap(layout: str) -> None:
    step = simulation(layout).step
    for rank in range(len(step.ranks)):
        streams: dict[str, list[tuple[float, float]]] = {}
        for event, start, end in events(step, rank):
            streams.setdefault(event.stream, []).append((start, end))
        assert "compute" in streams
        for name, times in streams.items():
            times.sort()
            for (_, end), (start, _) in pairwise(times):
                assert start >= end - 1e-9, (name, rank)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_critical_path_has_the_length_of_the_step(layout: str) -> None:
    """Each part of the path starts where the previous part ends."""
    simulated = simulation(layout)
    assert sum(part.seconds for part in simulated.critical_path) == pytest.approx(simulated.step_time_s, rel=1e-9)
    path = critical_passes(simulated.step)
    assert path[0].start == 0.0
    for before, after in pairwise(path):
        assert before.end + after.message_s == pytest.approx(after.start, abs=1e-9)
        assert after.message_s > 0.0 or before.rank == after.rank or simulated.step.message_s == 0.0
    for plays in simulated.step.slot_timelines:
        for played in {*plays}:
            chain = played.path()
            assert sum(event.end - event.start for event in chain) == pytest.approx(played.seconds, rel=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_seconds_of_a_rank_add_up(layout: str) -> None:
    simulated = simulation(layout)
    for rank in simulated.step.ranks:
        parts = sum(rank.computed.values()) + sum(rank.exposed.values()) + rank.bubble_s
        assert parts == pytest.approx(simulated.step_time_s, rel=1e-9)
        assert rank.bubble_s >= 0.0


@pytest.mark.parametrize("layout", ["tp=4 pp=4", "tp=2 pp=4 cp=2 num_virtual_stages=2", "tp=4 pp=4 schedule=zb_h2", V])
def test_the_simulated_schedule_equals_the_played_one(layout: str) -> None:
    """With the seconds of the simulated passes; the first and the last pass differ by collectives once per step."""
    step = simulation(layout).step
    by_kind: dict[str, dict[int, float]] = {}
    for rank, plays in enumerate(step.slot_timelines):
        for slot, played in zip(step.actions.order[rank], plays, strict=True):
            by_kind.setdefault(slot[0].kind, {})[slot[0].stage] = played.seconds
    stages = range(step.actions.num_stages)
    forward, backward, input_pass, weight = (
        tuple(by_kind[kind][stage] for stage in stages) if kind in by_kind else (0.0,) * len(stages) for kind in "FBIW"
    )
    durations = Durations(forward=forward, input=input_pass, weight=weight, backward=backward, message=step.message_s)
    line = play_actions(step.actions, durations)
    assert line.makespan == pytest.approx(max(ends[-1] for ends in step.clock.ends), rel=1e-12)
    assert [list(starts) for starts in line.starts] == [list(starts) for starts in step.clock.starts]


def test_weights_are_gathered_a_unit_ahead() -> None:
    """ZeRO-3: only the first layer waits for its weights, where a layer takes longer than the next one's gather."""
    step = simulation("fsdp=16").step
    forward = step.slot_timelines[0][0]
    first, second, *_ = (
        event for event in forward.events if event.work.unit == "block" and isinstance(event.work, Transfer)
    )
    layers = [event for event in forward.events if event.work.unit == "block" and isinstance(event.work, TimedKernel)]
    assert first.end <= layers[0].start + 1e-12
    assert second.start < layers[-1].end
    waited = [event for event in forward.path() if isinstance(event.work, Transfer) and event.work.unit != "head"]
    assert waited  # the head's gather takes longer than the last layer
    assert all(event.end <= layers[0].start + 1e-12 for event in waited)


def test_gradients_reduced_once_per_step_overlap_the_last_pass_only() -> None:
    """Data-parallel: a bucket is sent after its layer's kernels; those of the first layer and the embedding are exposed."""
    step = simulation("dp=16").step
    *earlier, last = (played for slot, played, _, _ in step.slots(0) if slot[0].kind == "B")
    assert not any(event.stream == "dp" for played in earlier for event in played.events)
    sent = [event for event in last.events if event.stream == "dp"]
    assert len(sent) == len(last.trailing) == 35  # of 32 layers, the embedding, the head's matrix and its norm
    hidden = sum(event.end - event.start for event in sent) - step.ranks[0].exposed["dp"]
    assert hidden > 0.8 * sum(event.end - event.start for event in sent)
    assert last.seconds == pytest.approx(earlier[0].seconds)


def test_reductions_after_the_backward_pass_are_exposed() -> None:
    simulator = StepSimulator(pricing_of("dp=16"), "list", 1.0)
    lists = PassLists(simulator.works, reduces_after=True)
    works = lists.engine_order(StagePass(simulator.stages[0], "B", last=True))
    last_kernel = max(n for n, work in enumerate(works) if isinstance(work, TimedKernel))
    sent = [work.transfer.unit for work in works[last_kernel + 1 :] if isinstance(work, StartTransfer)]
    assert (sent.count("head"), sent.count("block"), sent.count("embedding")) == (2, 32, 1)
    assert not any(isinstance(work, StartTransfer) and work.transfer.axis == "dp" for work in works[:last_kernel])
    assert len(play_streams([works]).trailing) == 35


def test_transfers_of_a_step_equal_the_estimates() -> None:
    """The transfers of all passes and updates add up to the estimate's exposed and hidden time."""
    for layout in ("fsdp=16", "dp=2 fsdp=4 tp=2 zero_stage=2", "fsdp=8 cp=2 zero_stage=1", "dp=4 fsdp=4 zero_stage=3"):
        job = Job(global_batch_tokens=2**20, seq_len=4096)
        cost = estimate(Problem(load_model(MODEL), load_cluster("h100:16"), job), Layout.parse(layout))
        priced = {
            axis: cost.time.get(axis, 0.0) + cost.hidden.get(axis, 0.0)
            for axis in ("tp", "cp", "fsdp", "dp", "control")
        }
        moved = dict.fromkeys(priced, 0.0)
        for event, start, end in events(simulation(layout).step, 0):
            if isinstance(event.work, Transfer):
                moved[event.work.axis] += end - start
        assert moved == pytest.approx(priced, rel=1e-9, abs=1e-12), layout


def test_uneven_virtual_stages_have_the_played_bubble() -> None:
    """Llama-3-405B on 16 stages of 7 virtual ones: 126 layers on 112, so some have two, and the others wait for them. The
    price, which leaves out the head (it shares a virtual stage with a layer), is two fifths above the closed form."""
    layout = "fsdp=128 tp=8 pp=16 num_virtual_stages=7 zero_stage=1"
    job = Job(global_batch_tokens=2**24, seq_len=8192)
    model, cluster = load_model("llama-3-405b"), load_cluster("h100:16384")
    simulated = simulate(Problem(model, cluster, job), Layout.parse(layout))
    cost = estimate(Problem(model, cluster, job), Layout.parse(layout))
    priced, closed = cost.time["bubble"] / (cost.step_time_s - cost.time["bubble"]), 15 / (7 * 16)
    assert priced == pytest.approx(1.4 * closed, rel=0.03)
    assert simulated.bubble > 1.5 * priced


def test_a_message_delays_the_next_stage() -> None:
    step = simulation("tp=4 pp=4").step
    message_s = step.message_s
    assert message_s > 0.0
    (start, *_), (end, *_) = step.clock.starts[1], step.clock.ends[0]
    assert start == end + message_s


def test_simulated_memory_equals_the_estimates() -> None:
    """To the byte with whole backward passes on even stages; a zero-bubble schedule has no more, uneven stages differ."""
    job = Job(global_batch_tokens=2**20, seq_len=4096)
    for layout in (
        "fsdp=16",
        "fsdp=8 pp=2 zero_stage=1",
        "fsdp=4 pp=4 zero_stage=1 schedule=afab",
        "fsdp=16 offload=both",
    ):
        cost = estimate(Problem(load_model(MODEL), load_cluster("h100:16"), job), Layout.parse(layout))
        assert simulation(layout).peak_bytes == pytest.approx(cost.memory_bytes, rel=1e-9), layout
    for layout in ("fsdp=4 pp=4 zero_stage=1 schedule=zb_h1", "fsdp=4 pp=4 zero_stage=1 schedule=zb_h2", V):
        cost = estimate(Problem(load_model(MODEL), load_cluster("h100:16"), job), Layout.parse(layout))
        assert 0.99 * cost.memory_bytes < simulation(layout).peak_bytes <= cost.memory_bytes, layout


def test_memory_over_time_starts_and_ends_with_the_state() -> None:
    for memory in simulation("fsdp=8 pp=2 zero_stage=1").memories:
        assert memory.curve[0][1] == memory.constant_bytes
        assert memory.curve[-1][1] == pytest.approx(memory.constant_bytes)
        times = [when for when, _ in memory.curve]
        assert times == sorted(times)
        assert memory.peak_bytes > 1.1 * memory.constant_bytes


def test_contention_slows_kernels_beside_traffic() -> None:
    pricing = Pricing(
        Problem(load_model(MODEL), load_cluster("h100:16"), Job(global_batch_tokens=2**20, seq_len=4096)),
        Layout.parse("fsdp=16"),
    )
    free, slow = simulate_step(pricing), simulate_step(pricing, contention=1.2)
    moved = sum(end - start for event, start, end in events(free, 0) if isinstance(event.work, Transfer))
    more = sum(slow.ranks[0].computed.values()) - sum(free.ranks[0].computed.values())
    assert 0.0 < more < 0.2 * moved + 1e-9


@pytest.mark.parametrize("layout", ["fsdp=8", "tp=2 fsdp=4", "dp=8", "fsdp=4 pp=2 zero_stage=1"])
@pytest.mark.parametrize("overlap", ["sum", "list"])
def test_a_partial_last_micro_batch_has_shorter_passes(layout: str, overlap: str) -> None:
    """Replicas of 12 sequences in micro-batches of 8: `train` computes 8, then 4, its last passes in half of the time; megatron's
    are all alike. Without a pipeline, kernels take the estimate's time."""
    steps = {}
    for stack in ("shardwise", "megatron"):
        degrees = Layout.parse(layout)
        job = Job(global_batch_tokens=12 * 1024 * degrees.num_replicas, seq_len=1024, overlap="sum", loss=None)
        problem = Problem(load_model("llama-3.2-1b"), load_cluster("h100:8", stack=stack), job)
        steps[stack] = simulate(problem, Layout.parse(f"{layout} micro_batch_seqs=8"), overlap=overlap)
    short, full = steps["shardwise"], steps["megatron"]
    forwards = [played for slot, played, _, _ in short.step.slots(0) if slot[0].kind == "F"]
    assert forwards[-1].computed["forward"] == pytest.approx(0.5 * forwards[0].computed["forward"])
    plain = [played for slot, played, _, _ in full.step.slots(0) if slot[0].kind == "F"]
    assert plain[-1].computed["forward"] == pytest.approx(plain[0].computed["forward"])
    if "pp" not in layout:
        kernels = ("forward", "backward", "optimizer")
        assert [short.time[term] for term in kernels] == pytest.approx([short.estimate.time[term] for term in kernels])
    if overlap == "list":
        gathers = [
            [
                event.end - event.start
                for event in played.events
                if isinstance(event.work, Transfer) and event.work.role == GATHER
            ]
            for played in (forwards[0], forwards[-1])
        ]
        assert gathers[0] == pytest.approx(gathers[1]), "weights must be gathered in full"


def test_a_dualpipe_pair_runs_both_passes_at_once() -> None:
    step = simulation("fsdp=4 pp=4 zero_stage=1 schedule=dualpipe").step
    pairs = [played for slot, played, _, _ in step.slots(0) if len(slot) == 2]
    assert pairs
    computed = {phase for pair in pairs for phase in pair.computed}
    assert {"forward", "backward"} <= computed


def test_adapters_borrowed_weights_and_mixed_recomputation_are_simulated() -> None:
    """Modules of multi-token prediction on the last stage, tied embeddings at both ends."""
    deep = simulation("fsdp=64 pp=8 ep=64 recompute=full", model="deepseek-v3", cluster="h100:512", tokens=2**22)
    assert "predict" in {unit for stage in deep.step.stages for unit in stage.units}
    assert "embedding" in deep.step.stages[-1].owned_units
    tied = simulation("pp=2 dp=4", model="qwen2.5-0.5b", cluster="h100:8")
    assert all(
        any(event.work.name == "all_reduce of both copies" for event in update.events) for update in tied.step.updates
    )
    assert set(tied.exposed) <= {"pp", "dp", "control"}


def test_layouts_that_cannot_be_simulated_are_refused() -> None:
    with pytest.raises(InputError, match="overlap: found 'most'"):
        simulation("fsdp=16", overlap="most")
    with pytest.raises(InputError, match=r"contention: found 0\.5; a number of at least 1"):
        simulate_step(pricing_of("fsdp=16"), contention=0.5)
    with pytest.raises(InputError, match="devices"):
        simulation("fsdp=8")


def test_each_unit_has_separate_work() -> None:
    """Repeated layers have separate transfers, so that none waits for those of another layer."""
    simulator = StepSimulator(pricing_of("fsdp=16"), "list", 1.0)
    every = list(started_transfers(simulator.lists.engine_order(StagePass(simulator.stages[0], "F"))))
    assert len(every) == len({*map(id, every)}) == 35


def test_a_trace_has_every_kernel_and_transfer() -> None:
    step = simulation("fsdp=8 pp=2 zero_stage=1", tokens=2**17).step
    count = sum(len(played.events) for plays in step.slot_timelines for played in plays) + sum(
        len(update.events) for update in step.updates
    )
    passes = sum(len(slot) for slots in step.actions.order for slot in slots)
    assert step_trace_text(step).count('"ph": "X"') == count + passes


def test_gradients_overlap_the_backward_pass_unless_the_policy_reduces_after_it() -> None:
    job, layout = Job(global_batch_tokens=2**20, seq_len=4096), Layout.parse("dp=16")
    overlapped, after = (
        Simulation(
            simulate_step(
                Pricing(
                    Problem(load_model(MODEL), load_cluster("h100:16"), job), layout, IssuePolicy(reduction=reduction)
                )
            )
        )
        for reduction in ("bucketed", "after")
    )
    assert after.exposed["dp"] > 2 * overlapped.exposed["dp"]
    assert after.step_time_s - overlapped.step_time_s == pytest.approx(
        after.exposed["dp"] - overlapped.exposed["dp"], rel=0.05
    )


def test_collectives_in_pieces_do_not_wait_for_scattered_gradients() -> None:
    """A scatter of gradients is waited for when the next scatter starts; other transfers may start before."""
    first, second = (
        Transfer(seconds=1.0, axis="fsdp", unit=unit, name="g", role=GRADIENT, waits_for_next=True)
        for unit in ("layer 1", "layer 0")
    )
    piece = Transfer(seconds=1.0, axis="tp", unit="layer 0", name="piece")
    works = [
        StartTransfer(first, "fsdp"),
        WaitTransfer(first),
        StartTransfer(piece, "tp"),
        WaitTransfer(piece),
        StartTransfer(second, "fsdp"),
        WaitTransfer(second),
    ]
    assert list(_delay_scatter_waits(works)) == [
        StartTransfer(first, "fsdp"), StartTransfer(piece, "tp"), WaitTransfer(piece), WaitTransfer(first),
        StartTransfer(second, "fsdp"), WaitTransfer(second),
    ]  # fmt: skip
