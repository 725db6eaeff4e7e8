"""The order of test files, the files of `make quick`, and the pieces of a worker."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import order
import pytest
from order import (
    PIECE_S,
    TESTS,
    TOGETHER,
    Cost,
    OrderedScheduling,
    cut_into_pieces,
    named_files,
    order_files,
    quick_files,
    read_costs,
    read_kills,
)

COSTS = {
    "waits.py": Cost(2.0, 60.0),
    "kills.py": Cost(10.0, 10.0),
    "kills_cheaply.py": Cost(1.0, 1.0),
    "costly.py": Cost(30.0, 30.0),
    "cheap.py": Cost(1.0, 1.0),
}
KILLS = {"kills.py": 5, "kills_cheaply.py": 2}


def test_waiting_files_come_first_then_those_with_most_kills_per_second() -> None:
    files = ["cheap.py", "costly.py", "kills.py", "kills_cheaply.py", "waits.py"]
    assert order_files(files, COSTS, KILLS) == ["waits.py", "kills_cheaply.py", "kills.py", "costly.py", "cheap.py"]


def test_an_unmeasured_file_counts_as_cheap() -> None:
    assert order_files(["cheap.py", "new.py", "costly.py"], COSTS, KILLS) == ["costly.py", "cheap.py", "new.py"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["unit/test_b.py", "unit/test_a.py::test_it[1.5::x]"], ["unit/test_b.py", "unit/test_a.py"]),
        (["unit/test_b.py", "cli"], []),
        (["."], []),
    ],
)
def test_named_files_keep_their_order(
    arguments: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(TESTS)
    assert named_files(arguments) == named_files([str(TESTS / argument) for argument in arguments]) == expected


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.0, []),
        (2 / 7, ["kills_cheaply.py"]),
        (0.3, ["kills.py"]),
        (1.0, ["kills_cheaply.py", "kills.py"]),
    ],
)
def test_quick_files_kill_a_share_of_the_mutants(share: float, expected: list[str]) -> None:
    assert quick_files(share, COSTS, KILLS) == expected


def test_recorded_quick_files_exist_and_kill_nine_tenths_of_the_mutants() -> None:
    files, kills = quick_files(), read_kills()
    assert [file for file in files if not (TESTS / file).exists()] == []
    assert sum(kills[file] for file in files) >= 0.9 * sum(kills.values()) > 0
    assert set(files) <= set(read_costs())


def test_a_long_file_is_cut_into_consecutive_cases() -> None:
    costs = {"long.py": Cost(2.5 * PIECE_S, 1.0), "short.py": Cost(1.0, 1.0)}
    nodeids = [f"tests/{file}::test_it[{number}]" for file in ("long.py", "short.py") for number in range(6)]
    pieces = cut_into_pieces(nodeids, costs)
    assert [pieces[nodeid][-1] for nodeid in nodeids[:6]] == ["0", "0", "1", "1", "2", "2"]
    assert {pieces[nodeid] for nodeid in nodeids[6:]} == {"tests/short.py 0"}


def test_a_single_worker_at_a_time_has_a_waiting_piece(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "read_costs", lambda: COSTS)

    class Node:
        def __init__(self, name: str) -> None:
            self.gateway, self.sent = SimpleNamespace(id=name), list[int]()

        def send_runtest_some(self, indices: list[int]) -> None:
            self.sent += indices

        shutting_down = False

        def shutdown(self) -> None:
            pass

    config = SimpleNamespace(option=SimpleNamespace(), getvalue=lambda name: ["popen"] * 2, hook=pytestconfig.hook)
    scheduling = OrderedScheduling(config, SimpleNamespace(loadscopesched=lambda *parts: None))
    waiting = [f"tests/waits.py::test_it[{number}]" for number in range(6)]
    computing = [f"tests/{file}::test_it[{number}]" for file in ("kills.py", "cheap.py") for number in range(3)]
    nodes = [Node("first"), Node("second")]
    for node in nodes:
        scheduling.add_node(node)
        scheduling.add_node_collection(node, [*waiting, *computing])
    scheduling.schedule()
    first, second = ({scheduling.collection[index] for index in node.sent} for node in nodes)
    assert set(waiting) <= first
    assert second
    assert not second & set(waiting)


def test_files_that_predict_the_published_runs_are_a_single_piece() -> None:
    assert [file for file in TOGETHER if not (TESTS / file).exists()] == []
    assert len(set(cut_into_pieces([f"tests/{file}::test_it" for file in TOGETHER], {}).values())) == 1


def test_costs_and_kills_are_read_by_the_path_below_tests(tmp_path: Path) -> None:
    (tmp_path / "suite.csv").write_text("file,tests,cpu_s,wall_s,processes\nunit/test_a.py,3,1.50,2.25,0\n")
    assert read_costs(tmp_path / "suite.csv") == {"unit/test_a.py": Cost(1.5, 2.25)}
    rows = [
        ("died", "FAILED tests/unit/test_a.py::test_x[1]"),
        ("died", "FAILED tests/unit/test_a.py::test_y"),
        ("lived", ""),
    ]
    (tmp_path / "mutants.jsonl").write_text(
        "".join(json.dumps({"outcome": outcome, "test": test}) + "\n" for outcome, test in rows)
    )
    assert read_kills(tmp_path / "mutants.jsonl") == {"unit/test_a.py": 2}
    assert read_costs(tmp_path / "none.csv") == read_kills(tmp_path / "none.jsonl") == {}
