"""The published runs nearest to a problem: of its model and chip, or of its size.

They are found in `run_index.csv`, which has what the search for them needs of each row of `runs.csv`, so that a plan need not
read models and layouts from cells. `python -m shardwise.measure.calibrate.published_runs.nearest_runs` writes it again.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

from shardwise.hardware.chips import GPU_GENERATIONS, chip_generation
from shardwise.model import num_active_params, num_params
from shardwise.price import Problem
from shardwise.search import NearestRuns, Plan, PublishedComparison, PublishedRun, compare_published_runs

INDEX_NAME = "run_index.csv"
INDEX_COLUMNS = (
    "id", "model", "chip", "num_devices", "software", "precision", "seq_len", "num_seqs", "layout", "recomputes",
    "tokens_per_s_per_device", "source", "task", "num_layers", "d_model", "num_experts", "params", "active_params",
)  # fmt: skip
OTHER_GENERATION = len(GPU_GENERATIONS)  # distance between chips of which one is in none of them
MAX_RATIO = 2.0  # of active parameters: a run further off says little of a plan
NUM_SIMILAR = 12  # runs that are returned where none is of the model
PARAMETERS_TOLERANCE = 0.02  # of one model: what names of norms and biases leave open


@dataclass(frozen=True, slots=True)
class IndexedRun:
    """A published run with what it is found by: the task, sizes of its model, parameters and those that a token uses."""

    run: PublishedRun
    task: str
    num_layers: int
    d_model: int
    num_experts: int
    params: float
    active_params: float


def nearest_published_runs(problem: Problem) -> NearestRuns:
    """Return the published runs nearest to a problem, nearest first.

    All runs of its model on its chip, those in its number format and of as many devices first; without one, runs of the same
    kind (dense or with experts) of at most `MAX_RATIO` times more or fewer active parameters, ordered by these, by the chip's
    generation and by devices. Runs of another task (pre-training, fine-tuning, adapters) are left out.

    >>> import shardwise as sw
    >>> job = sw.Job(global_batch_tokens=2**22, seq_len=4096)
    >>> nearest = nearest_published_runs(Problem(sw.load_model("qwen3-30b-a3b"), sw.load_cluster("h100:64"), job))
    >>> nearest.same_model, nearest.same_chip, nearest.runs[0].chip
    (True, True, 'h100')
    """
    architecture, cluster, job = problem.architecture, problem.cluster, problem.job
    task = "lora" if architecture.lora_rank else "sft" if job.document_tokens else "pretrain"
    params, active_params = float(num_params(architecture)), float(num_active_params(architecture))
    chip = cluster.chip.catalog_name

    def size_distance(indexed: IndexedRun) -> float:
        return abs(math.log2(indexed.active_params / active_params))

    def job_distance(indexed: IndexedRun) -> tuple[float, ...]:
        run = indexed.run
        return (
            abs(math.log2(run.num_devices / cluster.num_devices)), abs(math.log2(run.seq_len / job.seq_len)),
            run.precision != job.precision,
        )  # fmt: skip

    same_kind = [
        indexed for indexed in read_index()
        if indexed.task == task and bool(indexed.num_experts) == bool(architecture.num_experts)
    ]  # fmt: skip
    of_model = [
        indexed for indexed in same_kind
        if not architecture.index_topk  # none of the models that were published has an indexer
        and (indexed.num_layers, indexed.d_model, indexed.num_experts)
        == (architecture.num_layers, architecture.d_model, architecture.num_experts)
        and abs(indexed.params / params - 1) <= PARAMETERS_TOLERANCE
    ]  # fmt: skip
    of_chip = [indexed for indexed in of_model if indexed.run.chip == chip]
    if of_chip:
        runs = sorted(of_chip, key=job_distance)
        return NearestRuns(runs=tuple(indexed.run for indexed in runs), same_model=True, same_chip=True)
    if of_model:
        runs = sorted(
            of_model, key=lambda indexed: (generation_distance(indexed.run.chip, chip), *job_distance(indexed))
        )
        return NearestRuns(runs=tuple(indexed.run for indexed in runs), same_model=True, same_chip=False)
    similar = sorted(
        (indexed for indexed in same_kind if size_distance(indexed) <= math.log2(MAX_RATIO)),
        # Sizes within a tenth count as one: 7B and 8B models are the same neighbourhood, not two.
        key=lambda indexed: (
            round(size_distance(indexed) / math.log2(1.2)), generation_distance(indexed.run.chip, chip), *job_distance(indexed)
        ),
    )  # fmt: skip
    runs = similar[:NUM_SIMILAR]
    same_chip = all(indexed.run.chip == chip for indexed in runs)
    return NearestRuns(runs=tuple(indexed.run for indexed in runs), same_model=False, same_chip=same_chip)


def compare_with_published_runs(plan: Plan) -> PublishedComparison | None:
    """Return the nearest published runs with their layouts priced for a plan's job; None where there are none."""
    return compare_published_runs(plan, nearest_published_runs(plan.problem))


def generation_distance(chip: str, second_chip: str) -> int:
    """Return how many generations lie between two chips of the catalogue; the most if one of them is not listed.

    >>> generation_distance("h100", "h200"), generation_distance("a100-80gb", "b200"), generation_distance("h100", "tpu-v5p")
    (0, 2, 4)
    """
    if chip == second_chip:
        return 0
    generations = list(GPU_GENERATIONS)
    numbers = [
        generations.index(generation)
        for generation in map(chip_generation, (chip, second_chip))
        if generation in generations
    ]
    return abs(numbers[0] - numbers[1]) if len(numbers) == 2 else OTHER_GENERATION


@lru_cache(maxsize=1)
def read_index() -> tuple[IndexedRun, ...]:
    """Return the runs of the index that the package ships."""
    text = (
        resources.files("shardwise.measure.calibrate.published_runs").joinpath(INDEX_NAME).read_text(encoding="utf-8")
    )
    lines = csv.reader(io.StringIO(text, newline=""))
    next(lines)  # the header, `INDEX_COLUMNS`
    return tuple(map(_parse_indexed_run, lines))


def _parse_indexed_run(cells: list[str]) -> IndexedRun:
    run = PublishedRun(
        id=cells[0], model_name=cells[1], chip=cells[2], num_devices=int(cells[3]), software=cells[4], precision=cells[5],
        seq_len=int(cells[6]), num_seqs=int(cells[7]), layout_text=cells[8], recomputes=tuple(cells[9].split()),
        tokens_per_s_per_device=float(cells[10]), source=cells[11],
    )  # fmt: skip
    return IndexedRun(
        run, cells[12], int(cells[13]), int(cells[14]), int(cells[15]), float(cells[16]), float(cells[17])
    )


def index_text() -> str:
    """Return the text of the index: a line for each row of `runs.csv` with a measured step whose layout can be read."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(INDEX_COLUMNS)
    writer.writerows(_index_lines())
    return out.getvalue()


def _index_lines() -> Iterator[Iterable[object]]:
    # Rows become models and layouts here alone: plans read the index.
    from shardwise.measure.calibrate.published_runs.prediction_from_row import read_case
    from shardwise.measure.calibrate.published_runs.run_table import SkippedRow, published_rows

    for row in published_rows():
        try:
            case = read_case(row.cells)
        except SkippedRow:
            continue
        if row.step_time_s is None:
            continue
        model, job, num_devices = case.architecture, case.job, case.cluster.num_devices
        rate = job.global_batch_tokens / (row.step_time_s * num_devices)
        yield (
            row.id, model.name, case.cluster.chip.catalog_name, num_devices, row.cell("software"), job.precision,
            job.seq_len, job.num_seqs, case.layout, " ".join(case.recomputes), f"{rate:.5g}", row.source,
            row.cell("task").lower() or "pretrain", model.num_layers, model.d_model, model.num_experts,
            f"{float(num_params(model)):.6g}", f"{float(num_active_params(model)):.6g}",
        )  # fmt: skip


if __name__ == "__main__":
    Path(__file__).with_name(INDEX_NAME).write_text(index_text(), encoding="utf-8")
