"""Mutations of small sources, and the command that runs tests on them: what it notices, lists, remembers and resumes."""

from __future__ import annotations

import dataclasses
import json
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

import mutants
import pytest
from mutant_rooms import ROOMS, files_of_tests, room_of
from mutant_tree import PACKAGE, Mutant, Outcome, Tree, described
from mutants import compact, deaths, drawn, judged, read_outcomes, read_reasons, report
from mutation import compiles, mutations

SOURCE = '''
"""A module: 1 < 2."""

from typing import Literal

Kind = Literal["a", "b"]
Number = int | None


def charged(seqs: int | None, rate: float = 0.5) -> float:
    """At least 1."""
    if seqs is None:
        raise ValueError("seqs: at least " + str(1))
    return max(seqs * rate, 1.0)
'''
TESTS = ["unit/schedule/test_price.py"]
TESTED = "from shardwise.pipeline.price import price\n\ndef test_it():\n    assert price(3, 2) == 6\n"
PRICE = "def price(count, each):\n    if count < 0:\n        return 0\n    return count * each\n"


def changes(source: str) -> set[tuple[str, str]]:
    return {(mutation.before, mutation.after) for mutation in mutations(textwrap.dedent(source))}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", {("a < b", "(a <= b)")}),
        ("a not in b", {("a not in b", "(a in b)")}),
        ("a * b", {("a * b", "(a / b)")}),
        ("a and b", {("a and b", "(a or b)")}),
        ("not a", {("not a", "a")}),
        ("-a", {("-a", "a")}),
        ("x = 3", {("3", "4")}),
        ("x = 0.5", {("0.5", "1.0")}),
        ("x = True", {("True", "False")}),
        ("x = 'text'", set()),
        ("x = ('fsdp', *EXPERT, 'cp')", {
            ("('fsdp', *EXPERT, 'cp')", "(*EXPERT, 'cp')"), ("('fsdp', *EXPERT, 'cp')", "('fsdp', 'cp')"),
            ("('fsdp', *EXPERT, 'cp')", "('fsdp', *EXPERT)"),
        }),
        ("x = {'a': b}", {("{'a': b}", "{}")}),
        ("f(a, b)", set()),
        ("f(a, key=b)", {("f(a, key=b)", "f(a)")}),
        ("max(a, b)", {("max(a, b)", "max(a)"), ("max(a, b)", "max(b)")}),
        ("x = [y for y in z if y]", {("y", "True")}),
        ("if guard:\n    f()", {("guard", "False")}),
        ("x = a if c else b", {("a if c else b", "(b if c else a)")}),
        ("assert a < b", set()),
        ("@cache(maxsize=8)\ndef f(): pass", set()),
        ("x: int = y", set()),
    ],
)  # fmt: skip
def test_expressions_have_the_listed_mutations(source: str, expected: set[tuple[str, str]]) -> None:
    assert changes(source) == expected


def test_code_without_visible_effect_is_not_mutated() -> None:
    """No type, docstring, message or annotation; the guard, the default and what is returned."""
    all_mutations = mutations(SOURCE)
    assert {mutation.line for mutation in all_mutations} == {10, 12, 14}
    assert all(compiles(mutation.applied(SOURCE)) for mutation in all_mutations)
    assert {mutation.mutated_line(SOURCE) for mutation in all_mutations} == {
        "def charged(seqs: int | None, rate: float = 1.0) -> float:", "if (seqs is not None):", "if False:",
        "return max((seqs / rate), 1.0)", "return max(seqs * rate, 2.0)", "return max(seqs * rate)", "return max(1.0)",
    }  # fmt: skip


def test_places_are_bytes_whatever_stands_before_them() -> None:
    source = "x = 'é·é' if a < b else 'ü'\n"
    (mutation,) = (mutation for mutation in mutations(source) if mutation.before == "a < b")
    assert mutation.applied(source) == "x = 'é·é' if (a <= b) else 'ü'\n"


def written(folder: Path) -> Path:
    """A package of one file, a test of one half of what it does, and a room for both; and no PyTorch, which
    takes the server seconds to load."""
    for name, text in {
        "src/shardwise/__init__.py": "", "src/shardwise/pipeline/__init__.py": "",
        "src/shardwise/pipeline/price.py": PRICE, "tests/unit/schedule/test_price.py": TESTED,
        "src/torch/__init__.py": "raise ImportError",
    }.items():  # fmt: skip
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return written(tmp_path / "repository")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    """A copy, with one server for all tests of this module; plugins of pytest have no part in them, and take half a second each
    time."""
    tree = Tree(written(tmp_path_factory.mktemp("repository")), tmp_path_factory.mktemp("tree"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        yield tree
    tree.end()


@pytest.fixture
def tree(served: Tree) -> Tree:
    """The copy as it was made, without what pytest compiled of a test that has been replaced within the same second."""
    tests = written(served.folder) / "tests" / "unit" / "schedule"
    shutil.rmtree(tests / "__pycache__", ignore_errors=True)
    return served


def test_survivors_are_found_in_a_copy_of_the_tree(repository: Path, tree: Tree) -> None:
    """Three of something at two each are tested, and not what is never sold: of two mutants one lives."""
    chosen = {mutant.mutated_line: mutant for mutant in drawn(repository / PACKAGE, 100, seed=1)}
    assert set(chosen) == {"if (count <= 0):", "if count < 1:", "if False:", "return 1", "return (count / each)"}
    lived = tree.judge(chosen["if False:"], limit_s=600.0)
    assert (lived.outcome, lived.file, lived.line, lived.test) == ("lived", "pipeline/price.py", 2, "")
    died = tree.judge(chosen["return (count / each)"], limit_s=600.0)
    assert (died.outcome, died.test) == ("died", "FAILED tests/unit/schedule/test_price.py::test_it")
    for folder in (repository, tree.folder):
        assert (folder / PACKAGE / "pipeline/price.py").read_text() == PRICE


def test_a_run_goes_on_where_it_stopped(
    repository: Path, tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted in the third of five mutants, and in a line of the file at that."""
    ran: list[Mutant] = []

    def judge(tree: Tree, mutant: Mutant, limit_s: float, killer: str = "") -> Outcome:
        assert limit_s == mutants.LIMIT_S
        ran.append(mutant)
        mutation = mutant.mutation
        outcome = "lived" if mutation.line == 2 else "died"
        return Outcome(
            file=mutant.file, line=mutation.line, before=mutation.before, after=mutation.after, mutated_line=mutant.mutated_line,
            outcome=outcome, seconds=1.0, nth=mutant.nth,
        )  # fmt: skip

    monkeypatch.setattr(Tree, "judge", judge)
    chosen = drawn(repository / PACKAGE, 100, seed=1)
    assert drawn(repository / PACKAGE, 3, seed=1) == chosen[:3] != drawn(repository / PACKAGE, 3, seed=2)
    out = tmp_path / "out" / "mutants.jsonl"
    first = judged(chosen, [tree], out, again=False)
    stopped = [next(first), next(first)]
    first.close()
    with out.open("a") as file:
        file.write('{"file": "schedule/pri')
    outcomes = list(judged(chosen, [tree], out, again=False))
    assert (outcomes[:2], ran) == (stopped, chosen)
    assert list(judged(chosen, [tree], out, again=False)) == outcomes
    assert ran == chosen
    assert list(judged(chosen, [tree], out, again=True)) == outcomes
    assert ran == chosen + [mutant for mutant in chosen if mutant.mutation.line == 2]
    assert "5/5 " in capsys.readouterr().err
    # a line that has changed since is another mutant
    (repository / PACKAGE / "pipeline/price.py").write_text(PRICE.replace("count < 0", "count < 0.5"))
    assert len(list(judged(drawn(repository / PACKAGE, 100, seed=1), [tree], out, again=False))) == 5
    assert len(ran) == 5 + 3 + 3


def make_outcome(mutant: Mutant, outcome: str) -> Outcome:
    change = mutant.mutation
    return Outcome(
        file=mutant.file, line=change.line, before=change.before, after=change.after, mutated_line=mutant.mutated_line,
        outcome=outcome, seconds=1.0, test="FAILED tests/unit/schedule/test_price.py::test_it", nth=mutant.nth,
    )  # fmt: skip


def test_recorded_deaths_are_run_again(repository: Path, tree: Tree, tmp_path: Path) -> None:
    """The test that notices it now is recorded; what no test notices any more has lived; a line that has changed is left out."""
    out = tmp_path / "mutants.jsonl"
    outcomes = {
        mutant.key: make_outcome(mutant, "died" if mutant.mutated_line == "return (count / each)" else "lived")
        for mutant in drawn(repository / PACKAGE, 100, seed=1)
    }
    (mutant,) = deaths(repository / PACKAGE, outcomes, 40, seed=1)
    out.write_text("".join(json.dumps(dataclasses.asdict(outcome)) + "\n" for outcome in outcomes.values()))
    tests = tree.folder / "tests/unit/schedule/test_price.py"
    tests.write_text(TESTED.replace("test_it", "test_product"))
    (died,) = judged([mutant], [tree], out, again=False, recheck=True)
    assert (died.outcome, died.test) == ("died", "FAILED tests/unit/schedule/test_price.py::test_product")
    tests.write_text(TESTED.replace("3, 2) == 6", "3, 1) == 3"))
    (lived,) = judged([mutant], [tree], out, again=False, recheck=True)
    assert lived.outcome == "lived"
    assert len(out.read_text().splitlines()) == len(outcomes) + 2
    compact(out)
    assert len(out.read_text().splitlines()) == len(outcomes)
    assert read_outcomes(out) == {**outcomes, mutant.key: lived}
    (repository / PACKAGE / "pipeline/price.py").write_text(PRICE.replace("count * each", "each * count"))
    assert deaths(repository / PACKAGE, outcomes, 40, seed=1) == []


def test_equal_lines_of_a_file_are_two_mutants(repository: Path) -> None:
    twice = PRICE + PRICE.replace("price", "cost")
    (repository / PACKAGE / "pipeline/price.py").write_text(twice)
    chosen = drawn(repository / PACKAGE, 100, seed=1)
    assert len({mutant.key for mutant in chosen}) == len(chosen) == 10
    assert {(mutant.nth, mutant.mutation.line) for mutant in chosen if mutant.mutated_line == "if False:"} == {
        (0, 2),
        (1, 6),
    }


def test_tests_that_fail_without_a_mutant_are_no_judges(repository: Path, tree: Tree) -> None:
    (tree.folder / "tests/unit/schedule/test_price.py").write_text("def test_it():\n    assert False\n")
    (chosen,) = drawn(repository / PACKAGE, 1, seed=1)
    with pytest.raises(SystemExit, match=r"test_price\.py::test_it fails without a mutant; mend it first"):
        tree.judge(chosen, limit_s=600.0)


def test_a_mutant_with_which_no_test_is_loaded_has_died(repository: Path, tree: Tree) -> None:
    """The fixtures of a folder may read the package: no test of it runs then."""
    conftest = tree.folder / "tests/unit/conftest.py"
    conftest.write_text("from shardwise.pipeline.price import price\n\nassert price(3, 2) == 6\n")
    chosen = {mutant.mutated_line: mutant for mutant in drawn(repository / PACKAGE, 100, seed=1)}
    try:
        died = tree.judge(chosen["return (count / each)"], limit_s=600.0)
        assert (died.outcome, died.test) == ("died", "ERROR tests/unit/schedule/test_price.py")
        conftest.write_text("raise ValueError\n")
        with pytest.raises(SystemExit, match=r"test_price\.py fails without a mutant; mend it first"):
            tree.judge(chosen["return (count / each)"], limit_s=600.0)
    finally:
        conftest.unlink()


def test_tests_that_do_not_run_are_no_judges(tree: Tree) -> None:
    (tree.folder / "tests/unit/schedule/test_price.py").write_text("")
    with pytest.raises(SystemExit, match=r"pytest did not run the tests \(exit status 5\)"):
        tree.run(TESTS, limit_s=600.0)


def test_a_mutant_that_hangs_has_died(tree: Tree) -> None:
    (tree.folder / "tests/unit/schedule/test_price.py").write_text(
        "import time\n\ndef test_it():\n    time.sleep(600)\n"
    )
    assert tree.run(TESTS, limit_s=2.0) == ("hung", "")


def test_the_report_says_why_each_survivor_lives(tmp_path: Path) -> None:
    reasons = tmp_path / "mutants.toml"
    reasons.write_text(
        '[[equivalent]]\nfile = "pipeline/price.py"\nline = "if False:"\nreason = "nothing is sold back"\n'
    )
    lived = [
        Outcome(
            file="pipeline/price.py",
            line=2,
            before="count < 0",
            after=after,
            mutated_line=line,
            outcome="lived",
            seconds=1.0,
        )
        for after, line in (("False", "if False:"), ("(count <= 0)", "if (count <= 0):"))
    ]
    died = [
        Outcome(file="a.py", line=1, before="1", after="2", mutated_line="2", outcome=outcome, seconds=1.0)
        for outcome in ("died", "hung")
    ]
    text = report([*lived, *died], read_reasons(reasons))
    head, first, _, unknown, second, _, known = text.splitlines()
    assert head == "2 of 4 mutants died (50%)"
    assert first == "src/shardwise/pipeline/price.py:2  count < 0  ->  (count <= 0)"
    assert unknown == "    no reason is known: a test is missing"
    assert second == "src/shardwise/pipeline/price.py:2  count < 0  ->  False"
    assert known == "    nothing is sold back"


def test_a_long_change_is_shown_where_it_is() -> None:
    assert described("a  <\n b", "(a <= b)") == "a < b  ->  (a <= b)"
    long = ", ".join(f"name_{i}={i}" for i in range(20))
    before, after = f"f({long})", f"f({long.replace('name_12=12, ', '')})"
    shown, became = described(before, after).split("  ->  ")
    assert "name_11=11, name_12=12, name_13=13" in shown
    assert "name_11=11, name_13=13" in became
    assert len(shown) == len(became) == 68


def test_tests_that_import_a_module_are_run_first(tmp_path: Path) -> None:
    for name, text in {
        "unit/schedule/test_a.py": "from shardwise.pipeline.prices import price",
        "unit/schedule/test_b.py": "from shardwise.pipeline import other, price",
        "unit/schedule/test_c.py": "from shardwise.pipeline.price import cost",
        "unit/cost/test_d.py": "",
        "unit/cost/helper.py": "from shardwise.pipeline.price import cost",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    files = files_of_tests("pipeline/price.py", tmp_path)
    assert [Path(file).stem for file in files] == ["test_b", "test_c", "test_a", "test_d"]


def test_each_file_of_the_package_has_a_room() -> None:
    """And each room some file: none stands behind one whose prefix fits its files as well."""
    repository = Path(__file__).parents[2]
    files = [path.relative_to(repository / PACKAGE).as_posix() for path in (repository / PACKAGE).rglob("*.py")]
    assert [file for file in files if room_of(file) is None] == []
    assert set(map(room_of, files)) == set(ROOMS)
    assert room_of("derive/sharded_program.py") == "derive"
    assert room_of("run/parallel/flat_parameters.py") == "run/parallel"
    assert room_of("run/trainer/anomaly_detector.py") == "run"
    assert room_of("values/symbolic.py") == "values/symbolic.py"
    assert room_of("present/verbs/planning.py") == "present"
    for room, tests in ROOMS.items():
        assert [test for test in tests if not (repository / "tests" / test).exists()] == [], room
    for place, reason in read_reasons(mutants.REASONS).items():
        assert (repository / PACKAGE / place[0]).exists()
        assert reason
