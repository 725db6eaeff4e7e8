"""The least makespan of F, I and W on few stages, by going through all orders: the judge of `zb_auto`.

States that have run the same passes are compared: one whose ranks are free and whose messages are there no later than
another's needs the other no more. Micro-batches are alike, so they come in turn. States that cannot be under a makespan
that is known are left out. It shares no code with what it judges.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.pipeline.timeline import Durations

Counts = tuple[tuple[int, int, int], ...]  # of each rank: forward passes, inputs', weights'
Times = tuple[float, ...]  # when each rank is free, then when what is on its way is there


def least_makespan(p: int, m: int, durations: Durations, most: int, known: float) -> float:
    """The least makespan with at most `most` micro-batches held on a rank; `known` where nothing is under it."""
    seconds = tuple(zip(durations.forward, durations.input, durations.weight, strict=True))
    layer: dict[Counts, list[Times]] = {((0, 0, 0),) * p: [(0.0,) * p]}
    for _ in range(3 * p * m):
        following: dict[Counts, list[Times]] = {}
        for counts, fronts in layer.items():
            for times in fronts:
                for after, later in _next(p, m, seconds, durations.message, most, counts, times):
                    if _bound(p, m, seconds, after, later) < known - 1e-9:
                        _keep(following.setdefault(after, []), later)
        layer = following
    return min((max(times[:p]) for fronts in layer.values() for times in fronts), default=known)


def _keep(fronts: list[Times], times: Times) -> None:
    """Add times to those that none of the others is before in everything."""
    if not any(all(a <= b for a, b in zip(other, times, strict=True)) for other in fronts):
        fronts[:] = [other for other in fronts if not all(a <= b for a, b in zip(times, other, strict=True))]
        fronts.append(times)


def _split(p: int, counts: Counts, times: Times) -> tuple[list[float], list[list[float]], list[list[float]]]:
    """Free times; for each rank the forward ends that it has not taken up, and the inputs' ends."""
    free, rest = list(times[:p]), list(times[p:])
    forward: list[list[float]] = [[] for _ in range(p)]
    inputs: list[list[float]] = [[] for _ in range(p)]
    for rank in range(p):
        if rank:
            number = counts[rank - 1][0] - counts[rank][0]
            forward[rank], rest = rest[:number], rest[number:]
        number = (counts[rank + 1][1] if rank < p - 1 else counts[rank][0]) - counts[rank][1]
        inputs[rank], rest = rest[:number], rest[number:]
    return free, forward, inputs


def _next(
    p: int, m: int, seconds: tuple[tuple[float, float, float], ...], message: float, most: int, counts: Counts, times: Times
) -> Iterator[tuple[Counts, Times]]:  # fmt: skip
    for rank, (forward, inputs, weights) in enumerate(counts):
        for kind, can in enumerate((forward < m and forward - weights < most, inputs < forward, weights < inputs)):
            if not can:
                continue
            free, there, back = _split(p, counts, times)
            arrival = 0.0
            if kind == 0 and rank:
                if not there[rank]:
                    continue
                arrival = there[rank].pop(0)
            if kind == 1:
                if not back[rank]:
                    continue
                arrival = back[rank].pop(0)
            free[rank] = end = max(free[rank], arrival) + seconds[rank][kind]
            if kind == 0:
                (there[rank + 1] if rank < p - 1 else back[rank]).append(end + (message if rank < p - 1 else 0.0))
            if kind == 1 and rank:
                back[rank - 1].append(end + message)
            changed = tuple(number + (own == kind) for own, number in enumerate(counts[rank]))
            after = (*counts[:rank], changed, *counts[rank + 1 :])
            on_way = [time for own in range(p) for time in (*there[own], *back[own])]
            yield after, (*free, *on_way)  # type: ignore[misc]


def _bound(p: int, m: int, seconds: tuple[tuple[float, float, float], ...], counts: Counts, times: Times) -> float:
    """What every rank still has to run; behind its last input come those of the ranks before it."""
    found, up = 0.0, seconds[0][2]
    for rank in range(p):
        left = [(m - done) * each for done, each in zip(counts[rank], seconds[rank], strict=True)]
        found = max(found, times[rank] + sum(left), times[rank] + left[0] + left[1] + up if left[1] else 0.0)
        up += seconds[rank][1]
    return found
