"""Published rows of serving configurations: what was run, and the median latencies that were measured.

Rows are of InferenceX and of aiconfigurator's authors, as kept in aiconfigurator (Apache-2.0, ai-dynamo/aiconfigurator at
095f58a, silicon_sample.csv; a part of it); `source` says which table. Lengths are nominal: `length_share` of them is used on
average (random lengths of 0.8 to 1.0 of the nominal ones in InferenceX). Formats of attention and of the cache follow the
published recipes. Drafts (`mtp_tokens`) are not stated in the tables: they are inferred where a release was measured twice in
the same configuration on the same day, or changed by a factor from one day to the next, and are 3 with tensor parallelism, 1
with copies of attention.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from shardwise.hardware import Cluster, load_cluster
from shardwise.measure.serving.package_rows import read_package_rows
from shardwise.model import Architecture, load_model
from shardwise.serve import BatchLimits, ServingFormats, ServingLayout, ServingProblem, Workload
from shardwise.serve.engines import ServingEngine, get_serving_engine
from shardwise.values import InputError

ROWS_FILE = "serving_rows.csv"
DEVICES = 8  # of the nodes that were measured
WAVES = 10.0  # requests of a run for each that is in the system (InferenceX: num-prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRow:
    """One measured configuration: a problem's parts, a layout, and median `ttft_s` and `tpot_s`."""

    model: str
    chip: str
    engine: str
    release: str
    measured: str
    layout: ServingLayout
    formats: ServingFormats
    mtp_tokens: int
    isl: int
    osl: int
    length_share: float
    concurrency: float
    admission_passes: int
    max_batched_tokens: int | None
    waves: float
    ttft_s: float
    tpot_s: float
    source: str

    @property
    def mean_isl(self) -> int:
        """Mean tokens of an input."""
        return max(round(self.isl * self.length_share), 1)

    @property
    def mean_osl(self) -> int:
        """Mean tokens of an output."""
        return max(round(self.osl * self.length_share), 1)

    @property
    def length_spread(self) -> float:
        """Share of the longest output that the shortest ones lack: random lengths are uniform around their mean share."""
        return 2.0 * (1.0 - self.length_share)

    @property
    def release_name(self) -> str:
        """The release; of rows that state none, the month in which they were measured."""
        return self.release or self.measured[:7]

    @property
    def serving_engine(self) -> ServingEngine:
        """The engine as its release had it, without the factors of single releases."""
        return get_serving_engine(self.engine).at_release(self.release_name)

    @property
    def constants_name(self) -> str:
        """Name of the constants that the row is priced with: the engine's, or those of an early release of it."""
        return self.serving_engine.constants_name

    @property
    def expert_or_weight_format(self) -> str:
        """Format of the experts, or of the weights of a dense model."""
        formats = self.formats
        return (formats.expert_format if row_architecture(self.model).num_experts else formats.weight_format).name

    @property
    def problem(self) -> ServingProblem:
        """The problem of the row, at the engine's newest release, or at an early one that has constants of its own."""
        engine = self.serving_engine
        return ServingProblem(
            architecture=row_architecture(self.model), cluster=row_cluster(self.chip), engine=self.engine,
            release=None if engine.constants_name == engine.name else engine.release,
            formats=self.formats,
            workload=Workload(
                isl=self.mean_isl, osl=self.mean_osl, concurrency=self.concurrency, length_spread=self.length_spread,
                waves=self.waves,
            ),
            batch_limits=BatchLimits(
                mtp_tokens=self.mtp_tokens, admission_passes=self.admission_passes,
                max_batched_tokens=self.max_batched_tokens,
            ),
        )  # fmt: skip


@cache
def row_architecture(name: str) -> Architecture:
    """Return a model of the rows, which is one of the catalogue."""
    return load_model(name)


@cache
def row_cluster(chip: str) -> Cluster:
    """Return the node of a chip that rows were measured on."""
    return load_cluster(f"{chip}:{DEVICES}")


@cache
def published_serving_rows() -> tuple[ServingRow, ...]:
    """Return the published rows.

    >>> rows = published_serving_rows()
    >>> len(rows), sorted({row.engine for row in rows})
    (1806, ['sglang', 'trtllm', 'vllm'])
    """
    return tuple(_parse_rows(read_package_rows(ROWS_FILE), ROWS_FILE))


def read_serving_rows(path: str) -> tuple[ServingRow, ...]:
    """Return the rows of a CSV file with the columns of the published ones. Raises `InputError` for what cannot be read."""
    with open(path, encoding="utf-8", newline="") as file:
        return tuple(_parse_rows(csv.DictReader(file), path))


def _parse_rows(cells: Iterable[dict[str, str]], label: str) -> Iterable[ServingRow]:
    for number, row in enumerate(cells, start=2):
        try:
            yield _parse_row(row)
        except (KeyError, ValueError) as error:
            raise InputError(f"{label}, line {number}: {error}; the columns of {ROWS_FILE} are required") from error


def _parse_row(row: dict[str, str]) -> ServingRow:
    return ServingRow(
        model=row["model"], chip=row["chip"], engine=row["engine"], release=row["release"], measured=row["measured"],
        layout=ServingLayout.parse(row["layout"]),
        formats=ServingFormats(
            weights=row["weights"], attention=row["attention"] or None, experts=row["experts"] or None, cache=row["cache"]
        ),
        mtp_tokens=int(row["mtp_tokens"] or 0), isl=int(row["isl"]), osl=int(row["osl"]),
        length_share=float(row["length_share"] or 1.0), concurrency=float(row["concurrency"]),
        admission_passes=int(row["admission_passes"] or 1),
        max_batched_tokens=int(row["max_batched_tokens"]) if row["max_batched_tokens"] else None,
        waves=WAVES, ttft_s=float(row["ttft_s"]),
        tpot_s=float(row["tpot_s"]), source=row["source"],
    )  # fmt: skip
