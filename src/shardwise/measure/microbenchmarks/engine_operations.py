"""The operations of a layer, its head and its optimizer as the engine runs them, each to be timed alone; whole steps of them.

A run makes its results several times, and keeps those of a forward pass until the last, as a training step does: it writes to
memory that no cache holds. Values are of the sizes that a training step has: weights of a larger scale make probabilities and
gradients that are subnormal, which some processors multiply a hundred times more slowly. Letters: see `samples`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from shardwise.measure.microbenchmarks.benchmark_layers import MATMUL_FORMS, MatmulShape, SampleLayer
from shardwise.measure.microbenchmarks.timing import DTYPES
from shardwise.model.numerics import DEFAULT_NUMERICS
from shardwise.pipeline.actions import FULL_BACKWARD
from shardwise.run.engine.call_builder import ANGLES, GRADIENTS, MASK
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.engine.model_builder import INITIAL_STD, initial_weights
from shardwise.run.engine.unit_passes import run_calls
from shardwise.run.kernels.attention import Attention
from shardwise.run.kernels.attention_mask import AttentionMask
from shardwise.run.kernels.cross_entropy import cross_entropy
from shardwise.run.kernels.elementwise import FUNCTIONS
from shardwise.run.kernels.norms import rms_backward, rms_forward
from shardwise.run.kernels.rotary import rotate, rotate_back, rotation
from shardwise.run.parallel.sharded_optimizer import NORM_EPSILON, sum_of_squares
from shardwise.run.parallel.world import World
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.step.rank_program import RankProgram
from shardwise.step.whole_parameters import parameter_shapes
from shardwise.values.precision import get_precision

REPEATED_BYTES, MOST_REPEATS = 2**24, 4  # results that a run keeps


class TimedOperation(NamedTuple):
    """Something that makes its result so many `times`."""

    run: Callable[[], object]
    times: int


Operations = Iterator[tuple[str, TimedOperation]]
ForwardResult = TypeVar("ForwardResult", bound=Tensor | tuple[Tensor, ...])


def sample_operations(sample: SampleLayer, place: torch.device) -> Operations:
    """All of a sample, by name."""
    yield from product_operations(sample, place)
    yield sample.expert.name, _product_operation(sample.expert, place, DTYPES[sample.dtype])
    yield from attention_operations(sample, place)
    yield from elementwise_operations(sample, place)
    if sample.has_loss:
        yield "loss", _loss_operation(sample, place)
    yield "update", _update_operation(sample, place)


def product_operations(sample: SampleLayer, place: torch.device) -> Operations:
    for one in sample.products:
        yield one.name, _product_operation(one, place, DTYPES[sample.dtype])


def _product_operation(one: MatmulShape, place: torch.device, dtype: torch.dtype) -> TimedOperation:
    x = torch.randn(one.rows, one.width, device=place).to(dtype)
    weight = torch.randn(one.out, one.width, device=place).to(dtype)
    dy = torch.randn(one.rows, one.out, device=place).to(dtype)
    made: Mapping[str, Callable[[], Tensor]] = {
        "forward": lambda: x @ weight.t(),
        "data": lambda: dy @ weight,
        "weight": lambda: dy.t() @ x,
    }
    assert set(made) == set(MATMUL_FORMS)
    return _repeat(made[one.form])


def attention_operations(sample: SampleLayer, place: torch.device) -> Operations:
    one = sample.architecture
    groups = one.num_heads // one.num_kv_heads
    heads = (one.num_kv_heads, one.head_dim)
    q = _random(sample, place, heads[0], groups, heads[1])
    k, v = (_random(sample, place, *heads) for _ in range(2))
    kernel, sight = Attention.of(DEFAULT_NUMERICS, one.head_dim), AttentionMask()

    def backward(made: tuple[Tensor, Tensor]) -> object:
        out, lse = made
        return kernel.backward(q, k, v, sight, out, lse, torch.ones_like(out))

    yield from _forward_and_backward("attention", lambda: kernel.forward(q, k, v, sight), backward)


def elementwise_operations(sample: SampleLayer, place: torch.device) -> Operations:
    """A norm, rotations of queries and keys, and an activation, each forward and backward; a sum of hidden states."""
    one = sample.architecture
    x, other = (_random(sample, place, one.d_model) for _ in range(2))
    scale, given = torch.ones(one.d_model, device=place, dtype=x.dtype), torch.ones_like(x)
    yield from _forward_and_backward(
        "norm", lambda: rms_forward(x, scale, DEFAULT_NUMERICS.norm_epsilon),
        lambda made: rms_backward(given, x, made[1], scale, needs_weight=True),
    )  # fmt: skip
    angles = rotation(torch.arange(sample.seq_len, device=place), one.head_dim, DEFAULT_NUMERICS.rotary, x.dtype)
    for name, heads in (("query", one.num_heads), ("key", one.num_kv_heads)):
        head = _random(sample, place, one.num_kv_heads, heads // one.num_kv_heads, one.head_dim)
        yield from _forward_and_backward(
            f"rotary of a {name}", partial(rotate, head, angles), lambda made: rotate_back(made, angles)
        )  # fmt: skip
    gate, up = (_random(sample, place, one.d_ff) for _ in range(2))
    dy = torch.ones_like(up)
    yield from _forward_and_backward(
        "activation", lambda: FUNCTIONS["swiglu"](gate, up),
        lambda made: (FUNCTIONS["swiglu_dgate"](dy, gate, up), FUNCTIONS["swiglu_dup"](dy, gate)),
    )  # fmt: skip
    yield "sum", _repeat(lambda: x + other)


class DiscardedGradients:
    """Gradients of weights, which are discarded."""

    def target(self, weight: str) -> tuple[Tensor | None, bool]:
        return None, False

    def deliver(self, weight: str, gradient: Tensor | None) -> None:
        return


def layer_operation(sample: SampleLayer, place: torch.device) -> TimedOperation:
    """A whole layer forward and backward."""
    one = initial_weights(sample.architecture, 0, DTYPES[sample.dtype], place).model.layers[1]
    x = _random(sample, place, sample.architecture.d_model)
    places = torch.arange(sample.seq_len, device=place)
    angles = rotation(places, sample.architecture.head_dim, DEFAULT_NUMERICS.rotary, x.dtype)
    unit, given = one.unit, torch.ones_like(x)

    def both() -> None:
        held = unit.empty_slots()
        one.put(held, {**one.weights, ANGLES: angles, "x": x, MASK: AttentionMask(), GRADIENTS: DiscardedGradients()})
        run_calls(unit.forward, held)
        one.put(held, {f"d.{unit.output}": given.clone()})
        run_calls(unit.backward[FULL_BACKWARD].steps, held)

    return TimedOperation(both, 1)


def step_operation(sample: SampleLayer, num_processes: int, place: torch.device) -> TimedOperation:
    """An optimizer step of a model with this layer a few times, as the engine trains it on so many processes."""
    instance = RankProgram(
        architecture=sample.model, layout=sample.sharded_layout(num_processes), precision=get_precision(sample.dtype)
    )
    engine = TrainingEngine(instance, TrainingRecipe(steps=1), World(instance.mesh, place))
    engine.initialize(0)
    ids = torch.randint(sample.model.vocab_size, (sample.num_seqs, sample.seq_len), device=place)
    return TimedOperation(lambda: engine.step([MicroBatch(ids, ids)], num_processes * sample.tokens, 1, 0), 1)


def loss_operands(sample: SampleLayer, place: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised hidden states [N, D], the head's weight [V, D] as a run begins with it, and targets [N]."""
    one = sample.architecture
    x = _random(sample, place, one.d_model).flatten(0, 1)
    weight = (torch.randn(one.vocab_size, one.d_model, device=place) * INITIAL_STD).to(x.dtype)
    return x, weight, torch.randint(one.vocab_size, (sample.tokens,), device=place)


def _loss_operation(sample: SampleLayer, place: torch.device) -> TimedOperation:
    """The head's products and its loss, forward and backward."""
    x, weight, targets = loss_operands(sample, place)

    def both() -> object:
        logits = torch.mm(x, weight.t())
        loss = cross_entropy(logits, targets, 1.0, None, replace=True)
        return loss, torch.mm(logits, weight), torch.mm(logits.t(), x)

    return TimedOperation(both, 1)


def _update_operation(sample: SampleLayer, place: torch.device) -> TimedOperation:
    """Norm, clipping and AdamW of a layer's weights, in the format that they are updated in."""
    shapes = parameter_shapes(sample.architecture)
    weights = [torch.zeros(shape, device=place) for name, shape in shapes.items() if name.startswith("layers.")]
    flat = torch.full((sum(weight.numel() for weight in weights),), 1e-3, device=place)
    parts = torch.split(flat, [weight.numel() for weight in weights])
    for weight, part in zip(weights, parts, strict=True):
        weight.requires_grad_().grad = part.view_as(weight)
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)

    def update() -> None:
        norm = sum_of_squares(flat).sqrt().to(flat.dtype)
        flat.mul_((1.0 / (norm + NORM_EPSILON)).clamp(max=1.0))
        optimizer.step()

    return TimedOperation(update, 1)


def _random(sample: SampleLayer, place: torch.device, *dims: int) -> Tensor:
    """Values [B, T, *dims]."""
    return torch.randn(sample.num_seqs, sample.seq_len, *dims, device=place).to(DTYPES[sample.dtype])


def _forward_and_backward(
    name: str, made: Callable[[], ForwardResult], backward: Callable[[ForwardResult], object]
) -> Operations:
    """An operation forward, its results kept, and backward from what it kept."""
    yield f"{name} forward", _repeat(made)
    kept = [made() for _ in range(_num_repeats(made()))]

    def back() -> None:
        for one in kept:
            backward(one)

    yield f"{name} backward", TimedOperation(back, len(kept))


def _repeat(made: Callable[[], Any]) -> TimedOperation:
    times = _num_repeats(made())
    return TimedOperation(lambda: [made() for _ in range(times)], times)


def _num_repeats(made: Any) -> int:
    out = made if isinstance(made, Tensor) else made[0]
    return int(max(2, min(MOST_REPEATS, REPEATED_BYTES // max(out.nbytes, 1))))


def make_copy(place: torch.device, num_bytes: int) -> Callable[[], Any]:
    """A copy beyond any cache."""
    source = torch.zeros(num_bytes // 8, device=place)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
