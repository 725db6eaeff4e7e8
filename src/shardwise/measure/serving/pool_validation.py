"""Predictions of two pools beside the published rows whose workers are known.

The rows are of the same source as those of `serving_rows`: of 462 with prefill and decode apart, 69 state how many workers of
each there were. Of five no concurrency is stated: it is that of all decode workers' batches, as in the rows that state both.

The other 393, of the tables of 2026-03-25 and 2026-04-06, state neither workers nor copies of attention: their degrees are
devices of a worker, and are given as tp even where the same measurement is among the 69 with attention_dp=8. Of these

- 92 are measurements of the 69, to the last digit, and 104 repeat another of the 393;
- 56 are of TensorRT-LLM on B200, whose launches are known (SemiAnalysisAI/InferenceX, Apache-2.0, .github/configs/
  nvidia-master.yaml at 0004cf5f: `dsr1-fp4-b200-dynamo-trt` and `dsr1-fp8-b200-dynamo-trt`): a precision, lengths and a
  concurrency name one launch with its workers, their degrees and its drafted tokens. Of the 33 of the 69 that the file has too
  it names the workers of 32, and of the last all but a degree. They are here as well;
- 11 have two launches of one concurrency, which differ in drafts or in workers, so that nothing but the outcome tells them apart;
- 130 are of SGLang, and of TensorRT-LLM on H100: their launches have not been matched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from shardwise.hardware import load_cluster
from shardwise.measure.serving.package_rows import read_package_rows
from shardwise.measure.serving.serving_errors import ServingErrors
from shardwise.measure.serving.serving_rows import DEVICES
from shardwise.model import load_model
from shardwise.serve import (
    BatchLimits,
    PooledEstimate,
    PooledLayout,
    Prediction,
    ServingFormats,
    ServingProblem,
    Workload,
    estimate_pools,
)
from shardwise.values import Payload

ROWS_FILE = "pool_rows.csv"
LAUNCHED_SOURCE = "InferenceX table of 2026-03-25"  # of rows whose workers their launch says


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRow:
    """One measured deployment of two pools, and its median `ttft_s` and `tpot_s`. Lengths are nominal (`serving_rows`)."""

    model: str
    chip: str
    engine: str
    layout: PooledLayout
    formats: ServingFormats
    isl: int
    osl: int
    length_share: float
    concurrency: float
    mtp_tokens: int
    ttft_s: float
    tpot_s: float
    source: str

    @property
    def states_workers(self) -> bool:
        """True if the row states its workers itself: widths and one factor of pools rest on these."""
        return self.source != LAUNCHED_SOURCE

    @property
    def problem(self) -> ServingProblem:
        """The problem of the row, on as many nodes as its pools take."""
        num_devices = -(-self.layout.num_devices // DEVICES) * DEVICES
        return ServingProblem(
            architecture=load_model(self.model), cluster=load_cluster(f"{self.chip}:{num_devices}"), engine=self.engine,
            formats=self.formats,
            workload=Workload(
                isl=round(self.isl * self.length_share), osl=round(self.osl * self.length_share),
                concurrency=self.concurrency, length_spread=2.0 * (1.0 - self.length_share),
            ),
            batch_limits=BatchLimits(mtp_tokens=self.mtp_tokens),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolValidation(Payload):
    """Errors of predictions of published rows of pools, and the shares of rows inside 90% intervals."""

    num_rows: int
    tpot: ServingErrors
    ttft: ServingErrors
    tpot_coverage: float
    ttft_coverage: float


@cache
def published_pool_rows() -> tuple[PoolRow, ...]:
    """Return the published rows of pools.

    >>> rows = published_pool_rows()
    >>> len(rows), sorted({row.model for row in rows})
    (125, ['deepseek-v3', 'qwen3-32b'])
    """
    return tuple(_parse_row(row) for row in read_package_rows(ROWS_FILE))


def _parse_row(row: dict[str, str]) -> PoolRow:
    return PoolRow(
        model=row["model"], chip=row["chip"], engine=row["engine"],
        layout=PooledLayout.parse(f"prefill: {row['prefill']}; decode: {row['decode']}"),
        formats=ServingFormats(weights=row["weights"], attention=row["attention"] or None, cache=row["cache"]),
        isl=int(row["isl"]), osl=int(row["osl"]), length_share=float(row["length_share"]),
        concurrency=float(row["concurrency"]), mtp_tokens=int(row["mtp_tokens"]), ttft_s=float(row["ttft_s"]),
        tpot_s=float(row["tpot_s"]), source=row["source"],
    )  # fmt: skip


def validate_pool_rows(*, states_workers: bool) -> PoolValidation:
    """Return errors and coverage of the published rows of pools that state their workers, or of those whose launch does."""
    rows = [row for row in published_pool_rows() if row.states_workers is states_workers]
    estimates = [estimate_pools(row.problem, row.layout) for row in rows]
    errors = {
        name: ServingErrors.of(
            np.log([_predict(estimate, name).value for estimate in estimates]) - np.log(_measure(rows, name))
        )
        for name in ("tpot_s", "ttft_s")
    }
    inside = {
        name: [
            prediction.low is not None and prediction.high is not None and prediction.low <= measured <= prediction.high
            for prediction, measured in zip(
                (_predict(estimate, name) for estimate in estimates), _measure(rows, name), strict=True
            )
        ]
        for name in errors
    }
    return PoolValidation(
        num_rows=len(rows), tpot=errors["tpot_s"], ttft=errors["ttft_s"], tpot_coverage=float(np.mean(inside["tpot_s"])),
        ttft_coverage=float(np.mean(inside["ttft_s"])),
    )  # fmt: skip


def _predict(estimate: PooledEstimate, name: str) -> Prediction:
    prediction: Prediction = getattr(estimate, name)
    return prediction


def _measure(rows: Sequence[PoolRow], name: str) -> list[float]:
    return [getattr(row, name) for row in rows]
