"""YAML of launches: what is written is read back, aliases stand for what they name, and a section may be an option itself."""

from __future__ import annotations

from itertools import product

import pytest

from shardwise.interop.text_formats.config_trees import flatten, format_yaml, nest, parse_yaml
from shardwise.values.errors import InputError

TAGS = (
    "binary", "bool", "float", "int", "map", "merge", "null", "omap", "pairs", "seq", "set", "str", "timestamp", "value",
)  # fmt: skip
NODES = ('""', "x", '"-"', "2001-99-99", "[x]", "{x: 1}", "[{x: 1}]", "[[x]]")


def test_written_yaml_is_read_back_equal() -> None:
    options = {
        "model.sizes": [1, 2],
        "model.name": "ä: #",
        "model.dtype": None,
        "steps": 3,
        "lr": 1e-4,
        "tokenizer": {},
    }
    assert parse_yaml(format_yaml(options), "a.yaml") == nest(options)
    assert flatten(parse_yaml(format_yaml(options), "a.yaml"), options) == options


def test_aliases_and_merged_sections_stand_for_what_they_name() -> None:
    text = "usual: &usual {dp: 2, tp: 4}\nparallelism: {<<: *usual, tp: 8}\nsizes: [&size 3, *size]\n"
    assert flatten(parse_yaml(text, "a.yaml")) == {
        "usual.dp": 2, "usual.tp": 4, "parallelism.dp": 2, "parallelism.tp": 8, "sizes": [3, 3],
    }  # fmt: skip


def test_a_section_is_an_option_where_the_release_has_one_of_its_name_and_none_within() -> None:
    tree = {"optimizer": {"type": "AdamW", "params": {"lr": 1}}, "tokenizer": {}, "data": {}}
    known = ("optimizer", "optimizer.type", "optimizer.params", "tokenizer", "tokenizer.name")
    assert flatten(tree, known) == {"optimizer.type": "AdamW", "optimizer.params": {"lr": 1}, "tokenizer": {}}


@pytest.mark.parametrize("place", ["a: {}", "? {}\n: 1", "<<: {}"])
def test_each_tag_on_each_node_is_read_or_refused(place: str) -> None:
    """PyYAML raises six types of errors for nodes that are not of their tag's type."""
    for tag, node in product(TAGS, NODES):
        try:
            tree = parse_yaml(place.format(f"!!{tag} {node}"), "a.yaml")
        except InputError as error:
            (problem,) = error.problems
            assert problem.startswith("a.yaml is not YAML: ")
        else:
            assert isinstance(tree, dict)
