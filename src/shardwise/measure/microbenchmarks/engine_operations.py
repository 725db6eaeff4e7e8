"""Operations of a layer, its head and its optimizer as the engine runs them, each to be timed alone; and whole steps.

An operation is repeated, and the results of a forward pass are kept until the last repetition, so that it writes to
memory outside any cache, as a training step does. Values have the magnitudes of a training step: larger weights would
make probabilities and gradients subnormal, which some processors multiply a hundred times more slowly. Letters: see
`benchmark_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from shardwise.measure.microbenchmarks.benchmark_layers import MATMUL_FORMS, MatmulShape, SampleLayer, SampleStep
from shardwise.measure.microbenchmarks.timing import DTYPES, make_product
from shardwise.model import DEFAULT_NUMERICS
from shardwise.pipeline import FULL_BACKWARD
from shardwise.run import TrainingEngine, TrainingRecipe
from shardwise.run.engine.calls import ANGLES, GRADIENTS, MASK
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.engine.model_builder import INITIAL_STD, initial_weights
from shardwise.run.engine.unit_passes import run_calls
from shardwise.run.kernels.attention import Attention
from shardwise.run.kernels.cross_entropy import cross_entropy
from shardwise.run.kernels.elementwise import FUNCTIONS
from shardwise.run.kernels.norms import rms_backward, rms_forward
from shardwise.run.kernels.positions_and_masks import AttentionMask, rotate, rotate_back, rotation
from shardwise.run.parallel.sharded_optimizer import NORM_EPSILON, sum_of_squares
from shardwise.run.parallel.world import World
from shardwise.step import RankProgram
from shardwise.step.rank_program import parameter_shapes
from shardwise.values import get_precision

REPEATED_BYTES, MOST_REPEATS = 2**24, 4  # results that a run keeps


class TimedOperation(NamedTuple):
    """A call that computes its result `times` times."""

    run: Callable[[], object]
    times: int


Operations = Iterator[tuple[str, TimedOperation]]
ForwardResult = TypeVar("ForwardResult", bound=Tensor | tuple[Tensor, ...])


def sample_operations(sample: SampleLayer, device: torch.device) -> Operations:
    """Yield all operations of a sample by name."""
    yield from product_operations(sample, device)
    yield sample.expert.name, _product_operation(sample.expert, device, DTYPES[sample.dtype])
    yield from attention_operations(sample, device)
    yield from elementwise_operations(sample, device)
    if sample.has_loss:
        yield "loss", _loss_operation(sample, device)
    yield "update", _update_operation(sample, device)


def product_operations(sample: SampleLayer, device: torch.device) -> Operations:
    """Yield the matrix products of a sample by name."""
    for product in sample.products:
        yield product.name, _product_operation(product, device, DTYPES[sample.dtype])


def best_rate_operation(product: MatmulShape, device: torch.device, dtype: str) -> TimedOperation:
    """Return a forward product in a format of which only the best rate is measured."""
    return _repeat(make_product((product.rows, product.width, product.out), device, dtype))


def _product_operation(product: MatmulShape, device: torch.device, dtype: torch.dtype) -> TimedOperation:
    x = torch.randn(product.rows, product.width, device=device).to(dtype)
    weight = torch.randn(product.out, product.width, device=device).to(dtype)
    dy = torch.randn(product.rows, product.out, device=device).to(dtype)
    runs_by_form: Mapping[str, Callable[[], Tensor]] = {
        "forward": lambda: x @ weight.t(),
        "data": lambda: dy @ weight,
        "weight": lambda: dy.t() @ x,
    }
    assert set(runs_by_form) == set(MATMUL_FORMS)
    return _repeat(runs_by_form[product.form])


def attention_operations(sample: SampleLayer, device: torch.device) -> Operations:
    """Yield attention forward and backward."""
    architecture = sample.architecture
    groups = architecture.num_heads // architecture.num_kv_heads
    heads = (architecture.num_kv_heads, architecture.head_dim)
    q = _random(sample, device, heads[0], groups, heads[1])
    k, v = (_random(sample, device, *heads) for _ in range(2))
    kernel, mask = Attention.of(DEFAULT_NUMERICS, architecture.head_dim), AttentionMask()

    def backward(forward_result: tuple[Tensor, Tensor]) -> object:
        out, lse = forward_result
        return kernel.backward(q, k, v, mask, out, lse, torch.ones_like(out))

    yield from _forward_and_backward("attention", lambda: kernel.forward(q, k, v, mask), backward)


def elementwise_operations(sample: SampleLayer, device: torch.device) -> Operations:
    """Yield a norm, rotary embeddings and an activation, forward and backward; and a sum of hidden states."""
    architecture = sample.architecture
    x, residual = (_random(sample, device, architecture.d_model) for _ in range(2))
    scale, output_gradient = torch.ones(architecture.d_model, device=device, dtype=x.dtype), torch.ones_like(x)
    yield from _forward_and_backward(
        "norm", lambda: rms_forward(x, scale, DEFAULT_NUMERICS.norm_epsilon),
        lambda forward_result: rms_backward(output_gradient, x, forward_result[1], scale, needs_weight=True),
    )  # fmt: skip
    angles = rotation(
        torch.arange(sample.seq_len, device=device), architecture.head_dim, DEFAULT_NUMERICS.rotary, x.dtype
    )
    for name, heads in (("query", architecture.num_heads), ("key", architecture.num_kv_heads)):
        head = _random(
            sample, device, architecture.num_kv_heads, heads // architecture.num_kv_heads, architecture.head_dim
        )
        yield from _forward_and_backward(
            f"rotary of a {name}", partial(rotate, head, angles),
            lambda forward_result: rotate_back(forward_result, angles)
        )  # fmt: skip
    gate, up = (_random(sample, device, architecture.d_ff) for _ in range(2))
    dy = torch.ones_like(up)
    yield from _forward_and_backward(
        "activation", lambda: FUNCTIONS["swiglu"](gate, up),
        lambda forward_result: (FUNCTIONS["swiglu_dgate"](dy, gate, up), FUNCTIONS["swiglu_dup"](dy, gate)),
    )  # fmt: skip
    yield "sum", _repeat(lambda: x + residual)


class DiscardedGradients:
    """Receiver that discards the gradients of weights."""

    def target(self, weight: str) -> tuple[Tensor | None, bool]:
        return None, False

    def deliver(self, weight: str, gradient: Tensor | None) -> None:
        return


def layer_operation(sample: SampleLayer, device: torch.device, times: int) -> TimedOperation:
    """Return a whole layer, forward and backward, `times` times."""
    layer = initial_weights(sample.architecture, 0, DTYPES[sample.dtype], device).model.layers[1]
    x = _random(sample, device, sample.architecture.d_model)
    positions = torch.arange(sample.seq_len, device=device)
    angles = rotation(positions, sample.architecture.head_dim, DEFAULT_NUMERICS.rotary, x.dtype)
    unit, output_gradient = layer.unit, torch.ones_like(x)

    def forward_and_backward() -> None:
        slots = unit.empty_slots()
        layer.put(
            slots, {**layer.weights, ANGLES: angles, "x": x, MASK: AttentionMask(), GRADIENTS: DiscardedGradients()}
        )
        run_calls(unit.forward, slots)
        layer.put(slots, {f"d.{unit.output}": output_gradient.clone()})
        run_calls(unit.backward[FULL_BACKWARD].steps, slots)

    def layers() -> None:
        for _ in range(times):
            forward_and_backward()

    return TimedOperation(layers, times)


LAUNCHES = 100  # kernels in a row that take nothing but their start


def launch_work(device: torch.device) -> Callable[[], object]:
    """Return a kernel over one element."""
    element = torch.zeros((), device=device)
    return lambda: element.add_(1.0)


def step_operation(step: SampleStep, device: torch.device) -> TimedOperation:
    """Return an optimizer step of a model of a few such layers, as the engine trains it."""
    sample = step.sample
    program = RankProgram(architecture=sample.model, layout=step.layout, precision=get_precision(sample.dtype))
    engine = TrainingEngine(program, TrainingRecipe(steps=1), World(program.mesh, device))
    engine.initialize(0)
    generator = torch.Generator().manual_seed(0)  # ranks of one replica read the same tokens
    ids = torch.randint(sample.model.vocab_size, (sample.num_seqs, sample.seq_len), generator=generator).to(device)
    batches = [MicroBatch(ids, ids)] * sample.num_micro_batches
    return TimedOperation(lambda: engine.step(batches, step.job.global_batch_tokens, len(batches), 0), 1)


def loss_operands(sample: SampleLayer, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalised hidden states [N, D], the head's weight [V, D] with its initial deviation, and targets [N]."""
    architecture = sample.architecture
    x = _random(sample, device, architecture.d_model).flatten(0, 1)
    weight = (torch.randn(architecture.vocab_size, architecture.d_model, device=device) * INITIAL_STD).to(x.dtype)
    return x, weight, torch.randint(architecture.vocab_size, (sample.tokens,), device=device)


def _loss_operation(sample: SampleLayer, device: torch.device) -> TimedOperation:
    x, weight, targets = loss_operands(sample, device)

    def loss_and_gradients() -> object:
        logits = torch.mm(x, weight.t())
        loss = cross_entropy(logits, targets, 1.0, None, replace=True)
        return loss, torch.mm(logits, weight), torch.mm(logits.t(), x)

    return TimedOperation(loss_and_gradients, 1)


def _update_operation(sample: SampleLayer, device: torch.device) -> TimedOperation:
    """Return norm, clipping and AdamW of a layer's weights in fp32, the format of the update."""
    shapes = parameter_shapes(sample.architecture)
    weights = [torch.zeros(shape, device=device) for name, shape in shapes.items() if name.startswith("layers.")]
    flat = torch.full((sum(weight.numel() for weight in weights),), 1e-3, device=device)
    parts = torch.split(flat, [weight.numel() for weight in weights])
    for weight, part in zip(weights, parts, strict=True):
        weight.requires_grad_().grad = part.view_as(weight)
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)

    def update() -> None:
        norm = sum_of_squares(flat).sqrt().to(flat.dtype)
        flat.mul_((1.0 / (norm + NORM_EPSILON)).clamp(max=1.0))
        optimizer.step()

    return TimedOperation(update, 1)


def _random(sample: SampleLayer, device: torch.device, *dims: int) -> Tensor:
    """Return random values [B, T, *dims]."""
    return torch.randn(sample.num_seqs, sample.seq_len, *dims, device=device).to(DTYPES[sample.dtype])


def _forward_and_backward(
    name: str, forward: Callable[[], ForwardResult], backward: Callable[[ForwardResult], object]
) -> Operations:
    """Yield an operation forward, and backward from the results that its forward passes keep."""
    yield f"{name} forward", _repeat(forward)
    forward_results = [forward() for _ in range(_num_repeats(forward()))]

    def back() -> None:
        for forward_result in forward_results:
            backward(forward_result)

    yield f"{name} backward", TimedOperation(back, len(forward_results))


def _repeat(run: Callable[[], Any]) -> TimedOperation:
    num_repeats = _num_repeats(run())
    return TimedOperation(lambda: [run() for _ in range(num_repeats)], num_repeats)


def _num_repeats(forward_result: Any) -> int:
    out = forward_result if isinstance(forward_result, Tensor) else forward_result[0]
    return int(max(2, min(MOST_REPEATS, REPEATED_BYTES // max(out.nbytes, 1))))
