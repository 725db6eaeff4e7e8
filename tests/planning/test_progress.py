"""Long work reports its progress in the order of the work, never past its end, and can be stopped."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.measure.calibrate.prediction_errors import predict_rows
from shardwise.measure.calibrate.published_runs.run_table import published_rows
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.price import Problem
from shardwise.search.compare_clusters import plan_clusters
from shardwise.search.nearest_fitting_layout import find_nearest_fitting
from shardwise.search.planner import make_plan
from shardwise.values.errors import NothingFitsError

SOURCES = Path(sw.__file__).parent
pytestmark = pytest.mark.usefixtures("fresh_searches")
MODEL, JOB = load_model("llama-3.2-1b"), Job(global_batch_tokens=2**20, seq_len=4096)


class ProgressReports(list[tuple[str, int, int]]):
    """The reports of progress, in order."""

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None:
        self.append((stage, done, total))

    def stages(self) -> list[str]:
        return [stage for stage, _ in groupby(self, key=lambda report: report[0])]


def check_counts(reports: ProgressReports) -> None:
    """Each stage goes from nothing towards its total, without a step back."""
    for _, stage in groupby(reports, key=lambda report: (report[0], report[2])):
        counts = [(done, total) for _, done, total in stage]
        assert counts == sorted(counts)
        assert all(done < total or total == 0 for done, total in counts)
        assert counts[0][0] == 0


def test_search_reports_its_stages_and_counts() -> None:
    reports = ProgressReports()
    plan = make_plan(Problem(MODEL, load_cluster("h100:64"), JOB), progress=reports)
    assert reports.stages() == ["blocks derived", "layouts priced", "layers of each stage", "runners-up"]
    check_counts(reports)
    totals = {stage: total for stage, _, total in reports}
    assert plan.search is not None
    assert totals["layouts priced"] == plan.search.num_layouts


def test_stages_of_several_clusters_are_prefixed() -> None:
    reports = ProgressReports()
    plan_clusters([Problem(MODEL, load_cluster(name), JOB) for name in ("h100:8", "h200:8")], progress=reports)
    assert [stage for stage in reports.stages() if "priced" in stage] == [
        "h100:8: layouts priced",
        "h200:8: layouts priced",
    ]


def test_every_search_is_reported_where_nothing_fits() -> None:
    reports = ProgressReports()
    with pytest.raises(NothingFitsError):
        make_plan(Problem(load_model("llama-3-70b"), load_cluster("h100:8"), JOB), progress=reports)
    assert reports.stages() == ["blocks derived", "layouts priced"] * 2
    reports.clear()
    assert find_nearest_fitting(
        Problem(MODEL, load_cluster("h100:8"), JOB), Layout.parse("dp=8 micro_batch_seqs=32"), reports
    )
    assert reports.stages()[:2] == ["blocks derived", "layouts priced"]


def test_ctrl_c_within_a_report_stops_the_search() -> None:
    """Ctrl-C comes between any two reports, as here within the first."""
    reports = ProgressReports()

    def stopped(stage: str, done: int = 0, total: int = 0) -> None:
        reports(stage, done, total)
        if stage == "layouts priced":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_plan(Problem(MODEL, load_cluster("h100:64"), JOB), progress=stopped)
    assert [report[0] for report in reports].count("layouts priced") == 1


def test_every_published_run_is_reported() -> None:
    reports, rows = ProgressReports(), published_rows()[:5]
    predict_rows(rows, progress=reports)
    assert reports == [("runs predicted", number, 5) for number in range(5)]


def functions() -> Iterator[tuple[str, ast.FunctionDef, bool]]:
    """Those of the package: the module, the function, and whether it tells its progress."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                yield path.stem, node, any(argument.arg == "progress" for argument in arguments)


def test_progress_is_passed_on_to_every_function_that_reports() -> None:
    """Otherwise a part of long work is silent."""
    tellers = {node.name for _, node, tells in functions() if tells and node.name != "__init__"}
    silent = [
        f"{module}.{node.name}: {ast.unparse(call)}"
        for module, node, tells in functions()
        for call in ast.walk(node)
        if tells and isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in tellers
        and not any(isinstance(name, ast.Name) and name.id.endswith("progress") for name in ast.walk(call))
    ]  # fmt: skip
    assert len(tellers) > 50
    assert silent == []
