"""Triton kernels of the engine, where PyTorch would launch several passes over memory.

Each file has the kernels of one topic with their formula, FLOPs and bytes, and launchers with the signatures of their
PyTorch references in `run.kernels`, which call them where `run.kernels.device_dispatch.has_triton` says so. Kernels
compute in float32 and write in the dtype of their operands. Triton's interpreter runs them on a CPU
(`TRITON_INTERPRET=1` before Triton is loaded); `ahead_of_time` compiles all of them for GPUs that need not be there.

Modules import Triton, an extra, and are loaded only where it is used. May import `run.data.batches` (one constant),
`model` and `values`.
"""

import os

# Products and sums in one rounding, which is Triton's default up to 3.9; it warns where nothing is chosen.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
