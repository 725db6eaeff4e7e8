"""Schedules played through pass by pass: how long stages wait and what they hold, against the closed forms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest

from shardwise.schedule.schedule import Passes, schedule_of

FULL, INPUT, WEIGHT, FORWARD = "B", "I", "W", "F"  # whole backward pass, its two parts, forward pass


class Pass(NamedTuple):
    """A pass of a micro-batch; `way` 1 where it came in at the last stage."""

    kind: str
    way: int
    micro_batch: int


Slot = tuple[Pass, ...]  # passes that run together
PAIRS = [
    (2, 1.0, 1.0, 1.0),
    (4, 1.0, 1.0, 1.0),
    (4, 1.0, 1.2, 0.8),
    (8, 1.0, 1.5, 0.6),
    (8, 1.0, 1.2, 1.0),
    (6, 2.0, 2.0, 1.0),
]


class Timeline:
    """Plays the slots of each device in order; a pass waits for what it takes from the neighbouring stage."""

    def __init__(self, slots: list[list[Slot]], seconds: Mapping[str, float]) -> None:
        self.slots, self.seconds, self.pp = slots, seconds, len(slots)
        self.done: dict[tuple[str, int, int, int], float] = {}
        self.begin, self.end = [-1.0] * self.pp, [0.0] * self.pp
        self.held: list[list[tuple[int, int]]] = [[(0, 0)] for _ in slots]
        left = [list(own) for own in slots]
        while any(left):
            assert any(self.play(device, left[device]) for device in range(self.pp)), "the schedule hangs"

    def play(self, device: int, left: list[Slot]) -> bool:
        """Everything that the device can do now; whether that is anything."""
        number = len(left)
        while left and all(need in self.done for one in left[0] for need in self.needs(device, one)):
            slot = left.pop(0)
            ready = [self.done[need] for one in slot for need in self.needs(device, one)]
            start = max([self.end[device], *ready])
            if self.begin[device] < 0:
                self.begin[device] = start
            self.end[device] = start + self.seconds["".join(one.kind for one in slot)]
            for one in slot:
                self.finish(device, one)
        return len(left) < number

    def stage(self, device: int, way: int) -> int:
        return self.pp - 1 - device if way else device

    def needs(self, device: int, one: Pass) -> list[tuple[str, int, int, int]]:
        stage = self.stage(device, one.way)
        if one.kind == FORWARD and stage:
            return [(FORWARD, one.way, one.micro_batch, stage - 1)]
        if one.kind in (FULL, INPUT):
            last = stage == self.pp - 1
            return [(FORWARD if last else FULL, one.way, one.micro_batch, stage if last else stage + 1)]
        return []

    def finish(self, device: int, one: Pass) -> None:
        """Note when it is done, and how many micro-batches the device holds for their backward pass and for W alone."""
        kind = FULL if one.kind == INPUT else one.kind
        self.done[kind, one.way, one.micro_batch, self.stage(device, one.way)] = self.end[device]
        saved, waiting = self.held[device][-1]
        saved += {FORWARD: 1, FULL: -1, INPUT: -1}.get(one.kind, 0)
        waiting += {INPUT: 1, WEIGHT: -1}.get(one.kind, 0)
        self.held[device].append((saved, waiting))

    def most_held(self, device: int) -> int:
        return max(saved + waiting for saved, waiting in self.held[device])


def one_way(pp: int, num_micro_batches: int, warm_up: list[int], late: list[int] | None) -> list[list[Slot]]:
    """Forward passes to warm up, then one of each; W `late` micro-batches behind, or none apart from the whole."""
    found = []
    for stage in range(pp):
        forward = [Pass(FORWARD, 0, k) for k in range(num_micro_batches)]
        weights = [Pass(WEIGHT, 0, k) for k in range(num_micro_batches)] if late else []
        order, rest = forward[: warm_up[stage]], forward[warm_up[stage] :]
        for k in range(num_micro_batches):
            order.append(Pass(INPUT if late else FULL, 0, k))
            if late and k >= late[stage]:
                order.append(weights.pop(0))
            order += rest[:1]
            del rest[:1]
        found.append([(one,) for one in (*order, *weights)])
    return found


def dualpipe(pp: int, num_micro_batches: int) -> list[list[Slot]]:
    """The order of DeepSeek's published implementation: runs of slots, 0 being the way that comes in nearer."""
    found = []
    for device in range(pp):
        near = min(device, pp - 1 - device)
        to_middle, middle = pp // 2 - 1 - near, device in (pp // 2 - 1, pp // 2)
        main = num_micro_batches // 2 - pp + near + 1
        end = [("B1", "B0") if i < (near + 1) // 2 else ("I1", "I0") for i in range(near + 1)]
        if near % 2 == 0:
            end[near // 2] = ("B1", "I0")
        text = [("F0",)] * 2 * to_middle + [("F0", "F1")] * (near + 1) + [("I1", "W", "F1")] * to_middle
        text += [("F0", "B1", "F1B0") if middle else ("F0B1", "F1B0")] + [("F0B1", "F1B0")] * (main - 1)
        text += [("B1", "F1B0")] * to_middle + end + [("W", "I0")] * to_middle + [("W",)] * (near + 1)
        found.append(list(_numbered((word for run in text for word in run), mirrored=device >= pp // 2)))
    return found


def _numbered(words: Iterator[str], *, mirrored: bool) -> Iterator[Slot]:
    """Slots from words such as F0B1: micro-batches of each way in turn; weight gradients in the order of their inputs'."""
    next_up: dict[tuple[str, int], int] = {}
    queue: list[Pass] = []
    for word in words:
        slot = []
        for kind, way in [("W", "")] if word == "W" else zip(word[::2], word[1::2], strict=True):
            if kind == WEIGHT:
                slot.append(queue.pop(0)._replace(kind=WEIGHT))
                continue
            key = ("F" if kind == FORWARD else "B", int(way) ^ mirrored)
            number = next_up[key] = next_up.get(key, -1) + 1
            slot.append(Pass(kind, key[1], number))
            queue += slot[-1:] if kind == INPUT else []
        yield tuple(slot)
    assert not queue


def times(forward: float, input_: float, weight: float, together: float = 0.0) -> dict[str, float]:
    return {"F": forward, "I": input_, "W": weight, "B": input_ + weight, "FB": together}


SINGLE = {
    "1f1b": lambda p, m: one_way(p, m, [p - i for i in range(p)], None),
    "afab": lambda p, m: one_way(p, m, [m] * p, None),
    "zb_h1": lambda p, m: one_way(p, m, [p - i for i in range(p)], list(range(p))),
    "zb_h2": lambda p, m: one_way(p, m, [2 * (p - i) - 1 for i in range(p)], [2 * i for i in range(p)]),
}


@pytest.mark.parametrize("schedule", SINGLE)
@pytest.mark.parametrize(("pp", "forward", "input_", "weight"), PAIRS)
@pytest.mark.parametrize("more", [0, 1, 7])
def test_stages_wait_as_long_as_the_closed_form_says(
    schedule: str, pp: int, forward: float, input_: float, weight: float, more: int
) -> None:
    """From a stage's first pass to its last: the first stage waits longest. A step ends where its stage ends."""
    form = schedule_of(schedule)
    m = max(form.fewest(pp, 1), pp) + more
    line = Timeline(SINGLE[schedule](pp, m), times(forward, input_, weight))
    waits = [line.end[i] - line.begin[i] - m * (forward + input_ + weight) for i in range(pp)]
    expected = form.bubble_s(pp, 1, Passes(forward, input_ + weight, weight))
    assert max(waits) == pytest.approx(expected, abs=1e-9)
    for stage in range(pp):
        assert line.most_held(stage) == form.in_flight(pp, 1, m, stage)
        # beside the one that is being worked on
        late = max(waiting for _, waiting in line.held[stage]) - 1
        assert max(late, 0) == form.num_waiting(pp, 1, m, stage)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2"])
def test_fewer_micro_batches_wait_longer_than_the_closed_form_says(schedule: str) -> None:
    """Too few cut the warm-up short, so the closed forms require as many as it takes."""
    form = schedule_of(schedule)
    fewest = int(form.fewest(4, 1))
    waits = []
    for m in (fewest, fewest - 2):
        line = Timeline(SINGLE[schedule](4, m), times(1.0, 1.0, 1.0))
        waits.append(line.end[0] - line.begin[0] - 3.0 * m)
    expected = form.bubble_s(4, 1, Passes(1.0, 2.0, 1.0))
    assert waits[0] == expected < waits[1]


@pytest.mark.parametrize("pp", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("more", [0, 2, 20])
@pytest.mark.parametrize("together", [3.0, 2.6])
def test_dualpipe_waits_as_long_as_the_closed_form_says(pp: int, more: int, together: float) -> None:
    """On the devices in the middle, for F, the input's part of B and W of one second each; others wait no longer."""
    form = schedule_of("dualpipe")
    m = 2 * pp + more
    line = Timeline(dualpipe(pp, m), times(1.0, 1.0, 1.0, together))
    expected = form.bubble_s(pp, 1, Passes(1.0, 2.0, 1.0, together))
    for device in range(pp):
        pairs = sum(len(slot) == 2 for slot in line.slots[device])
        waits = max(line.end) - pairs * together - (m - pairs) * 3.0
        assert waits <= expected + 1e-9
        assert line.most_held(device) == form.in_flight(pp, 1, m, device) == pp + 1
        assert max(waiting for _, waiting in line.held[device]) == form.num_waiting(pp, 1, m, device)
        if device == pp // 2:
            assert pairs == form.num_overlapped(pp, 1, m)
            assert waits == pytest.approx(expected, abs=1e-9)


def test_dualpipe_waits_no_longer_where_weight_gradients_are_short() -> None:
    line = Timeline(dualpipe(8, 24), times(1.0, 1.4, 0.8, 2.6))
    waits = max(line.end) - 15 * 2.6 - 9 * 3.2
    assert 0 < waits < schedule_of("dualpipe").bubble_s(8, 1, Passes(1.0, 2.2, 0.8, 2.6))
