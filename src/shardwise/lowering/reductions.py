"""Ways to reduce gradients that rest whole (S1, data parallelism). Loads nothing: flags have them too."""

from __future__ import annotations

from typing import Literal

Reduction = Literal["after", "per_parameter", "bucketed"]
REDUCTIONS: tuple[Reduction, ...] = ("after", "per_parameter", "bucketed")
# Source: S1, data parallelism, second optimization; PyTorch's DistributedDataParallel has MiB.
BUCKET_BYTES = 25_000_000
