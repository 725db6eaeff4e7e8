"""Worked problems with known answers, from the books, through the package's public functions."""

from __future__ import annotations

from typing import Any

import pytest
from adapters import Run, agrees, names_used, tables

CASES: list[dict[str, Any]] = tables("cases.toml")["case"]
EXACT = 1e-6


@pytest.mark.golden_case
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_golden_case_equals_its_source(case: dict[str, Any]) -> None:
    run = Run(tables("adapters.toml")[case["adapter"]], case["inputs"])
    for key, expected in case["expected"].items():
        actual = run.result(key)
        assert agrees(actual, expected, case["rel_tol"]), f"{key}: {actual!r}, the source has {expected!r}"
    for key, expected in case.get("exact", {}).items():
        actual = run.result(key)
        assert agrees(actual, expected, EXACT), f"{key}: {actual!r}, at full precision it is {expected!r}"


def test_every_case_is_whole() -> None:
    ids = [case["id"] for case in CASES] + [case["id"] for case in tables("not_computable.toml")["case"]]
    assert len(set(ids)) == len(ids)
    for case in CASES:
        assert case["question"], case["id"]
        assert case["source"], case["id"]
        assert case["expected"], case["id"]
        unused = set(case["inputs"]) - names_used(tables("adapters.toml")[case["adapter"]])
        assert not unused, f"{case['id']}: the adapter does not read {unused}"


def test_every_adapter_is_used() -> None:
    assert set(tables("adapters.toml")) == {case["adapter"] for case in CASES}


def test_cases_that_are_not_computed_have_a_reason() -> None:
    listed = tables("not_computable.toml")["case"]
    assert len(listed) <= 20
    for case in listed:
        assert case["fact"], case["id"]
        assert case["reason"], case["id"]
