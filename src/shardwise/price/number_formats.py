"""The number format of every tensor, kernel and collective under a precision recipe: the one place that decides it.

Products with a block's weights (derive/low_precision_products.py) run in the recipe's `matmul`, all else in the
format of its role. Their
operands are cast: read in their own format and written in that of the product, once for each order of dims that a later
product of the same pass needs. A gather for products alone moves the cast operand, and so does an exchange of tokens, if the
recipe says so. Of a tensor that only products read in the backward pass, the cast copy is saved in place of the original.
Source: Transformer Engine user guide, low precision training (casts, transposed copies, fp8 gathers of sequence parallelism,
cast inputs saved); DeepSeek-V3 (arXiv 2412.19437), section 3.3. Assumes: weights are cast for each micro-batch, and a cast is
a kernel of its own. Differs: Transformer Engine can keep cast weights for all micro-batches of a step, and fuses the casts
after norms and activations into these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shardwise.derive.low_precision_products import ProductOperand, product_operands, saved_tensor_readers
from shardwise.derive.sharded_unit import ShardedUnit
from shardwise.model.optimizer_state import element_moments, factor_bytes, moment_bytes
from shardwise.model.optimizers.definition import Optimizer
from shardwise.model.optimizers.registry import DEFAULT_OPTIMIZER, get_optimizer
from shardwise.model.program import Role, density
from shardwise.sharding.collectives import CollectiveKind
from shardwise.sharding.spec import Spec
from shardwise.step.instructions import Kernel, UnitCollective
from shardwise.values.dtypes import bytes_per_element
from shardwise.values.elementwise import Value
from shardwise.values.precision import Precision
from shardwise.values.symbolic import ZERO, Polynomial, SymbolValues


class SavedElements(NamedTuple):
    """Elements kept for the backward pass: in how many orders products take them there, and whether anything else reads them."""

    role: Role
    num_orders: int
    also_read: bool
    elements: Polynomial


class SavedFormat(NamedTuple):
    """Bytes of each saved element, and in words the format that it is cast to ("": none)."""

    width: float
    cast: str


class ProductOperands(NamedTuple):
    """Operands of the products of one unit in each pass, and the tensors that only they save; independent of the recipe."""

    operands: tuple[ProductOperand, ...]
    saved: tuple[SavedElements, ...]

    @property
    def narrow(self) -> bool:
        """Whether any product runs in a recipe's `matmul`, which decides how wide weights are."""
        return bool(self.operands)


def read_products(unit: ShardedUnit) -> ProductOperands:
    """Read both from a unit."""
    phases, tensors = unit.phases(), unit.tensors
    taken = product_operands(phases, tensors, unit.saved)
    return ProductOperands(taken, SavedTensors(unit, taken).saved(unit.saved_by_this_unit_only.items()))


class SavedTensors:
    """The tensors of a unit as they are saved for its backward pass; a gradient is kept in its own format."""

    def __init__(self, unit: ShardedUnit, taken: Iterable[ProductOperand]) -> None:
        self.unit, self.phases = unit, unit.phases()
        self.orders = {one.name: len(one.orders) for one in taken if not one.is_forward}
        self._known: dict[str, tuple[Role, int, bool]] = {}

    def saved(self, tensors: Iterable[tuple[str, Spec]]) -> tuple[SavedElements, ...]:
        """Tensors as they lie, those that are kept alike together."""
        kept: dict[tuple[Role, int, bool], Polynomial] = {}
        for name, spec in tensors:
            key = self.saving_key(name)
            kept[key] = kept.get(key, ZERO) + spec.local_elements() * density(key[0])
        return tuple(SavedElements(*key, elements) for key, elements in kept.items())

    def saving_key(self, name: str) -> tuple[Role, int, bool]:
        """Role, orders of dims, and whether anything but products reads it."""
        if name not in self._known:
            unit, role = self.unit, self.unit.tensors[name].role
            by_products, also = False, True
            if name in unit.forward.program.tensors:
                by_products, also = saved_tensor_readers(self.phases, unit.tensors, name)
            self._known[name] = role, self.orders[name] if by_products else 0, also or not by_products
        return self._known[name]


def weight_grad_inputs(unit: ShardedUnit, found: Iterable[Kernel]) -> tuple[SavedElements, ...]:
    """What the kernels that make weight gradients read, as it rests: kept where they run later than the rest, in one order.

    Source: Qi et al. 2023, appendix: M_W counts the inputs and the output gradients of the products.
    """
    specs = {**unit.backward.specs, **unit.saved}
    making = [kernel for kernel in found if kernel.makes_weight_grads]
    cast, plain = (
        {name for k in making if bool(k.operand_elements) is own for name in k.inputs} for own in (True, False)
    )
    read = ((name, unit.tensors[name].role) for name in sorted(cast | plain))
    return tuple(
        SavedElements(role, int(name in cast), name in plain, specs[name].local_elements() * density(role))
        for name, role in read
        if role not in (Role.WEIGHT, Role.CONSTANT)
    )


class TensorFormats:
    """Widths in bytes under one recipe and one optimizer."""

    def __init__(self, precision: Precision, optimizer: Optimizer | None = None) -> None:
        self.precision, self.optimizer = precision, optimizer or get_optimizer(DEFAULT_OPTIMIZER)
        self.roles = bytes_by_role(precision, self.optimizer)
        self._known: dict[tuple[bool, bool], Mapping[Role, float]] = {}

    def product_rate_format(self, kernel: Kernel) -> str:
        """The format that a kernel's FLOPs run in."""
        return self.precision.matmul_format if kernel.operand_elements else self.precision.activations

    def weight_at_rest(self, products: ProductOperands) -> float:
        """A weight of a unit; in a unit without products that could run in `matmul`, weights are no narrower than activations."""
        rest = bytes_per_element(self.precision.weights)
        return rest if products.narrow else max(rest, bytes_per_element(self.precision.activations))

    def resting_widths(self) -> dict[str, float]:
        """Bytes of each element of a unit's weights at rest (`State`): those of narrow products, with their share of a scale, may
        be narrower than activations, and others not."""
        rest, plain = (bytes_per_element(one) for one in (self.precision.weights, self.precision.activations))
        if rest >= plain:
            return {"resting": rest}
        block = self.precision.weight_block
        return {"resting": plain, "cast": rest - plain + (self.precision.scale_bytes / block if block else 0.0)}

    def weight_in_use(self, products: ProductOperands) -> float:
        """A weight as kernels read it and as ZeRO gathers it."""
        if self.precision.gathered is None:
            return self.weight_at_rest(products)
        return bytes_per_element(self.precision.gathered if products.narrow else self.precision.activations)

    def kernel_bytes(self, kernel: Kernel, products: ProductOperands, values: SymbolValues) -> Value:
        """What a kernel reads and writes."""
        own = self._roles(products, kernel.phase)
        if kernel.phase == "backward":
            own = {**own, Role.WEIGHT_GRADIENT: self.accumulation_bytes}
        total = sum((elements.evaluate(values) * own[role] for role, elements in kernel.elements.items()), start=0.0)
        if not self.precision.matmul:
            return total
        for role, elements in kernel.operand_elements.items():
            total = total + elements.evaluate(values) * (
                self.precision.cast_bytes(weight=role is Role.WEIGHT) - own[role]
            )
        return total

    @property
    def accumulation_bytes(self) -> float:
        """Bytes that a product moves for each element of a weight's gradient: it is read, added to and written again.

        Source: Megatron-LM's fused weight gradients, which accumulate into the main gradient within the product; others add
        in a kernel of their own. Differs: the only micro-batch of a step, and ZeRO from stage 2 on, need not read it.
        """
        return 2.0 * bytes_per_element(self.precision.accumulated_gradients or self.precision.gradients)

    def extra_gradient_bytes(self, zero_stage: int) -> float:
        """Bytes of an element of a weight's gradient that a product of our engine makes beside where gradients rest, or from
        ZeRO-2 on leave from: none where both have one format, for it is written there (`run/engine/call_rewrites.py`)."""
        made = self.precision.activations
        rests = self.precision.gradients if zero_stage < 2 else self.precision.gradient_reduction
        return 0.0 if rests == made else bytes_per_element(made)

    def cast_bytes(self, phase: str, products: ProductOperands, values: SymbolValues) -> Value:
        """Bytes that the casts of a phase read and write; 0 where products run in the format of the activations."""
        if not self.precision.matmul:
            return 0.0
        return sum((each * one.elements.evaluate(values) for one, each in self.casts(phase, products)), start=0.0)

    def casts(self, phase: str, products: ProductOperands) -> Iterator[tuple[ProductOperand, float]]:
        """Each operand that is cast in a phase, with the bytes that are read and written for an element of it."""
        recipe, own = self.precision, self._roles(products, phase)
        forward = {one.name: one.orders for one in products.operands if one.is_forward}
        backward = {one.name: one.orders for one in products.operands if not one.is_forward}
        for one in (operand for operand in products.operands if operand.phase == phase):
            orders = one.orders
            kept = one.saved and recipe.saves_casts
            if kept and not one.is_forward:
                continue
            if kept:
                orders = orders | backward.get(one.name, frozenset())
            if one.is_weight and own[Role.WEIGHT] == bytes_per_element(recipe.matmul_format):
                orders = orders - forward[one.name]  # it comes cast, in the order of the forward pass
            copies = len(orders) if recipe.transposed_copies else min(len(orders), 1)
            if copies:
                each = recipe.cast_reads * own[one.role] + copies * recipe.cast_bytes(weight=one.is_weight)
                yield one, each

    def collective_width(self, moved: UnitCollective, products: ProductOperands) -> float:
        """Bytes of each element that a collective moves."""
        recipe = self.precision
        casts = recipe.casts_gathers if moved.kind is CollectiveKind.ALL_GATHER else recipe.casts_dispatch
        if moved.for_products and recipe.matmul and casts:
            return self.precision.cast_bytes()
        return self._roles(products, moved.phase)[moved.role]

    def saved_bytes(self, saved: Iterable[SavedElements], values: SymbolValues) -> Value:
        """Bytes saved for the backward pass, or until weight gradients are made, without the logits."""
        each = ((self.saved_as(one).width, one) for one in saved if one.role is not Role.LOGITS)
        return sum((one.elements.evaluate(values) * width for width, one in each), start=0.0)

    def saved_as(self, one: SavedElements) -> SavedFormat:
        """How a tensor is saved for the backward pass."""
        recipe = self.precision
        if not (recipe.matmul and recipe.saves_casts and one.num_orders):
            return SavedFormat(self.roles[one.role], "")
        copies = one.num_orders if recipe.transposed_copies else 1
        own = self.roles[one.role] if one.also_read else 0.0
        return SavedFormat(
            copies * recipe.cast_bytes() + own, f" in {recipe.matmul}{' and as it is' if one.also_read else ''}"
        )

    def _roles(self, products: ProductOperands, phase: str) -> Mapping[Role, float]:
        key = products.narrow, phase == "update"
        if key not in self._known:
            weight = self.weight_at_rest(products) if phase == "update" else self.weight_in_use(products)
            self._known[key] = {**self.roles, Role.WEIGHT: weight}
        return self._known[key]


def elements_with_role(saved: Sequence[SavedElements], role: Role) -> Polynomial:
    """Elements kept with one role."""
    return sum((one.elements for one in saved if one.role is role), start=ZERO)


def bytes_by_role(precision: Precision, optimizer: Optimizer) -> dict[Role, float]:
    """Bytes per element of each role; of the optimizer's state the mean of master copy and moments, which are read as often. What
    has fewer numbers than a weight is not among these."""
    activations = bytes_per_element(precision.activations)
    master = precision.master_bytes or bytes_per_element(precision.weights)
    return {
        Role.WEIGHT: bytes_per_element(precision.weights),
        Role.WEIGHT_GRADIENT: bytes_per_element(precision.gradient_reduction),
        Role.ACTIVATION: activations,
        Role.RESIDUAL: activations,
        Role.ROUTED: activations,
        Role.LOGITS: activations,
        Role.STATISTIC: 4.0,
        Role.STATE: (master + moment_bytes(precision, optimizer)) / (1 + len(element_moments(precision, optimizer))),
        Role.FACTOR: factor_bytes(precision, optimizer),
        Role.MEAN: 4.0,
        Role.DIRECTION: activations,
        Role.CONSTANT: 4.0,
    }
