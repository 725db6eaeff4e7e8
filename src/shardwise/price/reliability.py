"""Reliability of a cluster: failure rates, checkpoints, restarts, goodput; and its data centre's power. Defaults have sources.

Letters: M seconds between failures of the whole job, R seconds to be running again, d (delta) seconds to write a checkpoint,
t (tau) seconds of training between two checkpoints. Command lines read this file for their flags: it loads no model.

Sources: Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974; Daly, A higher order
estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22(3), 2006.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.hardware import MAX_QUANTITY
from shardwise.values import raise_problems

LLAMA_3 = "Grattafiori et al., The Llama 3 Herd of Models, 2024, arXiv 2407.21783"
# Where the default of each value of `Reliability` comes from.
RELIABILITY_SOURCES: Mapping[str, str] = {
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
RELIABILITY_UNITS: Mapping[str, str] = {
    "failures_per_device_hour": "failures/h", "checkpoint_bytes_per_s_per_device": "B/s", "restart_s": "s", "pue": "",
    "checkpoint_interval_s": "s",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """Reliability of a cluster, and the power that its data centre draws. `RELIABILITY_SOURCES` has the source of each default.

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
            "failures_per_device_hour": (0.0, 1.0), "checkpoint_bytes_per_s_per_device": (1.0, MAX_QUANTITY),
            "restart_s": (0.0, 1e7), "pue": (1.0, 10.0), "checkpoint_interval_s": (1e-3, 1e9),
        }  # fmt: skip
        raise_problems(
            [
                f"run: {name} is {value:g}; a number of {low:g} to {high:g} is required"
                for name, (low, high) in ranges.items()
                if (value := getattr(self, name)) is not None and not low <= value <= high
            ]
        )


SECONDS_PER_HOUR = 3600.0


def time_between_failures(num_devices: int, reliability: Reliability) -> float | None:
    """Return M in seconds: a failure of any device stops the job. None where nothing fails."""
    rate = reliability.failures_per_device_hour * num_devices
    return SECONDS_PER_HOUR / rate if rate > 0 else None


def young_interval(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between checkpoints that lose the least: sqrt(2·d·M), and M where that is longer.

    Source: Young 1974, to first order in d / M; the cut at M is Daly's, 2006. Differs: Daly takes off d and adds terms that
    matter only where d comes near M.
    """
    return min(math.sqrt(2 * checkpoint_s * mtbf_s), mtbf_s)


def goodput(interval_s: float, checkpoint_s: float, mtbf_s: float, restart_s: float) -> float:
    """Return the share of time that makes progress: t / (M · e^(R/M) · (e^((t + d)/M) - 1)); 0 where it is too small to tell.

    Exact for failures at a constant rate, which may also strike a checkpoint or a restart. To first order it is
    1 - d/t - (R + (t + d)/2)/M. Source: Daly 2006, the complete wall-clock time.
    """
    lost = (restart_s + interval_s + checkpoint_s) / mtbf_s
    if lost > 700:  # e^700 is about as much as a float holds
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + checkpoint_s) / mtbf_s))
