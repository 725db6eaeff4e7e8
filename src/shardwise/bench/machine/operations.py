"""The operations of a layer, its head and its optimizer as the engine runs them, each to be timed alone; whole steps of them.

A run makes its results several times, and keeps those of a forward pass until the last, as a training step does: it writes to
memory that no cache holds. Values are of the sizes that a training step has: weights of a larger scale make probabilities and
gradients that are subnormal, which some processors multiply a hundred times more slowly. Letters: see `samples`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.bench.kernels import DTYPES
from shardwise.bench.machine.samples import FORMS, Product, Sample
from shardwise.lowering.instance import Instance
from shardwise.model.numerics import DEFAULT
from shardwise.precision import precision_named
from shardwise.train.engine import Engine, MicroBatch
from shardwise.train.model.attention import attend
from shardwise.train.model.block import Block
from shardwise.train.model.functions import activate, rms_norm
from shardwise.train.model.gradients import HeadLoss, applied
from shardwise.train.model.initialise import STD
from shardwise.train.model.places import rotate, rotation
from shardwise.train.parallel.update import SMALLEST_NORM, sum_of_squares
from shardwise.train.recipe import Recipe
from shardwise.train.world import World

KEPT_BYTES, MOST_KEPT = 2**24, 4  # results that a run keeps


class Operation(NamedTuple):
    """Something that makes its result so many `times`."""

    run: Callable[[], object]
    times: int


Operations = Iterator[tuple[str, Operation]]


def operations(sample: Sample, place: torch.device) -> Operations:
    """All of a sample, by name."""
    yield from products(sample, place)
    yield sample.expert.name, _product(sample.expert, place, DTYPES[sample.dtype])
    yield from attention(sample, place)
    yield from elementwise(sample, place)
    if sample.has_loss:
        yield "loss", _loss(sample, place)
    yield "update", _update(sample, place)


def products(sample: Sample, place: torch.device) -> Operations:
    for one in sample.products:
        yield one.name, _product(one, place, DTYPES[sample.dtype])


def _product(one: Product, place: torch.device, dtype: torch.dtype) -> Operation:
    x = torch.randn(one.rows, one.width, device=place).to(dtype)
    weight = torch.randn(one.out, one.width, device=place).to(dtype)
    dy = torch.randn(one.rows, one.out, device=place).to(dtype)
    made: Mapping[str, Callable[[], Tensor]] = {
        "forward": lambda: x @ weight.t(),
        "data": lambda: dy @ weight,
        "weight": lambda: dy.t() @ x,
    }
    assert set(made) == set(FORMS)
    return _kept(made[one.form])


def attention(sample: Sample, place: torch.device) -> Operations:
    one = sample.architecture
    groups = one.num_heads // one.num_kv_heads
    heads = (one.num_kv_heads, one.head_dim)
    q = _random(sample, place, heads[0], groups, heads[1])
    k, v = (_random(sample, place, *heads) for _ in range(2))
    yield from _both("attention", lambda: attend(q, k, v, None, DEFAULT), (q, k, v))


def elementwise(sample: Sample, place: torch.device) -> Operations:
    """A norm, rotations of queries and keys, and an activation, each forward and backward; a sum of hidden states."""
    one = sample.architecture
    x, other = (_random(sample, place, one.d_model) for _ in range(2))
    scale = torch.ones(one.d_model, device=place, dtype=x.dtype, requires_grad=True)
    yield from _both("norm", lambda: rms_norm(x, scale, DEFAULT.norm_epsilon, 0.0), (x, scale))
    angles = rotation(torch.arange(sample.seq_len, device=place), one.head_dim, DEFAULT.rotary, x.dtype)
    for name, heads in (("query", one.num_heads), ("key", one.num_kv_heads)):
        head = _random(sample, place, one.num_kv_heads, heads // one.num_kv_heads, one.head_dim)
        yield from _both(f"rotary of a {name}", partial(rotate, head, angles), (head,))
    gate, up = (_random(sample, place, one.d_ff) for _ in range(2))
    yield from _both("activation", lambda: activate("swiglu", gate, up), (gate, up))
    first, second = x.detach(), other.detach()
    yield "sum", _kept(lambda: first + second)


def layer(sample: Sample, place: torch.device) -> Operation:
    """A whole layer forward and backward."""
    block = Block(sample.architecture, DEFAULT, 0).to(device=place, dtype=DTYPES[sample.dtype])
    for weight in block.parameters():
        torch.nn.init.normal_(weight, std=STD)
    x = _random(sample, place, sample.architecture.d_model)
    places = torch.arange(sample.seq_len, device=place)
    angles = rotation(places, sample.architecture.head_dim, DEFAULT.rotary, x.dtype)
    given = torch.ones_like(x)
    inputs = (x, *block.parameters())
    return Operation(lambda: torch.autograd.grad(block(x, angles, None)[0], inputs, given), 1)


def whole_step(sample: Sample, num_processes: int, place: torch.device) -> Operation:
    """An optimizer step of a model with this layer a few times, as the engine trains it on so many processes."""
    instance = Instance(
        architecture=sample.model, layout=sample.shared(num_processes), precision=precision_named(sample.dtype)
    )
    engine = Engine(instance, Recipe(steps=1), World(instance.mesh, place))
    engine.initialise(0)
    ids = torch.randint(sample.model.vocab_size, (sample.num_seqs, sample.seq_len), device=place)
    return Operation(lambda: engine.step([MicroBatch(ids, ids)], num_processes * sample.tokens, 1, 0), 1)


def loss_operands(sample: Sample, place: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised hidden states [N, D], the head's weight [V, D] as a run begins with it, and targets [N]."""
    one = sample.architecture
    x = _random(sample, place, one.d_model).detach().flatten(0, 1).requires_grad_()
    weight = (torch.randn(one.vocab_size, one.d_model, device=place) * STD).to(x.dtype).requires_grad_()
    return x, weight, torch.randint(one.vocab_size, (sample.tokens,), device=place)


def _loss(sample: Sample, place: torch.device) -> Operation:
    """The head's products and its loss, forward and backward."""
    x, weight, targets = loss_operands(sample, place)
    return Operation(lambda: torch.autograd.grad(applied(HeadLoss, x, weight, targets, None, 1.0), (x, weight)), 1)


def _update(sample: Sample, place: torch.device) -> Operation:
    """Norm, clipping and AdamW of a layer's weights, in the format that they are updated in."""
    weights = list(Block(sample.architecture, DEFAULT, 0).to(place).parameters())
    flat = torch.full((sum(weight.numel() for weight in weights),), 1e-3, device=place)
    parts = torch.split(flat, [weight.numel() for weight in weights])
    for weight, part in zip(weights, parts, strict=True):
        torch.nn.init.zeros_(weight)
        weight.grad = part.view_as(weight)
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)

    def update() -> None:
        norm = sum_of_squares(flat).sqrt().to(flat.dtype)
        flat.mul_((1.0 / (norm + SMALLEST_NORM)).clamp(max=1.0))
        optimizer.step()

    return Operation(update, 1)


def _random(sample: Sample, place: torch.device, *dims: int) -> Tensor:
    """Values [B, T, *dims] that gradients are wanted of."""
    values = torch.randn(sample.num_seqs, sample.seq_len, *dims, device=place)
    return values.to(DTYPES[sample.dtype]).requires_grad_()


def _both(name: str, made: Callable[[], Tensor], wanted: tuple[Tensor, ...]) -> Operations:
    """An operation forward, its results kept, and backward from what it kept."""
    yield f"{name} forward", _kept(made)
    graphs = [made() for _ in range(_times(made()))]
    dy = torch.ones_like(graphs[0])

    def backward() -> None:
        for out in graphs:
            torch.autograd.grad(out, wanted, dy, retain_graph=True)

    yield f"{name} backward", Operation(backward, len(graphs))


def _kept(made: Callable[[], Tensor]) -> Operation:
    times = _times(made())
    return Operation(lambda: [made() for _ in range(times)], times)


def _times(out: Tensor) -> int:
    return int(max(2, min(MOST_KEPT, KEPT_BYTES // max(out.nbytes, 1))))


def copy(place: torch.device, num_bytes: int) -> Callable[[], Any]:
    """A copy beyond any cache."""
    source = torch.zeros(num_bytes // 8, device=place)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
