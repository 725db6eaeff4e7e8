"""How a weight lies in a stored tensor, against permutations, stacks and splits that are written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.interop.weights.dim_patterns import Arrangement, arrange, parse_pattern
from shardwise.values.boxes import Box, interval_boxes

SIZES = {"D": 5, "K": 3, "G": 2, "H": 4, "F": 6, "V": 7, "Z": 2, "E": 4, "I": 3, "R": 4}
CASES: dict[str, tuple[str, str]] = {
    "as it is": ("D F", ""), "turned": ("D F", "F, D"), "joined": ("K G H D", "K G H, D"), "both": ("K G H D", "D, K G H"),
    "queries of a group": ("K G H D", "K [GH]+H+H, D"), "keys of a group": ("K H D", "K GH+[H]+H, D"),
    "the second half": ("D F", "F+[F], D"), "padded": ("V D", "[V]+Z, D"), "pairs": ("K G H D", "K G H~, D"),
    "pairs behind others": ("K G R D", "K G I+[R~], D"), "a row of one": ("D", "1, D"), "pairs in a vector": ("K H", "K H~"),
}  # fmt: skip


def number_elements(dims: str) -> torch.Tensor:
    """A tensor of these dims whose elements all differ."""
    shape = [SIZES[dim] for dim in dims.split()]
    return torch.arange(1, 1 + int(np.prod(shape))).view(shape)


def store_part(arrangement: Arrangement, part: torch.Tensor) -> torch.Tensor:
    into = torch.zeros(arrangement.shape, dtype=part.dtype)
    arrangement.write_parameter(part, into)
    return into


@pytest.mark.parametrize("case", CASES)
def test_any_box_of_a_written_weight_is_read(case: str) -> None:
    dims, layout = CASES[case]
    part, arrangement = number_elements(dims), arrange(layout, dims.split(), SIZES)
    into = store_part(arrangement, part)
    assert sorted(into[into > 0].tolist()) == part.flatten().tolist()
    rng = np.random.default_rng(0)
    for _ in range(200):
        corners = np.sort(rng.integers(0, np.add(part.shape, 1), (2, part.ndim)), axis=0)
        box = Box(tuple(corners[0].tolist()), tuple((corners[1] - corners[0]).tolist()))
        if box.volume:
            assert torch.equal(arrangement.read_box(lambda inner: into[inner.slices], box), part[box.slices]), box


def test_queries_keys_and_values_of_a_group_lie_together() -> None:
    """Source: Megatron-LM d98e8a64, attention.py, get_query_key_value_tensors: [groups, (queries + 2) * width, hidden]."""
    queries, keys, values = number_elements("K G H D"), number_elements("K H D") + 1000, number_elements("K H D") + 2000
    into = torch.zeros(arrange("K [GH]+H+H, D", tuple("KGHD"), SIZES).shape, dtype=queries.dtype)
    for part, layout in ((queries, "K [GH]+H+H, D"), (keys, "K GH+[H]+H, D"), (values, "K GH+H+[H], D")):
        arrange(layout, tuple("KGHD" if part is queries else "KHD"), SIZES).write_parameter(part, into)
    expected = torch.cat([queries, keys[:, None], values[:, None]], dim=1)  # [K, G + 2, H, D]
    assert torch.equal(into, expected.reshape(into.shape))


def test_pairs_are_those_of_the_published_conversion() -> None:
    """Source: torchtitan 0.3.0, models/llama3/state_dict_adapter.py, _reverse_permute."""
    weights = number_elements("K G H D")
    heads, width = SIZES["K"] * SIZES["G"], SIZES["H"]
    flat = weights.reshape(heads * width, SIZES["D"])
    expected = flat.view(heads, 2, width // 2, SIZES["D"]).transpose(1, 2).reshape(heads * width, SIZES["D"])
    assert torch.equal(store_part(arrange("K G H~, D", tuple("KGHD"), SIZES), weights), expected)


def test_an_interval_reads_only_its_elements() -> None:
    """An interval of a flattened weight costs its own elements where its tensor has no other's."""
    dims, count = "K G H D", [0]
    part, arrangement = number_elements(dims), arrange("D, K G H", dims.split(), SIZES)
    into = store_part(arrangement, part)

    def read(inner: Box) -> torch.Tensor:
        count[0] += inner.volume
        return into[inner.slices]

    for start in range(0, part.numel(), 7):
        for stop in range(start + 1, part.numel() + 1, 5):
            count[0] = 0
            interval = torch.cat(
                [arrangement.read_box(read, box).flatten() for box in interval_boxes(part.shape, start, stop)]
            )
            assert torch.equal(interval, part.flatten()[start:stop])
            assert count[0] == stop - start


@given(st.permutations("KGHD"), st.data())
def test_any_order_of_dims_round_trips(order: list[str], data: st.DataObject) -> None:
    marks = data.draw(st.lists(st.sampled_from(("", ",")), min_size=3, max_size=3))
    halves = data.draw(st.sampled_from(("", "~")))
    words = [f"{dim}{halves if dim == 'H' else ''}" for dim in order]
    layout = "".join(
        word + (f"{mark} " if mark else " ") for word, mark in zip(words, (*marks, ""), strict=True)
    ).strip()
    part, arrangement = number_elements("K G H D"), arrange(layout, tuple("KGHD"), SIZES)
    whole = Box((0,) * 4, tuple(part.shape))
    into = store_part(arrangement, part)
    assert torch.equal(arrangement.read_box(lambda inner: into[inner.slices], whole), part)
    if not halves:
        assert torch.equal(into.flatten(), part.permute(["KGHD".index(dim) for dim in order]).flatten())


@pytest.mark.parametrize("layout", ["F+F, D", "[F]+[F], D", "F D!", "{layer, D"])
def test_ambiguous_layouts_are_refused(layout: str) -> None:
    with pytest.raises(ValueError, match=r"found .* in a layout; parts such as"):
        parse_pattern(layout)


def test_layouts_that_do_not_fit_a_weight() -> None:
    with pytest.raises(ValueError, match="leaves out F of D, F"):
        arrange("D", ("D", "F"), SIZES)
    with pytest.raises(ValueError, match="D = 5 has no halves"):
        arrange("D~", ("D",), SIZES)
