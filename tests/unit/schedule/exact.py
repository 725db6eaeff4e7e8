"""The least makespan of F, I and W on few stages, by an exhaustive search over orders: the reference for `zb_auto`.

States that have run the same passes are compared: a state is dominated by another whose ranks are free and whose messages
arrive no later. Micro-batches are equal, so they come in order. States that cannot beat a known makespan are left out. It
shares no code with `zb_auto`.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.pipeline.timeline import Durations

Counts = tuple[tuple[int, int, int], ...]  # of each rank: forward passes, inputs', weights'
Times = tuple[float, ...]  # when each rank is free, then arrivals of messages in transit


def least_makespan(p: int, m: int, durations: Durations, limit: int, known_makespan: float) -> float:
    """The least makespan with at most `limit` micro-batches in flight on a rank; `known_makespan` if none is below it."""
    seconds = tuple(zip(durations.forward, durations.input, durations.weight, strict=True))
    layer: dict[Counts, list[Times]] = {((0, 0, 0),) * p: [(0.0,) * p]}
    for _ in range(3 * p * m):
        following: dict[Counts, list[Times]] = {}
        for counts, fronts in layer.items():
            for times in fronts:
                for after, later in _next(p, m, seconds, durations.message, limit, counts, times):
                    if _bound(p, m, seconds, after, later) < known_makespan - 1e-9:
                        _keep(following.setdefault(after, []), later)
        layer = following
    return min((max(times[:p]) for fronts in layer.values() for times in fronts), default=known_makespan)


def _keep(fronts: list[Times], times: Times) -> None:
    """Add times to the front unless dominated, and remove those that they dominate."""
    if not any(all(a <= b for a, b in zip(front, times, strict=True)) for front in fronts):
        fronts[:] = [front for front in fronts if not all(a <= b for a, b in zip(times, front, strict=True))]
        fronts.append(times)


def _split(p: int, counts: Counts, times: Times) -> tuple[list[float], list[list[float]], list[list[float]]]:
    """Times at which ranks are free; for each rank the ends of forward and input passes that it has not used yet."""
    free, pending = list(times[:p]), list(times[p:])
    forward: list[list[float]] = [[] for _ in range(p)]
    inputs: list[list[float]] = [[] for _ in range(p)]
    for rank in range(p):
        if rank:
            number = counts[rank - 1][0] - counts[rank][0]
            forward[rank], pending = pending[:number], pending[number:]
        number = (counts[rank + 1][1] if rank < p - 1 else counts[rank][0]) - counts[rank][1]
        inputs[rank], pending = pending[:number], pending[number:]
    return free, forward, inputs


def _next(
    p: int, m: int, seconds: tuple[tuple[float, float, float], ...], message: float, limit: int, counts: Counts, times: Times
) -> Iterator[tuple[Counts, Times]]:  # fmt: skip
    for rank, (forward, inputs, weights) in enumerate(counts):
        for kind, can in enumerate((forward < m and forward - weights < limit, inputs < forward, weights < inputs)):
            if not can:
                continue
            free, forward_ends, input_ends = _split(p, counts, times)
            arrival = 0.0
            if kind == 0 and rank:
                if not forward_ends[rank]:
                    continue
                arrival = forward_ends[rank].pop(0)
            if kind == 1:
                if not input_ends[rank]:
                    continue
                arrival = input_ends[rank].pop(0)
            free[rank] = end = max(free[rank], arrival) + seconds[rank][kind]
            if kind == 0:
                (forward_ends[rank + 1] if rank < p - 1 else input_ends[rank]).append(
                    end + (message if rank < p - 1 else 0.0)
                )
            if kind == 1 and rank:
                input_ends[rank - 1].append(end + message)
            changed = tuple(number + (index == kind) for index, number in enumerate(counts[rank]))
            after = (*counts[:rank], changed, *counts[rank + 1 :])
            in_transit = [time for index in range(p) for time in (*forward_ends[index], *input_ends[index])]
            yield after, (*free, *in_transit)  # type: ignore[misc]


def _bound(p: int, m: int, seconds: tuple[tuple[float, float, float], ...], counts: Counts, times: Times) -> float:
    """Lower bound: the remaining work of every rank, and the input passes of earlier ranks after its last one."""
    bound, upstream = 0.0, seconds[0][2]
    for rank in range(p):
        remaining = [(m - done) * pass_s for done, pass_s in zip(counts[rank], seconds[rank], strict=True)]
        bound = max(
            bound,
            times[rank] + sum(remaining),
            times[rank] + remaining[0] + remaining[1] + upstream if remaining[1] else 0.0,
        )
        upstream += seconds[rank][1]
    return bound
