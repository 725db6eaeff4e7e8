"""Each collective of a transport, on threads and on processes of gloo; and the engine on processes over each axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equality_cases import CASES
from harness import run_processes
from test_equality import compare
from training import Case, plain, put_together, trained

from shardwise.layout.layout import Layout
from shardwise.run.faults.agreement import all_gather_ints
from shardwise.run.parallel.world import World
from shardwise.run.rank_threads import RankThreadOptions, run_rank_threads
from shardwise.run.trainer.step_inspector import CollectiveCapture
from shardwise.run.transport.current import current_transport
from shardwise.run.transport.interface import CollectiveGroup, PeerTensor
from shardwise.run.transport.process_groups import ProcessGroup
from shardwise.run.transport.thread_groups import EarlyWriteError, MismatchError
from shardwise.run.transport.thread_scheduler import DeadlockError
from shardwise.sharding.collectives import CollectiveKind, IssuedCollective
from shardwise.verify.training.compare_runs import collective_differences

SIZE = 4
RUNS = {"threads": run_rank_threads, "processes": run_processes}


def own_values(rank: int) -> torch.Tensor:
    """Return eight values that differ between ranks."""
    return torch.arange(8, dtype=torch.float64) + 10 * rank


def every_collective() -> dict[str, list[float]]:
    """Return the result of each collective of all ranks, in the order 3, 1, 0, 2, on this rank."""
    transport = current_transport()
    group = transport.new_group([[3, 1, 0, 2]])
    position = group.ranks.index(transport.rank)
    results = {}
    for name, values in collectives(group, position, own_values(transport.rank)).items():
        results[name] = values.tolist()
    group.close()
    return results


def collectives(group: CollectiveGroup, position: int, values: torch.Tensor) -> dict[str, torch.Tensor]:
    total, largest, first = values.clone(), values.clone(), values.clone()
    whole, part, received, uneven = values.new_empty(32), values.new_empty(2), values.new_empty(8), values.new_empty(6)
    group.all_reduce(total).wait()
    group.all_reduce(largest, "max").wait()
    group.all_gather(whole, values).wait()
    group.reduce_scatter(part, values).wait()
    group.all_to_all(received, values, None, None).wait()
    rows = [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]]  # from each position, to each
    columns = [row[position] for row in rows]
    group.all_to_all(uneven, values[:6].clone(), columns, rows[position]).wait()
    group.broadcast(first, 1).wait()
    gathered = [torch.empty_like(values) for _ in range(SIZE)] if position == 0 else None
    group.gather(gathered, values).wait()
    scattered, parts = values.new_empty(2), list(torch.split(values, 2)) if position == 0 else None
    group.scatter(scattered, parts).wait()
    shifted, messages = values.new_empty(8), [PeerTensor(values, (position + 1) % SIZE)]
    for work in group.exchange(messages, [PeerTensor(shifted, (position - 1) % SIZE)]):
        work.wait()
    passed = values.clone()
    works = [group.send(values, 1)] if position == 0 else [group.receive(passed, 0)] if position == 1 else []
    for work in works:
        work.wait()
    return {
        "sum": total, "max": largest, "all_gather": whole, "reduce_scatter": part, "all_to_all": received, "uneven": uneven,
        "broadcast": first, "gather": torch.cat(gathered) if gathered else values.new_empty(0), "scatter": scattered,
        "exchange": shifted, "message": passed,
    }  # fmt: skip


def expected_values(position: int) -> dict[str, list[float]]:
    """The same by slices of a matrix of all ranks' values, a row for each position."""
    matrix = torch.stack([own_values(rank) for rank in (3, 1, 0, 2)])
    uneven = [matrix[peer][start : start + (peer + position) % 4] for peer, start in enumerate(_starts(position))]
    return {
        "sum": matrix.sum(0).tolist(), "max": matrix.amax(0).tolist(), "all_gather": matrix.flatten().tolist(),
        "reduce_scatter": matrix.sum(0)[2 * position : 2 * position + 2].tolist(),
        "all_to_all": matrix[:, 2 * position : 2 * position + 2].flatten().tolist(), "uneven": torch.cat(uneven).tolist(),
        "broadcast": matrix[1].tolist(), "gather": matrix.flatten().tolist() if position == 0 else [],
        "scatter": matrix[0][2 * position : 2 * position + 2].tolist(), "exchange": matrix[position - 1].tolist(),
        "message": matrix[0 if position == 1 else position].tolist(),
    }  # fmt: skip


def _starts(position: int) -> list[int]:
    """Where the rows for a position begin among those that each peer sends: a peer sends (peer + target) mod 4 to a target."""
    return [sum((peer + target) % 4 for target in range(position)) for peer in range(SIZE)]


@pytest.mark.parametrize("run", RUNS)
def test_collectives_equal_slices_of_the_matrix(run: str) -> None:
    results = RUNS[run](every_collective, SIZE)
    for rank, result in enumerate(results):
        assert result == expected_values([3, 1, 0, 2].index(rank)), f"rank {rank}"


AXES = (
    "2 bucketed", "2 zero-1", "2 zero-2", "2 zero-3", "tp 2 sp dp 2", "cp 4 ring", "cp 2 ulysses", "routed ep 4 zero-2",
    "pp 2 1f1b", "pp 2 dualpipe zero-2",
)  # fmt: skip
ALIKE = ("2 zero-1", "2 zero-2")  # which issue no collective that others do not: by `make matrix` alone


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix if name in ALIKE else []) for name in AXES]
)
def test_processes_train_as_one_over_each_axis(name: str) -> None:
    case = CASES[name]
    ranks = put_together(run_processes(trained, case.layout.num_devices, case))
    for result in ranks:
        compare(result, plain(case))
    assert collective_differences(case.small(), [result.issued for result in ranks]) == ()


def agree_within_a_step() -> tuple[list[IssuedCollective], Counter[IssuedCollective], str]:
    """What is captured where ranks exchange what each has found, of an AllReduce over an axis, and of an operation that the
    engine does not issue."""
    world = World(Case(layout=Layout(dp=2)).instance().mesh)
    group = world.group(("dp",))
    with CollectiveCapture(world) as capture:
        all_gather_ints(world, [world.rank], "what each rank finds")
        agreed = list(capture.sequence)
        group.all_reduce(torch.zeros(3)).wait()
        reduced, problem = capture.counts, ""
        if isinstance(group, ProcessGroup):
            try:
                dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.zeros(1), group=group.group)
            except RuntimeError as error:
                problem = str(error)
    return agreed, reduced, problem


@pytest.mark.parametrize("run", RUNS)
def test_agreement_of_ranks_is_not_captured(run: str) -> None:
    for agreed, reduced, problem in RUNS[run](agree_within_a_step, 2):
        assert agreed == []
        assert reduced == Counter([IssuedCollective(CollectiveKind.ALL_REDUCE, ("dp",), "fp32", 12, "")])
        if run == "processes":
            assert problem == "capture: allgather_ is a collective that the engine does not issue"


def one_leaves_out_a_collective() -> None:
    transport = current_transport()
    if transport.rank != 1:
        transport.world.all_reduce(torch.zeros(4)).wait()
    transport.world.all_gather(torch.zeros(4), torch.zeros(2)).wait()


def both_receive_first() -> None:
    transport = current_transport()
    peer, values = 1 - transport.rank, torch.zeros(3)
    transport.world.receive(values, peer).wait()
    transport.world.send(values, peer).wait()


def one_ends_early() -> None:
    transport = current_transport()
    if transport.rank == 0:
        transport.world.all_reduce(torch.zeros(1)).wait()


def read_before_the_wait() -> float:
    values = torch.ones(2)
    work = current_transport().world.all_reduce(values)
    early = float(values.sum())
    work.wait()
    return early


def written_before_the_wait() -> None:
    part, whole = torch.ones(2), torch.empty(4)
    work = current_transport().world.all_gather(whole, part)
    part.zero_()
    work.wait()


def never_waited_for() -> None:
    current_transport().world.all_reduce(torch.zeros(1))


def fails_on_one() -> None:
    transport = current_transport()
    if transport.rank == 1:
        raise ValueError("the second rank fails")
    transport.world.all_reduce(torch.zeros(1)).wait()


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (one_leaves_out_a_collective, MismatchError, r"issued all_(reduce\(sum, float32, 4\)|gather\(float32, 2\)), rank"),
        (both_receive_first, DeadlockError, r"rank 0: waits to receive message 0 .* from rank 1\n.*rank 1: waits to receive"),
        (one_ends_early, DeadlockError, r"rank 0: waits in all_reduce.*for ranks \[1\]\n  rank 1: ended"),
        (written_before_the_wait, EarlyWriteError, "an input was written before the wait for it: waits in all_gather"),
        (never_waited_for, RuntimeError, "1 operations were never waited for"),
        (fails_on_one, ValueError, "the second rank fails"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"is_cooperative": False}], ids=["in turn", "drawn", "at once"])
def test_faults_are_found_by_name(
    function: Callable[[], None], error: type[Exception], text: str, options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=text):
        run_rank_threads(function, 2, options=RankThreadOptions(**options))


def test_outputs_are_not_there_before_the_wait() -> None:
    assert run_rank_threads(read_before_the_wait, 2) == pytest.approx([float("nan")] * 2, nan_ok=True)


def draws_a_number() -> None:
    torch.rand(1)


def test_state_that_threads_share_may_not_be_changed() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="ranks changed state that all threads share: torch random generator"):
        run_rank_threads(draws_a_number, 2)
    torch.set_rng_state(before)
