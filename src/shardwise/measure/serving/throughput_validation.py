"""Saturated throughput of TensorRT-LLM's own table beside predictions: rows that no constant is fitted to.

Rows are of NVIDIA/TensorRT-LLM at 03e27c7 (Apache-2.0), docs/source/developer-guide/perf-overview.md: output tokens per second
and device at saturation. "DEP" are copies of attention with experts split by expert. The table states no concurrency, so that
it has no latencies to fit. Of its 150 rows 106 are here: 27 are of RTX PRO 6000 and 17 of Llama 4 Maverick, which the catalogues
of chips and models lack.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from shardwise.measure.serving.package_rows import read_package_rows
from shardwise.measure.serving.serving_errors import ServingErrors
from shardwise.measure.serving.serving_rows import row_architecture, row_cluster
from shardwise.serve import ConfigurationTable, ServingFormats, ServingLayout, ServingProblem, Workload, estimate_table
from shardwise.serve.engines import get_serving_engine
from shardwise.values import Payload

THROUGHPUT_FILE = "throughput_rows.csv"
ENGINE = "trtllm"
GRID_POINTS = 60  # concurrencies among which the largest throughput is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputRow:
    """A configuration, and the output tokens per second and device that were measured of it at saturation."""

    model: str
    chip: str
    layout: ServingLayout
    weights: str
    isl: int
    osl: int
    tokens_per_s_per_device: float

    @property
    def problem(self) -> ServingProblem:
        """The problem of the row: with weights in fp4 attention of models with experts stays in 16 bits, the cache has 8 bits."""
        architecture = row_architecture(self.model)
        formats = ServingFormats(
            weights=self.weights, attention="bf16" if self.weights == "nvfp4" and architecture.num_experts else None,
            cache="fp8",
        )  # fmt: skip
        if self.weights == "mxfp4":
            formats = ServingFormats(experts=self.weights, cache="fp8")
        return ServingProblem(
            architecture=architecture, cluster=row_cluster(self.chip), engine=ENGINE, formats=formats,
            workload=Workload(isl=self.isl, osl=self.osl, concurrency=1.0),
        )  # fmt: skip


@cache
def published_throughput_rows() -> tuple[ThroughputRow, ...]:
    """Return the rows of the table.

    >>> rows = published_throughput_rows()
    >>> len(rows), sorted({row.chip for row in rows})
    (106, ['b200', 'gb200', 'h100', 'h200'])
    """
    return tuple(_parse_row(row) for row in read_package_rows(THROUGHPUT_FILE))


def _parse_row(row: dict[str, str]) -> ThroughputRow:
    return ThroughputRow(
        model=row["model"], chip=row["chip"], layout=ServingLayout.parse(row["layout"]), weights=row["weights"],
        isl=int(row["isl"]), osl=int(row["osl"]), tokens_per_s_per_device=float(row["tokens_per_s_per_device"]),
    )  # fmt: skip


def saturated_throughput(row: ThroughputRow) -> float:
    """Return the most output tokens per second and device over the concurrencies that fit."""
    engine = get_serving_engine(ENGINE)
    copies = row.layout.attention_copies
    # Some requests beyond the largest batch of all copies: what does not fit is left out.
    concurrencies = np.unique(np.geomspace(1, 4 * engine.max_num_seqs * copies, GRID_POINTS).round())
    table = ConfigurationTable.of(
        [row.layout] * len(concurrencies), list(concurrencies), [engine.max_batched_tokens] * len(concurrencies)
    )
    estimate = estimate_table(row.problem, table)
    return float(np.where(estimate.fits, estimate.tokens_per_s_per_device, 0.0).max())


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputValidation(Payload):
    """Errors of predicted throughput at saturation, and the share of rows that are predicted too high."""

    errors: ServingErrors
    too_high: float


def validate_throughput_rows() -> ThroughputValidation:
    """Return the errors of all rows."""
    rows = published_throughput_rows()
    residuals = np.log([saturated_throughput(row) / row.tokens_per_s_per_device for row in rows])
    return ThroughputValidation(errors=ServingErrors.of(residuals), too_high=float(np.mean(residuals > 0)))
