"""The ladders, at sizes that fill a GPU or at small ones. PyTorch and Triton are loaded when a rung runs.

Sources: Ultra-Scale Playbook, "Diving in the GPUs" (ELU three ways, coalescing, tiling, fused kernels, FlashAttention); Milakov
et al. 2018 (online softmax); Dao et al. 2022 and Dao 2023 (FlashAttention).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from shardwise.measure.kernel_ladders.cast_ladder import gated_cast_ladder
from shardwise.measure.kernel_ladders.closed_forms import flash_backward_loads, flash_forward_loads
from shardwise.measure.kernel_ladders.ladder import ITEM_BYTES, Ladder, Rung, normal_operands, triton_call
from shardwise.measure.kernel_ladders.product_ladders import (
    batched_product_ladder,
    deep_product_ladder,
    int8_layer_ladder,
    layer_batch_ladder,
    product_ladder,
)
from shardwise.run.triton_kernels.traffic import SECTOR_BYTES, STATISTIC_BYTES, WARP_LANES, norm_forward_traffic

EPSILON = 1e-5


def elu_ladder(size: int = 2**26) -> Ladder:
    """Return ELU of `size` elements: separate kernels, PyTorch's compiler, neighbours far apart, one coalesced kernel."""
    data = size * ITEM_BYTES

    def separate(x: Any) -> Any:
        import torch

        return torch.where(x > 0, x, torch.exp(x) - 1.0)

    def reference(x: Any) -> Any:
        import torch

        return torch.nn.functional.elu(x.double())

    return Ladder(
        name="elu", title="a pointwise function",
        benchmark={"bench": "memory", "bytes": 2 * data}, sizes=f"{size:,} elements", flops=3.0 * size, least_bytes=2 * data,
        make_operands=normal_operands((size,)), reference=reference,
        rungs=(
            Rung(name="separate kernels", lesson="exp, subtraction, comparison and choice each pass through memory",
                 run=separate, loaded_bytes=5 * data + size, stored_bytes=3 * data + size, num_launches=4,
                 uses_triton=False),
            Rung(name="compiled", lesson="torch.compile writes them as one kernel (on a CPU they run as they are)",
                 run=CompiledOnGpu(separate), loaded_bytes=data, stored_bytes=data, uses_triton=False),
            Rung(name="one kernel, strided", lesson="one pass, but lanes of a warp read elements far apart: each load brings "
                 "32 bytes for 2", run=triton_call("triton_pointwise", "strided_elu"), loaded_bytes=data, stored_bytes=data,
                 loaded_sectors=size),
            Rung(name="one kernel, coalesced", lesson="neighbouring lanes read neighbouring elements",
                 run=triton_call("triton_pointwise", "elu"), loaded_bytes=data, stored_bytes=data,
                 loaded_sectors=-(-data // SECTOR_BYTES)),
        ),
    )  # fmt: skip


class CompiledOnGpu:
    """A function that `torch.compile` compiles at its first call on a GPU; on a CPU it runs as it is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, x: Any) -> Any:
        """Return the function's result."""
        import torch

        if not x.is_cuda:
            return self._function(x)
        if self._compiled is None:
            self._compiled = torch.compile(self._function)
        return self._compiled(x)


def divergence_ladder(size: int = 2**24, num_steps: int = 256) -> Ladder:
    """Return a sum of `num_steps` for even elements and another for odd ones: lanes of a warp that differ, and that are alike."""
    data = size * ITEM_BYTES
    lanes = 2 * WARP_LANES * -(-size // (2 * WARP_LANES))
    side_flops = 2.0 * num_steps

    def reference(x: Any) -> Any:
        result = x.double().clone()
        for _ in range(num_steps):
            result[0::2] = result[0::2] * 0.5 + 0.25
            result[1::2] = result[1::2] * -0.5 + 0.75
        return result

    def rung(name: str, lesson: str, run: Callable[..., Any], num_sides: int) -> Rung:
        return Rung(
            name=name, lesson=lesson, run=run, loaded_bytes=data, stored_bytes=data,
            executed_flops=num_sides * side_flops * lanes,
        )  # fmt: skip

    return Ladder(
        name="divergence", title="lanes of a warp that differ", sizes=f"{size:,} elements, {num_steps} steps of either side",
        flops=side_flops * size, least_bytes=2 * data, make_operands=normal_operands((size,)), reference=reference,
        rungs=(
            rung("both sides, then a choice", "a choice between results computes both for each element",
                 triton_call("triton_divergence", "choose_sides", num_steps), 2),
            rung("neighbours differ", "each warp has even and odd elements, and goes through both sides with half of its lanes "
                 "masked off", triton_call("triton_divergence", "vote_sides", num_steps, False), 2),
            rung("warps differ", "a warp's elements are alike: it goes through one side",
                 triton_call("triton_divergence", "vote_sides", num_steps, True), 1),
        ),
    )  # fmt: skip


def softmax_ladder(rows: int = 8192, width: int = 8192) -> Ladder:
    """Return the softmax of rows: separate kernels, then three reads of a row, two and one."""
    data = rows * width * ITEM_BYTES

    def separate(x: Any) -> Any:
        exponentials = (x - x.amax(dim=-1, keepdim=True)).exp()
        return exponentials / exponentials.sum(dim=-1, keepdim=True)

    def reference(x: Any) -> Any:
        return x.double().softmax(dim=-1)

    statistics = 2 * rows * ITEM_BYTES
    return Ladder(
        name="softmax", title="a function of rows",
        benchmark={"bench": "memory", "bytes": 2 * data}, sizes=f"{rows:,} rows of {width:,}", flops=5.0 * rows * width,
        least_bytes=2 * data, make_operands=normal_operands((rows, width)), reference=reference,
        rungs=(
            Rung(name="separate kernels", lesson="maximum, difference, exp, sum and quotient each pass through memory",
                 run=separate, loaded_bytes=5 * data + statistics, stored_bytes=3 * data + statistics, num_launches=5,
                 uses_triton=False),
            Rung(name="one kernel, three reads", lesson="nothing but the result is written",
                 run=triton_call("triton_pointwise", "softmax_in_passes"), loaded_bytes=3 * data, stored_bytes=data),
            Rung(name="online softmax", lesson="maximum and sum together, the sum rescaled where the maximum grows",
                 run=triton_call("triton_pointwise", "online_softmax"), loaded_bytes=2 * data, stored_bytes=data),
            Rung(name="row in registers", lesson="a row that fits is read once",
                 run=triton_call("triton_pointwise", "softmax_in_registers"), loaded_bytes=data, stored_bytes=data),
        ),
    )  # fmt: skip


def norm_ladder(rows: int = 16384, width: int = 4096) -> Ladder:
    """Return LayerNorm after a residual sum: separate kernels, PyTorch's norm, one kernel. Each row loads the weight, which
    caches answer."""
    data, row = rows * width * ITEM_BYTES, width * ITEM_BYTES
    statistics = 2 * rows * STATISTIC_BYTES
    fused = norm_forward_traffic(rows, width, ITEM_BYTES, is_layer=True, has_residual=True)

    def separate(x: Any, residual: Any, weight: Any) -> Any:
        total = x + residual
        centred = total - total.mean(dim=-1, keepdim=True)
        return centred * (centred.square().mean(dim=-1, keepdim=True) + EPSILON).rsqrt() * weight

    def two_kernels(x: Any, residual: Any, weight: Any) -> Any:
        import torch

        return torch.nn.functional.layer_norm(x + residual, weight.shape, weight, None, EPSILON)

    def fused_norm(x: Any, residual: Any, weight: Any) -> Any:
        from shardwise.run.triton_kernels.norms import norm_forward

        return norm_forward(x, residual, weight, EPSILON, is_layer=True)[1]

    def reference(x: Any, residual: Any, weight: Any) -> Any:
        return two_kernels((x + residual).double(), 0.0, weight.double())

    return Ladder(
        name="norm", title="LayerNorm after the residual sum", sizes=f"{rows:,} rows of {width:,}",
        flops=8.0 * rows * width, least_bytes=4 * data + row,
        make_operands=normal_operands((rows, width), (rows, width), (width,)), reference=reference,
        rungs=(
            Rung(name="separate kernels", lesson="sum, mean, difference, square, mean, two products: each through memory",
                 run=separate, loaded_bytes=9 * data, stored_bytes=5 * data, num_launches=9, uses_triton=False),
            Rung(name="sum and norm", lesson="PyTorch's norm reads the sum once", run=two_kernels,
                 loaded_bytes=4 * data, stored_bytes=2 * data + statistics, num_launches=2, uses_triton=False),
            Rung(name="one kernel", lesson="the sum stays in registers for the norm", run=fused_norm,
                 loaded_bytes=fused.loaded_bytes, stored_bytes=fused.stored_bytes),
        ),
    )  # fmt: skip


def _attention_line(heads: int, length: int, width: int, *, backward: bool) -> Mapping[str, Any]:
    """Return the benchmark of one sequence of causal attention."""
    return {
        "bench": "attention", "dtype": "bf16", "batch": 1, "heads": heads, "seq_len": length, "head_dim": width, "causal": True,
        "backward": backward,
    }  # fmt: skip


def attention_ladder(heads: int = 64, length: int = 4096, width: int = 128) -> Ladder:
    """Return causal attention forward: scores in memory, then none."""
    data, scores = heads * length * width * ITEM_BYTES, heads * length * length * ITEM_BYTES
    statistics = heads * length * STATISTIC_BYTES

    def separate(query: Any, key: Any, value: Any) -> Any:
        import torch

        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        logits = (query @ key.transpose(-1, -2) * width**-0.5).masked_fill(~mask, float("-inf"))
        return logits.softmax(dim=-1) @ value

    def flash(query: Any, key: Any, value: Any) -> Any:
        return triton_call("triton_attention", "flash_forward")(query, key, value)[0]

    def reference(query: Any, key: Any, value: Any) -> Any:
        return separate(query.double(), key.double(), value.double())

    return Ladder(
        name="attention", title="causal attention, forward",
        benchmark=_attention_line(heads, length, width, backward=False), sizes=f"{heads} heads of {width}, {length:,} tokens",
        flops=2.0 * heads * length * length * width, least_bytes=4 * data + statistics, product_flops=True,
        make_operands=normal_operands(*[(heads, length, width)] * 3), reference=reference,
        rungs=(
            Rung(name="scores in memory", lesson="scores, scaled, masked and as weights: T x T elements four times each way",
                 run=separate, loaded_bytes=3 * data + 4 * scores, stored_bytes=data + 4 * scores, num_launches=5,
                 uses_triton=False),
            Rung(name="blocks with an online softmax", lesson="scores stay on the chip; keys come again for each block",
                 run=flash, loaded_bytes=flash_forward_loads(heads, length, width) * ITEM_BYTES,
                 stored_bytes=data + statistics),
        ),
    )  # fmt: skip


def attention_gradient_ladder(heads: int = 64, length: int = 4096, width: int = 128) -> Ladder:
    """Return the gradients of causal attention: autograd over scores in memory, then scores built again."""
    data, scores = heads * length * width * ITEM_BYTES, heads * length * length * ITEM_BYTES
    matrices, statistics = flash_backward_loads(heads, length, width)

    def leaves(tensors: tuple[Any, ...]) -> list[Any]:
        return [tensor.detach().requires_grad_() for tensor in tensors]

    def autograd(dy: Any, query: Any, key: Any, value: Any, *_: Any) -> Any:
        import torch

        operands = leaves((query, key, value))
        out = attention_ladder(heads, length, width).rungs[0].run(*operands)
        return torch.autograd.grad(out, operands, dy)

    def flash(dy: Any, query: Any, key: Any, value: Any, out: Any, lse: Any) -> Any:
        return triton_call("triton_attention", "flash_backward")(dy, (query, key, value), out, lse)

    def reference(dy: Any, query: Any, key: Any, value: Any, *_: Any) -> Any:
        return autograd(dy.double(), query.double(), key.double(), value.double())

    def make(device: str) -> tuple[Any, ...]:
        dy, query, key, value = normal_operands(*[(heads, length, width)] * 4)(device)
        return (dy, query, key, value, *triton_call("triton_attention", "flash_forward")(query, key, value))

    stored = 3 * data + heads * length * STATISTIC_BYTES
    return Ladder(
        name="attention-gradient", title="causal attention, backward",
        benchmark=_attention_line(heads, length, width, backward=True), sizes=f"{heads} heads of {width}, {length:,} tokens",
        flops=5.0 * heads * length * length * width, least_bytes=8 * data + heads * length * STATISTIC_BYTES,
        product_flops=True, make_operands=make, reference=reference,
        rungs=(
            Rung(name="autograd", lesson="runs the forward pass, and keeps and reads weights of T x T elements",
                 run=autograd, loaded_bytes=8 * data + 11 * scores, stored_bytes=4 * data + 8 * scores, num_launches=12,
                 uses_triton=False),
            Rung(name="scores built again", lesson="dO · O replaces a sum over keys; two kernels rebuild the scores, one for the "
                 "queries' gradient, one for the keys' and values'", run=flash,
                 loaded_bytes=matrices * ITEM_BYTES + statistics * STATISTIC_BYTES, stored_bytes=stored, num_launches=3),
        ),
    )  # fmt: skip


def launch_ladder(num_steps: int = 200, size: int = 4096) -> Ladder:
    """Return additions of 1 to a few elements: a kernel for each, the same in a CUDA graph, one kernel."""
    data = size * ITEM_BYTES

    def separate(x: Any) -> Any:
        for _ in range(num_steps):
            x = x + 1.0
        return x

    def reference(x: Any) -> Any:
        return _round_each_step(x, num_steps)

    moved = num_steps * data
    return Ladder(
        name="launches", title="many short kernels", sizes=f"{num_steps} additions to {size:,} elements",
        flops=float(num_steps * size), least_bytes=2 * data, make_operands=normal_operands((size,)), reference=reference,
        rungs=(
            Rung(name="a kernel each", lesson="each takes as long as the host needs to issue it", run=separate,
                 num_launches=num_steps, loaded_bytes=moved, stored_bytes=moved, uses_triton=False),
            Rung(name="a CUDA graph", lesson="the same kernels, issued once: the device begins each right after the one before",
                 run=GraphReplay(separate), loaded_bytes=moved, stored_bytes=moved, uses_triton=False),
            Rung(name="one kernel", lesson="the loop is inside, and its values in registers",
                 run=triton_call("triton_pointwise", "add_steps", num_steps), loaded_bytes=data, stored_bytes=data),
        ),
    )  # fmt: skip


def _round_each_step(x: Any, num_steps: int) -> Any:
    """Return x + 1 + 1 ... in float64, each sum rounded to the format of x, as kernels that pass it on do."""
    total = x.double()
    for _ in range(num_steps):
        total = (total + 1.0).to(x.dtype).double()
    return total


class GraphReplay:
    """Work that is captured into a CUDA graph at its first call and replayed at the others; on a CPU it runs as it is."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work
        self._graph: Any = None
        self._result: Any = None

    def __call__(self, x: Any) -> Any:
        """Return the result for the operand of the first call."""
        import torch

        if not x.is_cuda:
            return self._work(x)
        if self._graph is None:
            self._work(x)  # kernels are compiled and memory is allocated outside the capture
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._result = self._work(x)
        self._graph.replay()
        return self._result


LADDERS: Mapping[str, Callable[[], Ladder]] = {
    "elu": elu_ladder, "divergence": divergence_ladder, "softmax": softmax_ladder, "norm": norm_ladder,
    "gated-cast": gated_cast_ladder, "launches": launch_ladder,
    "product": product_ladder, "deep-product": deep_product_ladder, "batched-product": batched_product_ladder,
    "layer-batch": layer_batch_ladder, "int8-layer-batch": int8_layer_ladder, "attention": attention_ladder,
    "attention-gradient": attention_gradient_ladder,
}  # fmt: skip
# The same at sizes that Triton's interpreter takes a moment for: none divides its blocks.
SMALL_LADDERS: Mapping[str, Callable[[], Ladder]] = {
    "elu": partial(elu_ladder, 17_001), "divergence": partial(divergence_ladder, 1001, 4),
    "softmax": partial(softmax_ladder, 5, 1500), "norm": partial(norm_ladder, 5, 100),
    "gated-cast": partial(gated_cast_ladder, 40, 136),
    "launches": partial(launch_ladder, 5, 1500), "product": partial(product_ladder, 132, 24, 264),
    "deep-product": partial(deep_product_ladder, 70, 150, 40, 3),
    "batched-product": partial(batched_product_ladder, 3, 70, 50, 40),
    "layer-batch": partial(layer_batch_ladder, 32, 48, (1, 5, 17)),
    "int8-layer-batch": partial(int8_layer_ladder, 40, 200, (1, 5, 17, 65, 130)),
    "attention": partial(attention_ladder, 2, 150, 32), "attention-gradient": partial(attention_gradient_ladder, 2, 150, 32),
}  # fmt: skip
