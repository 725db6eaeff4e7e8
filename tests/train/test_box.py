"""Boxes of N-D tensors, compared with NumPy's indexing."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from shardwise.values.boxes import Box, interval_boxes, tiles

SHAPES = [(), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_an_interval_is_its_boxes_in_order(shape: tuple[int, ...]) -> None:
    numbers = np.arange(math.prod(shape)).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(numbers.size + 1), 2):
        boxes = list(interval_boxes(shape, start, stop))
        taken = [number for box in boxes for number in numbers[box.slices].flatten().tolist()]
        assert taken == list(range(start, stop))
        assert len(boxes) <= max(2 * len(shape) - 1, 1)
        for box in boxes:
            first, last = box.span(shape)
            assert list(range(first, last)) == numbers[box.slices].flatten().tolist(), "each is contiguous"


def test_intersection_of_boxes_equals_that_of_their_slices() -> None:
    rng = np.random.default_rng(0)
    shape = (5, 4, 6)
    for _ in range(300):
        marks = []
        boxes = []
        for _ in range(2):
            corners = np.sort(rng.integers(0, np.add(shape, 1), (2, 3)), axis=0)
            boxes.append(Box(tuple(corners[0].tolist()), tuple((corners[1] - corners[0]).tolist())))
            mark = np.zeros(shape, bool)
            mark[boxes[-1].slices] = True
            marks.append(mark)
        shared = boxes[0].intersection(boxes[1])
        expected = marks[0] & marks[1]
        assert (shared is None) == (not expected.any())
        if shared is not None:
            assert shared.volume == expected.sum()
            assert expected[shared.slices].all()
            inside = shared.seen_from(boxes[0])
            assert np.array_equal(expected[boxes[0].slices][inside.slices], expected[shared.slices])


@pytest.mark.parametrize(
    ("boxes", "fault"),
    [
        ([((0, 0), (2, 4)), ((2, 0), (1, 1)), ((2, 1), (1, 3))], ""),
        ([((0, 0), (2, 4)), ((0, 0), (0, 4)), ((2, 0), (1, 4))], ""),
        ([((0, 0), (3, 2)), ((0, 2), (3, 1))], "9 of 12 elements"),
        ([((0, 0), (3, 2)), ((0, 1), (3, 2))], "boxes that overlap"),
        ([((0, 0), (2, 4)), ((1, 3), (2, 1)), ((2, 0), (1, 2))], "boxes that overlap"),
        ([((0, 0), (3, 5))], "a box outside the shape (3, 4)"),
        ([((-1, 0), (4, 4))], "a box outside the shape (3, 4)"),
        ([((0,), (12,))], "a box outside the shape (3, 4)"),
    ],
)
def test_boxes_that_do_not_tile_a_tensor_are_refused(
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], fault: str
) -> None:
    assert tiles([Box(*box) for box in boxes], (3, 4)) == fault


def test_a_scalar_has_one_box() -> None:
    assert tiles([Box((), ())], ()) == ""
    assert tiles([Box((), ()), Box((), ())], ()) == "boxes that overlap"
    assert tiles([], ()) == "0 of 1 elements"
