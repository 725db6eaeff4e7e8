"""A kernel of your own, written in C++ or CUDA: compiled by PyTorch, checked, and timed as `shardwise kernels` times its rungs.

    python examples/extension_kernel.py        # CUDA where there is a GPU with nvcc, else C++

It needs a compiler and ninja. To see what a kernel waits for, run it under NVIDIA Nsight Compute:

    ncu --set full --kernel-name regex:add_kernel -o add python examples/extension_kernel.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.cpp_extension import load_inline

from shardwise.measure.microbenchmarks.device_timers import device_timer
from shardwise.measure.microbenchmarks.timing import Timing, make_copy, time_cold_kernel

CPU_SOURCE = """
void add(torch::Tensor x, torch::Tensor y, torch::Tensor out) {
  const float *a = x.data_ptr<float>(), *b = y.data_ptr<float>();
  float *c = out.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) c[i] = a[i] + b[i];
}
"""
CUDA_SOURCE = """
#include <c10/cuda/CUDAStream.h>
__global__ void add_kernel(const float *x, const float *y, float *out, int64_t size) {
  int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i < size) out[i] = x[i] + y[i];
}
void add(torch::Tensor x, torch::Tensor y, torch::Tensor out) {
  const int threads = 256;
  const int64_t size = x.numel(), blocks = (size + threads - 1) / threads;
  add_kernel<<<blocks, threads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      x.data_ptr<float>(), y.data_ptr<float>(), out.data_ptr<float>(), size);
}
"""
DECLARATION = "void add(torch::Tensor x, torch::Tensor y, torch::Tensor out);"


def compile_add(device: str) -> Callable[..., None]:
    """Compile the sum for a device; PyTorch keeps what it compiled for the next run."""
    sources: dict[str, Any] = (
        {"cpp_sources": DECLARATION, "cuda_sources": CUDA_SOURCE} if device == "cuda" else {"cpp_sources": CPU_SOURCE}
    )
    module = load_inline(f"shardwise_example_{device}", **sources, functions=["add"], extra_cflags=["-O3"])
    add: Callable[..., None] = module.add
    return add


def time_add(device: str, size: int) -> tuple[Timing, Timing]:
    """Check the kernel, and time it and a copy of as many bytes with empty caches."""
    x, y = torch.randn(2, size, device=device)
    out = torch.empty_like(x)
    add = compile_add(device)
    add(x, y, out)
    torch.testing.assert_close(out, x + y, rtol=0.0, atol=0.0)
    timer = device_timer(device)
    return time_cold_kernel(partial(add, x, y, out), timer), time_cold_kernel(make_copy(12 * size, device), timer)


def main() -> None:
    """Print the rate of the kernel beside that of a copy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2**24, help="elements (default: 16Mi)")
    size = parser.parse_args().size
    kernel, copy = time_add("cuda" if torch.cuda.is_available() else "cpu", size)
    for name, timing in (("add", kernel), ("copy", copy)):
        spread = f"{timing.low * 1e3:.3f} to {timing.high * 1e3:.3f}"
        print(f"{name:<5} {timing.seconds * 1e3:8.3f} ms ({spread}), {12 * size / timing.seconds / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
