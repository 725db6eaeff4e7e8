"""Allocations of a step: how many tensors the engine makes, their bytes, and the bytes that it fills with a constant, by layout.

    python benchmarks/allocations.py                 # a rank of each layout, on tensors without data
    python benchmarks/allocations.py --layout ZeRO-2 --precision bf16
    python benchmarks/allocations.py --json

A step of four micro-batches of a Llama of four layers runs without the other ranks (`run.trainer.rehearsal`), in bf16 and with
FP8 weights cast once a step. Counted at PyTorch's dispatcher: each new storage, and each storage that a kernel fills. `repeats`:
whether the next step makes storages of the same sizes in the same order, which a caching allocator then serves from what it has.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import shardwise as sw
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.run.dispatch_mode import DispatchMode
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.engine_prediction import engine_instance
from shardwise.run.trainer.rehearsal import lone_rank_world
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.search.plan import Plan, plan_layout

MODEL = Architecture(
    name="llama of four layers",
    num_layers=4,
    d_model=1024,
    d_ff=2816,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=32_000,
)
NUM_MICRO_BATCHES, SEQ_LEN = 4, 1024
LAYOUTS = {
    "one device": sw.Layout(),
    "dp=8": sw.Layout(dp=8),
    "ZeRO-1": sw.Layout(fsdp=8, zero_stage=1),
    "ZeRO-2": sw.Layout(fsdp=8, zero_stage=2),
    "ZeRO-3": sw.Layout(fsdp=8, zero_stage=3),
    "ZeRO-3, recompute": sw.Layout(fsdp=8, zero_stage=3, recompute="full"),
}
FILLS = ("zero", "fill", "zeros", "ones", "full", "new_zeros", "zeros_like", "full_like")


class AllocationCounter(DispatchMode):
    """Counts new storages by the kernel that makes them, and filled bytes, while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []
        self.bytes_by_kernel: Counter[str] = Counter()
        self.num_by_kernel: Counter[str] = Counter()
        self.filled_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        storages = {id(tensor.untyped_storage()) for tensor in tensors_of((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        for tensor in tensors_of(out):
            num_bytes = tensor.numel() * tensor.element_size()
            if name in FILLS:
                self.filled_bytes += num_bytes
            if id(tensor.untyped_storage()) not in storages:
                self.sizes.append(num_bytes)
                self.num_by_kernel[name] += 1
                self.bytes_by_kernel[name] += num_bytes
        return out


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))


def plan_of(layout: sw.Layout, precision: str) -> Plan:
    tokens = layout.num_replicas * layout.micro_batch_seqs * NUM_MICRO_BATCHES * SEQ_LEN
    job = Job(global_batch_tokens=tokens, seq_len=SEQ_LEN, precision=precision, loss="in_place")
    return plan_layout(MODEL, sw.load_cluster(f"h100:{layout.num_devices}"), job, layout)


def count_allocations(layout: sw.Layout, precision: str) -> dict[str, Any]:
    """Return what the second step of a rank allocates and fills."""
    recipe = TrainingRecipe(steps=10)
    instance = engine_instance(plan_of(layout, precision), recipe)
    engine = TrainingEngine(instance, recipe, lone_rank_world(instance.mesh, 0))
    ids = torch.empty((layout.micro_batch_seqs, SEQ_LEN), dtype=torch.int64, device="meta")
    counters = []
    for step in range(3):
        with AllocationCounter() as counter:
            engine.step(
                [MicroBatch(ids, ids)] * NUM_MICRO_BATCHES, NUM_MICRO_BATCHES * SEQ_LEN, NUM_MICRO_BATCHES, step
            )
        counters.append(counter)
    second, third = counters[1:]
    return {
        "allocations": len(second.sizes), "bytes": sum(second.sizes), "filled_bytes": second.filled_bytes,
        "repeats": second.sizes == third.sizes,
        "largest": {name: [second.num_by_kernel[name], size] for name, size in second.bytes_by_kernel.most_common(6)},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--precision", action="append", help="may be repeated (default: bf16 and fp8_blockwise)")
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="may be repeated (default: all)")
    arguments = parser.parse_args()
    results = {
        f"{precision}, {name}": count_allocations(layout, precision)
        for precision in arguments.precision or ("bf16", "fp8_blockwise")
        for name, layout in LAYOUTS.items() if name in (arguments.layout or LAYOUTS)
    }  # fmt: skip
    if arguments.json:
        print(json.dumps(results, indent=1))
        return
    print(f"{'':<32} {'allocations':>11} {'MB':>9} {'filled MB':>9}  repeats  largest by kernel")
    for name, result in results.items():
        largest = ", ".join(
            f"{kernel} {num} ({size / 1e6:.0f} MB)" for kernel, (num, size) in result["largest"].items()
        )
        print(
            f"{name:<32} {result['allocations']:>11,} {result['bytes'] / 1e6:>9,.0f} {result['filled_bytes'] / 1e6:>9,.1f}"
            f"  {result['repeats']!s:<7}  {largest}"
        )


if __name__ == "__main__":
    main()
