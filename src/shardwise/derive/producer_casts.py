"""Operands of low-precision products that the kernel which makes them can cast, and the forms in which each pass reads them.

A product sums over the last dims of both operands. Of a tensor [B, T, F], whose rows are tokens, a product with a weight sums
over F and reads `rows`; the gradient of a weight sums over the tokens and reads `columns`, the transposed matrix [F, B·T]. All
else reads the tensor as it is, `plain`. A norm or a gated activation (forward, or both of its gradients) has each element in
registers before it is written: it can write any of these forms, and only those that are read.

A tensor qualifies where no collective moves it or cuts it between its producer and its products, so that a rank casts what it
has made. Excluded are rows of experts, whose columns end where an expert's do. Which forms a recipe casts in the producer follows
from its scales (`values.scalings.Scaling.producer_forms`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, get_args

from shardwise.derive.low_precision_products import PHASES_BY_PASS, is_block_product
from shardwise.derive.sharded_program import CollectiveStep, ComputeStep, ProgramNode, Ring, ShardedTensor
from shardwise.derive.sharded_unit import ShardedUnit
from shardwise.model import Map, Role, Tensor, density
from shardwise.model.structure import IS_GATED
from shardwise.values import Polynomial

Form = Literal["plain", "rows", "columns"]
FORMS: tuple[Form, ...] = get_args(Form)
NORMS = ("rms_norm", "layer_norm")
GATED_GRADIENTS = ("_dgate", "_dup")
TOKENS = ("B", "T")


@dataclass(frozen=True, slots=True)
class ProducedOperand:
    """An operand of products that its producer can cast, in one phase in which it is made.

    `read` are the forms that are read of it in this pass, `saved` those that the backward pass reads of what the forward pass has
    made. `elements` are those of one device. `is_norm`: a norm makes it, which has whole rows at once, and reads its input once
    more for `columns`, since a block of them has elements of many rows.
    """

    name: str
    phase: str
    role: Role
    elements: Polynomial
    read: frozenset[Form]
    saved: frozenset[Form]
    is_norm: bool

    def written(self, castable: Iterable[Form]) -> tuple[Form, ...]:
        """Return the forms that the producer writes, of which it casts those `castable`; products cast others themselves."""
        forms = {*forms_with_casts(self.read, castable), *self.saved_forms(castable)}
        return tuple(form for form in FORMS if form in forms)

    def saved_forms(self, castable: Iterable[Form]) -> tuple[Form, ...]:
        """Return the forms that are saved for the backward pass: casts of a tensor that is saved as it is would take memory."""
        forms = forms_with_casts(self.saved, castable)
        return ("plain",) if "plain" in forms else forms


def forms_with_casts(read: Set[Form], castable: Iterable[Form]) -> tuple[Form, ...]:
    """Return the forms that there have to be of a tensor where products cast what is not `castable` of its plain form.

    >>> forms_with_casts({"rows", "columns"}, ["rows"])
    ('plain', 'rows')
    """
    casts = frozenset(castable)
    forms = {form if form in casts else "plain" for form in read}
    return tuple(form for form in FORMS if form in forms)


def form_of_order(summed: Set[str]) -> Form:
    """Return the form that a product reads which sums over these dims of an activation."""
    return "columns" if summed <= set(TOKENS) else "rows"


def produced_operands(unit: ShardedUnit) -> tuple[ProducedOperand, ...]:
    """Return the operands of a unit's products that their producers can cast, in the order in which they are made."""
    phases = unit.phases()
    moved = {step.tensor.name for steps in phases.values() for step in steps if isinstance(step, CollectiveStep)}
    nodes = unit.phase_nodes()
    reads = {phase: tuple(_reads(nodes[phase], unit.tensors)) for phase in ("forward", *PHASES_BY_PASS["backward"])}
    produced: list[ProducedOperand] = []
    for phase in reads:
        for step in phases[phase]:
            if isinstance(step, ComputeStep) and _is_producer(step, moved):
                produced += _produced_operand(unit, phase, step, reads)
    return tuple(produced)


def _is_producer(step: ComputeStep, moved: Iterable[str]) -> bool:
    """Return whether an operation is a norm of whole rows or a gated activation whose result stays where it is made."""
    operation = step.operation
    if not isinstance(operation, Map) or operation.outputs[0] in moved:
        return False
    if operation.function in NORMS:
        dims = step.placed.outputs[0].dims
        return dims[2:] == operation.over and not set(operation.inputs[1:-1]) & set(moved)
    return is_gated(operation.function)


def is_gated(function: str) -> bool:
    """Return whether a function is a gated activation, or one of its two gradients.

    >>> is_gated("swiglu"), is_gated("swiglu_dup"), is_gated("gelu")
    (True, True, False)
    """
    for suffix in GATED_GRADIENTS:
        function = function.removesuffix(suffix)
    return IS_GATED.get(function, False)


def _produced_operand(
    unit: ShardedUnit, phase: str, step: ComputeStep, reads: Mapping[str, Sequence[tuple[ShardedTensor, Form]]]
) -> Iterator[ProducedOperand]:
    """Yield the result of a producer, if products read it as it lies."""
    (tensor,) = step.writes
    name, role = tensor.name, unit.tensors[tensor.name].role
    if role is not Role.ACTIVATION or tensor.spec.dims[:2] != TOKENS:
        return
    forms_by_phase = {
        phase_name: [(read, form) for read, form in phase_reads if read.name == name]
        for phase_name, phase_reads in reads.items()
    }
    if any(read != tensor for phase_reads in forms_by_phase.values() for read, _ in phase_reads):
        return
    backward = PHASES_BY_PASS["backward"]
    is_saved = phase == "forward" and name in unit.saved
    same_pass = backward[backward.index(phase) :] if phase in backward else (phase,)
    read = frozenset(form for later in same_pass for _, form in forms_by_phase[later])
    saved = frozenset(form for later in backward if is_saved for _, form in forms_by_phase[later])
    if (read | saved) - {"plain"}:
        is_norm = isinstance(step.operation, Map) and step.operation.function in NORMS
        yield ProducedOperand(name, phase, role, tensor.spec.local_elements() * density(role), read, saved, is_norm)


def _reads(nodes: Iterable[ProgramNode], tensors: Mapping[str, Tensor]) -> Iterator[tuple[ShardedTensor, Form]]:
    """Yield each tensor that an operation of a phase reads, with the form that it takes; products of a ring cast blocks."""
    for node in nodes:
        if isinstance(node, ComputeStep):
            yield from ((tensor, product_form(node, tensor, tensors)) for tensor in node.reads)
        elif isinstance(node, Ring):
            yield from ((tensor, "plain") for step in node.computes for tensor in step.reads)


def product_form(step: ComputeStep, tensor: ShardedTensor, tensors: Mapping[str, Tensor]) -> Form:
    """Return the form in which a step reads one of its operands."""
    if not is_block_product(step.operation, tensors):
        return "plain"
    left, right = (spec.dims for spec in step.placed.inputs)
    summed = tuple(dim for dim in left if dim in right and dim not in step.placed.outputs[0].dims)
    dims = tensor.spec.dims
    forms: dict[tuple[str, ...], Form] = {dims[2:]: "rows", dims[:2]: "columns"}
    return forms.get(summed, "plain")
