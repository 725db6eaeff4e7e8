"""Compilation of the kernels for GPUs that need not be there, and what they take of a multiprocessor.

Launchers run on tensors without data; their launches are recorded with the types of the arguments, compiled by Triton
for a compute capability, and read with the `cuobjdump` that Triton brings along. Registers in local memory ("spills")
would be read and written at every use.

    python -m shardwise.run.triton_kernels.ahead_of_time 80 90 100     # a JSON list on standard output
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shardwise.run.triton_kernels import (
    adamw,
    block_casts,
    casts,
    cross_entropy,
    expert_permutation,
    fused_casts,
    gated_activation,
    norms,
    rotary,
)
from shardwise.run.triton_kernels.fused_casts import CastOptions
from shardwise.run.triton_kernels.kernel_resources import KernelResources
from shardwise.run.triton_kernels.traffic import WARP_LANES
from shardwise.values.input_texts import parse_integer
from shardwise.values.scalings import ScaleBlock, ScaleKind

POINTER_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5", torch.uint8: "*u8",
    torch.int8: "*i8",
}  # fmt: skip
ALIGNMENT = 16  # Triton specialises a kernel for sizes and addresses that it divides
FP8_CAPABILITY = 89  # the first with conversions to E4M3 (CUDA C++ Programming Guide, Ada and Hopper)
DUMP_FIELDS = {"registers": "REG", "stack_bytes": "STACK", "local_bytes": "LOCAL"}
LAUNCH_OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A launch of a kernel: its arguments by name, and the options of the launch."""

    kernel: triton.JITFunction
    arguments: Mapping[str, Any]
    options: Mapping[str, int]


@contextmanager
def recorded_launches() -> Iterator[list[KernelLaunch]]:
    """Record launches instead of running them."""
    launches: list[KernelLaunch] = []

    def record(kernel: triton.JITFunction, *positional: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        options = {name: keywords.pop(name) for name in LAUNCH_OPTIONS if name in keywords}
        launches.append(KernelLaunch(kernel, dict(zip(kernel.arg_names, positional, strict=False)) | keywords, options))

    with patch.object(triton.JITFunction, "run", record):
        yield launches


def example_launches() -> list[KernelLaunch]:
    """Record a launch of every kernel, in bf16, at sizes of Llama 3's 8B model."""
    tokens, width, vocab_size, bf16 = 8192, 4096, 128_256, torch.bfloat16

    def meta(*shape: int, dtype: torch.dtype = bf16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    targets, lse = meta(1, tokens, dtype=torch.int64), meta(1, tokens, dtype=torch.float32)
    hidden, weight, matrix = meta(1, tokens, width), meta(width), meta(tokens, width)
    statistics = meta(tokens, 1, dtype=torch.float32), meta(tokens, 1, dtype=torch.float32)
    angles = meta(tokens, 64), meta(tokens, 64)
    pairs, gates = meta(tokens, 8, dtype=torch.int64), meta(tokens, 8, dtype=torch.float32)
    expert_rows = meta(8 * tokens, width)
    shards = [meta(10**6, dtype=dtype) for dtype in (torch.float32, bf16)]
    settings = adamw.AdamWSettings(1e-4, 0.9, 0.95, 1e-8, 0.1, 0.1, 0.05)
    calls: list[Callable[[], object]] = [
        *(
            lambda moment=moment, copy=copy: adamw.update(
                shards[0], shards[1], (moment, moment), copy, meta(2, dtype=torch.float32), settings
            )
            for moment in shards
            for copy in (None, shards[1])
        ),
        *(
            lambda cap=cap: cross_entropy.cross_entropy(
                meta(1, tokens, vocab_size), targets, lse[0, 0], cap, replace=True
            )
            for cap in (None, 30.0)
        ),
        lambda: cross_entropy.row_maximum(meta(1, tokens, vocab_size), vocab_size),
        lambda: cross_entropy.row_sum_exp(meta(1, tokens, vocab_size), lse, vocab_size, None),
        lambda: cross_entropy.vocab_parallel_gradient(
            meta(1, tokens, vocab_size), targets, lse, lse[0, 0], range(vocab_size), None
        ),
        *(lambda kind=kind: gated_activation.gated_forward(kind, hidden, hidden) for kind in gated_activation.KINDS),
        *(
            lambda kind=kind: gated_activation.gated_backward(kind, hidden, hidden, hidden)
            for kind in gated_activation.KINDS
        ),
        lambda: rotary.rotate(meta(1, tokens, 8, 4, 128), angles, 1.0),
        *(
            lambda width=width, layer=layer: norms.norm_forward(
                meta(1, tokens, width), meta(1, tokens, width), meta(width), 1e-5, is_layer=layer
            )
            for width in (1024, 4096, norms.MAX_WIDTH)
            for layer in (False, True)
        ),
        *(
            lambda width=width, layer=layer: norms.norm_backward(
                meta(1, tokens, width),
                meta(1, tokens, width),
                meta(width),
                statistics,
                hidden,
                is_layer=layer,
                needs_weight=True,
            )
            for width in (1024, 4096, norms.MAX_WIDTH)
            for layer in (False, True)
        ),
        lambda: norms.norm_backward(hidden, hidden, weight, statistics, None, is_layer=False, needs_weight=False),
        *(
            lambda dtype=dtype: casts.cast_rows(matrix, dtype, power_of_two=True)
            for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        ),
        lambda: casts.cast_matrix(matrix, torch.float8_e4m3fn),
        *(
            lambda block=block, kind=kind, turned=turned: block_casts.cast_blocks(
                matrix, torch.float8_e4m3fn, block, kind, with_transposed=turned
            )
            for block, kind in (((1, 128), "fp32"), ((128, 128), "power_of_two"), ((1, 32), "e8m0"))
            for turned in (False, True)
        ),
        *_calls_with_casts(hidden, weight),
        lambda: expert_permutation.gathered_sum(expert_rows, pairs, gates),
        lambda: expert_permutation.gathered_sum(expert_rows, pairs, None),
        lambda: expert_permutation.gate_gradient(matrix, expert_rows, pairs),
        lambda: expert_permutation.row_gradient(matrix, gates, pairs.flatten()),
    ]
    with recorded_launches() as launches:
        for call in calls:
            call()
    return launches


def _calls_with_casts(hidden: Tensor, weight: Tensor) -> Iterator[Callable[[], object]]:
    """Yield calls of the kernels that cast what they make."""
    shape = hidden.shape[1], weight.numel()
    formats: tuple[tuple[ScaleBlock, ScaleKind], ...] = (((1, 128), "power_of_two"), ((1, 32), "e8m0"))
    for block, kind in formats:
        rows = CastOptions(torch.float8_e4m3fn, block, kind, plain=False, rows=True, columns=False)
        rows_and_columns = rows._replace(columns=True)
        for options, layer in itertools.product((rows, rows_and_columns), (False, True)):
            yield partial(fused_casts.norm_forms, hidden, hidden, weight, 1e-5, options, is_layer=layer)
        for activation in gated_activation.KINDS:
            yield partial(fused_casts.gated_forms, activation, hidden, hidden, shape, rows_and_columns)
            yield partial(
                fused_casts.gated_gradient_forms, activation, (hidden, hidden, hidden), shape, rows_and_columns
            )


def is_supported(launch: KernelLaunch, compute_capability: int) -> bool:
    """Return whether a compute capability has the number formats of a launch."""
    dtypes = {argument.dtype for argument in launch.arguments.values() if isinstance(argument, Tensor)}
    return compute_capability >= FP8_CAPABILITY or torch.float8_e4m3fn not in dtypes


def compile_launch(launch: KernelLaunch, compute_capability: int) -> KernelResources:
    """Compile a kernel as a launch would, for a compute capability such as 90 (Hopper)."""
    constants: dict[str, Any] = {}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for position, parameter in enumerate(launch.kernel.params):
        argument = launch.arguments[parameter.name]
        signature[parameter.name] = "constexpr" if parameter.is_constexpr else _type_of(argument)
        if parameter.is_constexpr:
            constants[parameter.name] = getattr(argument, "value", argument)
        elif isinstance(argument, Tensor) or (
            isinstance(argument, int) and argument % ALIGNMENT == 0 and not parameter.do_not_specialize
        ):
            attributes[(position,)] = [["tt.divisibility", ALIGNMENT]]
    key = launch.kernel, compute_capability, *map(repr, (signature, constants, attributes, launch.options))
    if key not in _COMPILED:
        source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
        _COMPILED[key] = _compile_source(source, launch, compute_capability)
    return _COMPILED[key]


_COMPILED: dict[tuple[Any, ...], KernelResources] = {}  # launches of other sizes are often the same machine code


def _compile_source(source: ASTSource, launch: KernelLaunch, compute_capability: int) -> KernelResources:
    compiled = triton.compile(
        source, target=GPUTarget("cuda", compute_capability, WARP_LANES), options=dict(launch.options)
    )
    usage = _resource_usage(compiled.asm["cubin"])
    return KernelResources(
        kernel=launch.kernel.__name__, compute_capability=compute_capability, num_warps=compiled.metadata.num_warps,
        registers=usage["registers"], spilled_bytes=usage["stack_bytes"] + usage["local_bytes"],
        shared_bytes=compiled.metadata.shared, loads=_load_instructions(compiled.asm["ptx"]),
    )  # fmt: skip


def _type_of(argument: Any) -> str:
    """Return the type of an argument as Triton writes it in a signature."""
    if isinstance(argument, Tensor):
        return POINTER_TYPES[argument.dtype]
    return "i32" if isinstance(argument, int) else "fp32"


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Return the resources that `cuobjdump` lists for the only kernel of a binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: parse_integer(re.findall(rf"\b{field}:(\d+)", text)[-1]) for name, field in DUMP_FIELDS.items()}


def _load_instructions(ptx: str) -> tuple[str, ...]:
    """Return the kinds of instructions that read global memory, without cache hints."""
    plain = re.findall(r"\bld\.global\S*?((?:\.v[248])?\.b\d+)\b", ptx)
    copies = re.findall(r"\bcp\.async(?:\.bulk\.tensor(?=\S*\.shared\S*\.global)|(?=\.c[ag]\.))", ptx)
    return tuple(sorted({f"ld.global{width}" for width in plain} | set(copies)))


def main(arguments: list[str]) -> None:
    """Print the resources of every kernel for some compute capabilities."""
    launches = example_launches()
    resources = [
        compile_launch(launch, capability)
        for capability in map(int, arguments)
        for launch in launches
        if is_supported(launch, capability)
    ]
    json.dump([asdict(kernel) for kernel in resources], sys.stdout, indent=1)


if __name__ == "__main__":
    main(sys.argv[1:])
