"""Published batches: one after the other by themselves, with the seconds of their inputs, of a token, and the power of a device.

Rows are of Splitwise (Patel et al. 2024, arXiv 2311.18677), as published in Mutinifni/splitwise-sim (MIT), data/perf_model.csv:
medians of 5 to 15 runs of vLLM of 2023 on eight A100 with 80 GB or eight H100 of one node. A batch's requests come at once, its
inputs are computed in one pass, and its outputs have 128 tokens. Of the 1,260 rows that were published are left out:

- 420 "H100 with a power cap": their prompts take 1.3 times those of H100 and their tokens the same, to the last digit, so that
  they were computed and not measured;
- 240 that differ in the length of their outputs alone, which end before it (2,048 tokens in the time of 700).

The others are 104 batches. A power of zero is no reading: only A100 has any, in batches of up to 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from shardwise.measure.serving.package_rows import read_package_rows
from shardwise.measure.serving.serving_rows import ServingRow
from shardwise.serve import ServingFormats, ServingLayout

BATCHES_FILE = "batch_rows.csv"
SOURCE = "Splitwise's batches"
ENGINE, RELEASE = "vllm", "0.2"
SLACK = (
    1.03  # a batch whose requests take longer than this multiple of their prompt and tokens was not computed at once
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """A batch of `batch` requests: seconds until all their inputs are computed, of a token of each after that, and of the whole
    batch. `mean_power_share` and `peak_power_share` are of a device's rated power; None: no reading."""

    model: str
    chip: str
    tp: int
    batch: int
    isl: int
    osl: int
    num_runs: int
    prompt_s: float
    token_s: float
    request_s: float
    mean_power_share: float | None
    peak_power_share: float | None

    @property
    def is_whole(self) -> bool:
        """True if the batch was computed at once: three did not fit, and their requests took turns."""
        return self.request_s <= SLACK * (self.prompt_s + (self.osl - 1) * self.token_s)

    @property
    def serving_row(self) -> ServingRow:
        """The batch as a load of one wave of requests."""
        return ServingRow(
            model=self.model, chip=self.chip, engine=ENGINE, release=RELEASE, measured="2023",
            layout=ServingLayout(tp=self.tp), formats=ServingFormats(), mtp_tokens=0, isl=self.isl, osl=self.osl,
            length_share=1.0, concurrency=float(self.batch), admission_passes=1, max_batched_tokens=self.batch * self.isl,
            waves=1.0, ttft_s=self.prompt_s, tpot_s=self.token_s, source=SOURCE,
        )  # fmt: skip


@cache
def published_batch_rows() -> tuple[BatchRow, ...]:
    """Return the published batches.

    >>> rows = published_batch_rows()
    >>> len(rows), sum(row.is_whole for row in rows), sum(row.mean_power_share is not None for row in rows)
    (104, 101, 44)
    """
    return tuple(_parse_row(row) for row in read_package_rows(BATCHES_FILE))


def _parse_row(row: dict[str, str]) -> BatchRow:
    return BatchRow(
        model=row["model"], chip=row["chip"], tp=int(row["tp"]), batch=int(row["batch"]), isl=int(row["isl"]),
        osl=int(row["osl"]), num_runs=int(row["num_runs"]), prompt_s=float(row["prompt_s"]),
        token_s=float(row["token_s"]), request_s=float(row["request_s"]),
        mean_power_share=float(row["mean_power_share"]) if row["mean_power_share"] else None,
        peak_power_share=float(row["peak_power_share"]) if row["peak_power_share"] else None,
    )  # fmt: skip
