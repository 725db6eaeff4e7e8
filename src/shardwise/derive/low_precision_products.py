"""Products with a block's weights, which a precision recipe may run in a narrower format, and their operands.

The derivation says which products these are, in how many orders of dims each operand is taken, and which saved and gathered
tensors nothing else reads. A recipe then says what is done about it (`price/tensor_formats.py`). The head's product (it gives
logits), the router's (each token's E scores) and attention are not among them. Source: Transformer Engine casts the operands
of Linear layers; DeepSeek-V3 (arXiv 2412.19437), section 3.3.1, keeps embedding, head, router, norms and attention in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.derive.sharded_program import CollectiveStep, ComputeStep, ProgramStep
from shardwise.model import Contract, Operation, Role, Tensor, density
from shardwise.sharding import CollectiveKind, Spec
from shardwise.values import Polynomial

MATRIX_ROLES = (Role.WEIGHT, Role.WEIGHT_GRADIENT)
PHASES_BY_PASS = {"forward": ("forward",), "backward": ("recompute", "backward")}  # phases that share what was cast


@dataclass(frozen=True, slots=True)
class ProductOperand:
    """A tensor that products take in one pass (`PHASES_BY_PASS`); `phase` is that of the first of them.

    `elements` are those of one device. Each of `orders` is the set of dims that a product sums over: these must be innermost,
    so each order takes a cast of its own. `saved`: the tensor is kept for the backward pass. `frozen`: a weight that is not
    trained.
    """

    name: str
    phase: str
    role: Role
    elements: Polynomial
    orders: frozenset[frozenset[str]]
    saved: bool
    frozen: bool = False

    @property
    def is_forward(self) -> bool:
        return self.phase in PHASES_BY_PASS["forward"]

    @property
    def is_weight(self) -> bool:
        return self.role is Role.WEIGHT


def is_block_product(operation: Operation, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether an operation is a product of a block's weight, or the gradient of one."""
    if not isinstance(operation, Contract):
        return False
    operands = [tensors[name] for name in (*operation.inputs, *operation.outputs)]
    has_scores = any("E" in t.dims and t.role not in (*MATRIX_ROLES, Role.ROUTED) for t in operands)
    return (
        not has_scores
        and all(t.role is not Role.LOGITS for t in operands)
        and any(t.role in MATRIX_ROLES for t in operands)
    )


def product_operands(
    phases: Mapping[str, Sequence[ProgramStep]], tensors: Mapping[str, Tensor], saved: Iterable[str]
) -> tuple[ProductOperand, ...]:
    """Return the operands of the products of each pass, each tensor once a pass, in the order of its first product."""
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
    names: tuple[str, ...],
) -> Iterator[ProductOperand]:
    first_uses: dict[str, tuple[str, Spec]] = {}
    orders: dict[str, set[frozenset[str]]] = {}
    for phase in names:
        for step in block_products(phases[phase], tensors):
            summed = summed_dims(step.operation, tensors)
            for name, spec in step.reads:
                first_uses.setdefault(name, (phase, spec))
                orders.setdefault(name, set()).add(summed)
    for name, (phase, spec) in first_uses.items():
        role = tensors[name].role
        yield ProductOperand(
            name, phase, role, spec.local_elements() * density(role), frozenset(orders[name]), name in saved_names,
            tensors[name].frozen,
        )  # fmt: skip


def block_products(steps: Iterable[ProgramStep], tensors: Mapping[str, Tensor]) -> Iterator[ComputeStep]:
    """Yield the products with a block's weights among `steps`."""
    return (step for step in steps if isinstance(step, ComputeStep) and is_block_product(step.operation, tensors))


def product_weights(steps: Iterable[ProgramStep], tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of the weights that block products take among `steps`."""
    operands = (name for step in block_products(steps, tensors) for name in step.operation.inputs)
    return frozenset(name for name in operands if tensors[name].role is Role.WEIGHT)


def summed_dims(operation: Operation, tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the dims that a product sums over: they have to be innermost in both operands."""
    left, right = (set(tensors[name].dims) for name in operation.inputs)
    return frozenset(left & right - set(tensors[operation.outputs[0]].dims))


def feeds_only_products(
    phases: Mapping[str, Sequence[ProgramStep]], tensors: Mapping[str, Tensor], phase: str, position: int
) -> bool:
    """Return whether only block products read the result of the collective at `position` of a phase.

    The collective gathers an activation or exchanges its dims (AllToAll); readers are looked for up to the end of the pass.
    """
    pass_phases = next((names for names in PHASES_BY_PASS.values() if phase in names), (phase,))
    gather = phases[phase][position]
    if not isinstance(gather, CollectiveStep) or gather.tensor.role in (*MATRIX_ROLES, Role.STATISTIC, Role.LOGITS):
        return False
    collective = gather.collective
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
        for name, spec in step.reads
        if name == gather.tensor.name
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
    """Return whether block products read a saved tensor in the backward pass, and whether other operations do."""
    readers = [
        step.operation
        for phase in PHASES_BY_PASS["backward"]
        for step in phases[phase]
        if isinstance(step, ComputeStep) and name in step.operation.operands
    ]
    are_products = [is_block_product(reader, tensors) for reader in readers]
    return any(are_products), not all(are_products)
