"""A rank of the engine in float64: `python -m train.in_float64 FLAGS`, or of a launcher that starts its ranks so, with `launch`.

A rank whose number is in SLOW sleeps three times as long in each product as the others do, where SLEEP_S says how long they do.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial

from torch import Tensor
from train.float64 import register

from shardwise.engine.torch import products
from shardwise.train import __main__ as command
from shardwise.train import elastic, launch, rank


def slowed(seconds: float) -> None:
    """Have every product take so many seconds longer."""
    multiplied = products.multiplied

    def sleeping(rows: Tensor, columns: Tensor) -> Tensor:
        time.sleep(seconds)
        return multiplied(rows, columns)

    products.multiplied = sleeping


def main() -> None:
    """Run a rank, or the launcher of ranks."""
    register()
    if "RANK" not in os.environ:
        launch.LEAVE_S = 2.0
        start = partial(elastic.outcome_of, module="train.in_float64")
        elastic.outcome_of = start  # type: ignore[assignment]
        sys.exit(command.main())
    if seconds := float(os.environ.get("SLEEP_S", "0")):
        slowed(seconds * (3 if os.environ.get("SLOW") == os.environ["RANK"] else 1))
    rank.ended(rank.main)


if __name__ == "__main__":
    main()
