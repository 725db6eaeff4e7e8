"""A rank of the engine in float64: `python -m train.in_float64 FLAGS`, or of a launcher that starts its ranks so, with `launch`.

Where PRODUCT_S is given, products alone take time by the ranks' clocks, so many seconds each, and three times as many on the rank
whose number is in SLOW: what else the machine does makes no difference.
"""

from __future__ import annotations

import os
import sys
from functools import partial

from torch import Tensor
from train.float64 import register

from shardwise import train
from shardwise.run import launcher
from shardwise.run.kernels import matmul
from shardwise.run.step_clock import StepClock


def count_product_time(seconds: float) -> None:
    """Have this rank's clock count so many seconds for every product, and none for what else it does."""
    multiplied, passed_s = matmul.multiply, 0.0

    def counting(rows: Tensor, columns: Tensor) -> Tensor:
        nonlocal passed_s
        passed_s += seconds
        return multiplied(rows, columns)

    matmul.multiply = counting
    StepClock._mark = lambda self: passed_s  # type: ignore[method-assign]


def main() -> None:
    """Run a rank, or the launcher of ranks."""
    register()
    if "RANK" not in os.environ:
        launcher.LEAVE_S = 2.0
        start = partial(launcher.launch_and_wait, module="train.in_float64")
        launcher.launch_and_wait = start  # type: ignore[assignment]
        sys.exit(train.main())
    if seconds := float(os.environ.get("PRODUCT_S", "0")):
        count_product_time(seconds * (3 if os.environ.get("SLOW") == os.environ["RANK"] else 1))
    train.run_and_exit(train.rank_main)


if __name__ == "__main__":
    main()
