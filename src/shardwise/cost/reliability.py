"""How reliably a cluster runs: failures, checkpoints, restarts; and what its data centre draws. Each default has its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.cluster.chip import MOST
from shardwise.errors import require

LLAMA_3 = "Grattafiori et al., The Llama 3 Herd of Models, 2024, arXiv 2407.21783"
# Where the default of each value of `Reliability` comes from.
SOURCES: Mapping[str, str] = {
    "failures_per_device_hour": (
        f"{LLAMA_3}, 3.3.4: 419 unexpected interruptions in 54 days on 16,384 H100 (47 planned ones left out). Others: 3.4e-5 on "
        "A100, 6.50 failures in 1,000 days of a node of 8 (Kokolis et al. 2024, arXiv 2410.21680); 7.4e-5, 105 restarts in two "
        "months on 992 A100 (Zhang et al., OPT, 2022, arXiv 2205.01068, 2.5)"
    ),
    "checkpoint_bytes_per_s_per_device": f"{LLAMA_3}, 3.3.1: storage that sustains 2 TB/s, shared by the 16,384 devices of a run",
    "restart_s": (
        "Jiang et al., MegaScale, NSDI 2024, arXiv 2402.15627, 6.3: faults are found and diagnosed within 10 minutes on average"
    ),
    "pue": "Uptime Institute, Global Data Center Survey 2024: the average of the industry; the largest operators report 1.1",
    "checkpoint_interval_s": "Young 1974: the interval that loses the least, sqrt(2·d·M)",
}  # fmt: skip
UNITS: Mapping[str, str] = {
    "failures_per_device_hour": "failures/h", "checkpoint_bytes_per_s_per_device": "B/s", "restart_s": "s", "pue": "",
    "checkpoint_interval_s": "s",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """How reliably a cluster runs, and what its data centre draws. `SOURCES` has the source of each default.

    `failures_per_device_hour`: failures in 1/h; `checkpoint_bytes_per_s_per_device`: write bandwidth in bytes/s; `restart_s`:
    seconds from an interruption until the checkpoint is read; `pue`: power of the data centre over that of its machines;
    `checkpoint_interval_s`: seconds between checkpoints, None for Young's interval. Raises `InputError` for values out of range.

    >>> round(1 / (Reliability().failures_per_device_hour * 16384), 1)  # hours between failures of 16,384 devices
    3.1
    """

    failures_per_device_hour: float = 419 / (54 * 24 * 16384)
    checkpoint_bytes_per_s_per_device: float = 2e12 / 16384
    restart_s: float = 600.0
    pue: float = 1.56
    checkpoint_interval_s: float | None = None

    def __post_init__(self) -> None:
        ranges = {
            "failures_per_device_hour": (0.0, 1.0), "checkpoint_bytes_per_s_per_device": (1.0, MOST),
            "restart_s": (0.0, 1e7), "pue": (1.0, 10.0), "checkpoint_interval_s": (1e-3, 1e9),
        }  # fmt: skip
        require(
            [
                f"run: {name} is {value:g}; a number of {low:g} to {high:g} is required"
                for name, (low, high) in ranges.items()
                if (value := getattr(self, name)) is not None and not low <= value <= high
            ]
        )
