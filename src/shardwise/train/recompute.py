"""Recompute policies on the trained model: what a block does not save for its backward pass is recomputed in front of it.

Which results are saved is read off the derivation (`Unit.saved`): the products with certain weights, attention, and the rows that
experts were sent. A product is known by the weight that it reads, wherever that lies in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardwise.derive.derivation import Unit, derived_unit
from shardwise.layout.family import Family
from shardwise.lowering.parameters import attribute
from shardwise.model.block import RECEIVED
from shardwise.train.model.block import Block
from shardwise.train.model.decoder import Decoder

Clock = Callable[[], AbstractContextManager[None]]

aten = torch.ops.aten
PRODUCTS = frozenset({aten.mm, aten.addmm, aten.mv, aten.addmv, aten._grouped_mm})
# Attention that no kernel has (caps, sinks) is made of other operations and always recomputed.
ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention,
    }
)  # fmt: skip
SENT = aten.index_select  # in a block only tokens on their way to their experts are chosen so
PASSED = ("handover", "add_vector")  # what is saved behind one of these is saved in front of it, where it is as large


def recompute(model: Decoder, policy: str, num_layers: int | None = None, clock: Clock = nullcontext) -> None:
    """Run the first `num_layers` blocks (None: all) under a policy of `model/recompute.py`.

    `clock` is entered around each slice that is recomputed, on the thread of the backward pass.
    """
    if policy == "none":
        return
    family = Family(0, False, policy)
    for block in islice(model.layers.values(), num_layers):
        assert isinstance(block, Block)
        (unit,) = {weight.unit for weight in block.weights.values()}
        block.around = Recompute(
            block, SavedTensors.of(derived_unit(model.architecture.structure, family, unit)), clock
        )


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """What a block saves beside its input: the products with some weights, by the names of their parameters."""

    weights: frozenset[str]
    attention: bool
    sent: bool

    @classmethod
    def of(cls, unit: Unit) -> SavedTensors:
        program, saved = unit.forward.program, set(unit.saved)
        for operation in reversed(program.operations):
            if saved & set(operation.outputs) and getattr(operation, "function", "") in PASSED:
                saved.add(operation.inputs[0])
        products = [o for o in program.operations if o.kind == "contract" and saved & set(o.outputs)]
        read = {attribute(name) for product in products for name in product.inputs if name in program.weights}
        scans = [o for o in program.operations if o.kind == "scan"]
        return cls(frozenset(read), any(saved & set(o.outputs) for o in scans), RECEIVED in saved)

    def __bool__(self) -> bool:
        return bool(self.weights) or self.attention or self.sent


@dataclass(frozen=True, slots=True)
class Recompute:
    """Runs the steps of a block so that the backward pass recomputes them, but for what is saved."""

    block: Block
    saved: SavedTensors
    clock: Clock

    def __call__(self, steps: Callable[..., Any], *operands: Any) -> Any:
        # nothing in a block is random
        return checkpoint(
            steps, *operands, use_reentrant=False, preserve_rng_state=False, context_fn=self.contexts
        )  # fmt: skip

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Those of the forward pass and of the slice that is recomputed."""
        if not self.saved:
            return nullcontext(), self.clock()
        forward, recomputed = create_selective_checkpoint_contexts(self.saves())  # type: ignore[no-untyped-call]
        return forward, _both(self.clock(), recomputed)

    def saves(self) -> Callable[..., bool]:
        """Whether the result of an operation is saved; weights are where they are in this pass."""
        held = [getattr(self.block, name) for name in self.saved.weights]
        ranges = [(weight.data_ptr(), weight.data_ptr() + weight.nbytes) for weight in held]

        def reads_one(operands: tuple[Any, ...]) -> bool:
            places = [one.data_ptr() for one in operands if isinstance(one, Tensor)]
            return any(low <= place < high for place in places for low, high in ranges)

        def saves(_: Any, operation: Any, *operands: Any, **__: Any) -> bool:
            packet = operation.overloadpacket
            if packet in PRODUCTS:
                return reads_one(operands)
            return (self.saved.attention and packet in ATTENTION) or (self.saved.sent and packet is SENT)

        return saves


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield
