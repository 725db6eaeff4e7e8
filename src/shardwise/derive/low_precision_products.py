"""Products with a block's weights: those that a precision recipe may run in a narrower format, and what they take.

All of it follows from the derivation: which products these are, in how many orders of dims each operand is taken, which
saved tensors and which gathered ones nothing else reads. A recipe then says what is done about it (price/number_formats.py).
The head's product (it gives logits) and the router's (each token's E scores) are not among them, nor is attention.
Source: Transformer Engine casts what Linear layers take; DeepSeek-V3 (arXiv 2412.19437), section 3.3.1, keeps embedding,
head, router, norms and attention in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.derive.sharded_program import CollectiveStep, ComputeStep, ProgramStep
from shardwise.model.operations import Contract, Operation
from shardwise.model.program import Role, Tensor, density
from shardwise.sharding.collectives import CollectiveKind
from shardwise.sharding.spec import Spec
from shardwise.values.symbolic import Polynomial

MATRIX_ROLES = (Role.WEIGHT, Role.WEIGHT_GRADIENT)
PHASES_BY_PASS = {"forward": ("forward",), "backward": ("recompute", "backward")}  # phases that share what was cast


@dataclass(frozen=True, slots=True)
class ProductOperand:
    """A tensor that products take in one pass (`PHASES_BY_PASS`); `phase` is that of the first of them.

    `orders` are the dims that they sum over, and so have to find innermost. `saved`: kept for the backward pass.
    """

    name: str
    phase: str
    role: Role
    elements: Polynomial
    orders: frozenset[frozenset[str]]
    saved: bool

    @property
    def is_forward(self) -> bool:
        return self.phase in PHASES_BY_PASS["forward"]

    @property
    def is_weight(self) -> bool:
        return self.role is Role.WEIGHT


def is_block_product(operation: Operation, tensors: Mapping[str, Tensor]) -> bool:
    """Whether an operation is a product of a block's weight, or the gradient of one."""
    if not isinstance(operation, Contract):
        return False
    operands_and_results = [tensors[name] for name in (*operation.inputs, *operation.outputs)]
    has_expert_scores = any(
        "E" in tensor.dims and tensor.role not in (*MATRIX_ROLES, Role.ROUTED) for tensor in operands_and_results
    )
    return (
        not has_expert_scores
        and all(tensor.role is not Role.LOGITS for tensor in operands_and_results)
        and any(tensor.role in MATRIX_ROLES for tensor in operands_and_results)
    )


def product_operands(
    phases: Mapping[str, Sequence[ProgramStep]], tensors: Mapping[str, Tensor], saved: Iterable[str]
) -> tuple[ProductOperand, ...]:
    """What the products of each pass take, each tensor once for a pass, in the order of its first product."""
    saved_names = set(saved)
    return tuple(
        operand
        for pass_name in PHASES_BY_PASS
        for operand in _operands_of_pass(phases, tensors, saved_names, PHASES_BY_PASS[pass_name])
    )


def _operands_of_pass(
    phases: Mapping[str, Sequence[ProgramStep]],
    tensors: Mapping[str, Tensor],
    saved_names: set[str],
    pass_phases: tuple[str, ...],
) -> Iterator[ProductOperand]:
    first_uses: dict[str, tuple[str, Spec]] = {}
    orders: dict[str, set[frozenset[str]]] = {}
    for phase in pass_phases:
        for step in block_products(phases[phase], tensors):
            summed = summed_dims(step.operation, tensors)
            for name, spec in zip(step.operation.inputs, step.placed.inputs, strict=True):
                first_uses.setdefault(name, (phase, spec))
                orders.setdefault(name, set()).add(summed)
    for name, (phase, spec) in first_uses.items():
        role = tensors[name].role
        yield ProductOperand(
            name, phase, role, spec.local_elements() * density(role), frozenset(orders[name]), name in saved_names
        )  # fmt: skip


def block_products(steps: Iterable[ProgramStep], tensors: Mapping[str, Tensor]) -> Iterator[ComputeStep]:
    """The products with a block's weights among some steps."""
    return (step for step in steps if isinstance(step, ComputeStep) and is_block_product(step.operation, tensors))


def product_weights(steps: Iterable[ProgramStep], tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """The weights that these products take among some steps."""
    operands = (name for step in block_products(steps, tensors) for name in step.operation.inputs)
    return frozenset(name for name in operands if tensors[name].role is Role.WEIGHT)


def summed_dims(operation: Operation, tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """The dims that a product sums over: they have to lie innermost in both operands."""
    left, right = (set(tensors[name].dims) for name in operation.inputs)
    return frozenset(left & right - set(tensors[operation.outputs[0]].dims))


def feeds_only_products(
    phases: Mapping[str, Sequence[ProgramStep]], tensors: Mapping[str, Tensor], phase: str, position: int
) -> bool:
    """Whether all that takes what a collective brings (an activation, gathered or exchanged) are such products."""
    pass_phases = next((names for names in PHASES_BY_PASS.values() if phase in names), (phase,))
    collective_step = phases[phase][position]
    if not isinstance(collective_step, CollectiveStep) or collective_step.tensor.role in (
        *MATRIX_ROLES,
        Role.STATISTIC,
        Role.LOGITS,
    ):
        return False
    collective = collective_step.collective
    if collective.kind not in (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL):
        return False
    later_steps = [
        *phases[phase][position + 1 :],
        *(s for p in pass_phases[pass_phases.index(phase) + 1 :] for s in phases[p]),
    ]
    readers = [
        step.operation
        for step in later_steps
        if isinstance(step, ComputeStep)
        for name, spec in zip(step.operation.operands, step.placed.inputs, strict=False)
        if name == collective_step.tensor.name
        and (
            spec == collective.after
            if collective.kind is CollectiveKind.ALL_TO_ALL
            else spec.sharded_axes.isdisjoint(collective.axes)
        )
    ]
    return bool(readers) and all(is_block_product(reader, tensors) for reader in readers)


def saved_tensor_readers(
    phases: Mapping[str, Sequence[ProgramStep]], tensors: Mapping[str, Tensor], name: str
) -> tuple[bool, bool]:
    """Of a saved tensor: whether such products read it in the backward pass, and whether anything else does."""
    readers = [
        step.operation
        for phase in PHASES_BY_PASS["backward"]
        for step in phases[phase]
        if isinstance(step, ComputeStep) and name in step.operation.operands
    ]
    are_products = [is_block_product(reader, tensors) for reader in readers]
    return any(are_products), not all(are_products)
