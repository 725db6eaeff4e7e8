"""Number format of every tensor, kernel and collective under a precision recipe: the one place that decides it.

Products with a block's weights (derive/low_precision_products.py) run in the recipe's `matmul`, all else in the format
of its role. Their operands are cast: read in their own format and written in that of the product, once for each order
of dims that a later product of the same pass needs. A gather for products alone moves the cast operand, and so does an
exchange of tokens, if the recipe says so. Of a tensor that only products read in the backward pass, the cast copy is
saved in place of the original. Source: Transformer Engine user guide, low precision training (casts, transposed copies,
fp8 gathers of sequence parallelism, cast inputs saved); DeepSeek-V3 (arXiv 2412.19437), section 3.3. Weights are cast for
each micro-batch; software that keeps their casts (`IssuePolicy.weight_casts`) makes them once a step, of weights that rest
whole, which counts as a part of the update. What norms and gated activations make for products, software may cast as it is made
(`derive/producer_casts.py`): the kernel then writes the casts that are read, and those are saved. Assumes: any other cast is a
kernel of its own. Differs: Transformer Engine can keep cast weights too, and fuses casts after norms and activations into these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shardwise.derive import ShardedUnit
from shardwise.derive.low_precision_products import ProductOperand, product_operands, saved_tensor_readers
from shardwise.derive.producer_casts import Form, ProducedOperand, form_of_order, forms_with_casts, produced_operands
from shardwise.model import DEFAULT_OPTIMIZER, Optimizer, Role, density, factor_bytes, get_optimizer, moment_bytes
from shardwise.model.decoder_block import RETURNED
from shardwise.model.optimizer_program import element_moments
from shardwise.sharding import CollectiveKind, Spec
from shardwise.step import Kernel, UnitCollective
from shardwise.values import ZERO, IssuePolicy, Polynomial, Precision, SymbolValues, Value, bytes_per_element, maximum
from shardwise.values.scalings import get_scaling


class SavedElements(NamedTuple):
    """Elements saved for the backward pass; `num_orders`: in how many orders of dims products read them, `also_read`:
    others do too. `produced` has the forms that are read of what its producer can cast."""

    role: Role
    num_orders: int
    also_read: bool
    elements: Polynomial
    produced: ProducedForms | None = None


class ProducedForms(NamedTuple):
    """Forms that are read of an operand of products which its producer can cast; `is_saved`: of what the forward pass has saved,
    `is_norm`: a norm makes it."""

    read: frozenset[Form]
    is_saved: bool
    is_norm: bool


class SavedFormat(NamedTuple):
    """Bytes of each saved element, and as text the format that it is cast to ("": none)."""

    width: float
    cast: str


class ProductOperands(NamedTuple):
    """Operands of a unit's products in each pass, and the tensors that it saves; independent of the recipe.

    `kept` are the weights whose casts are kept for all micro-batches of a step (`values.engine_policies.WeightCasts`), `produced`
    the operands that their producers may cast.
    """

    operands: tuple[ProductOperand, ...]
    saved: tuple[SavedElements, ...]
    kept: frozenset[str] = frozenset()
    produced: tuple[ProducedOperand, ...] = ()

    @property
    def narrow(self) -> bool:
        """True if any product runs in a recipe's `matmul`, which decides how wide weights are."""
        return bool(self.operands)


def read_products(unit: ShardedUnit, policy: IssuePolicy) -> ProductOperands:
    """Read the product operands and saved tensors of a unit."""
    phases, tensors = unit.phases(), unit.tensors
    operands = product_operands(phases, tensors, unit.saved)
    produced = producible_operands(unit, policy)
    drops_results = policy.router_weights == "activations"
    saved = [
        (name, spec)
        for name, spec in unit.saved_by_this_unit_only.items()
        if not (drops_results and name.endswith(RETURNED))
    ]
    return ProductOperands(operands, SavedTensors(unit, operands, produced).saved(saved), produced=produced)


def producible_operands(unit: ShardedUnit, policy: IssuePolicy) -> tuple[ProducedOperand, ...]:
    """Return the operands of products that the kernels of an engine with this policy may cast as they make them."""
    return produced_operands(unit) if policy.casts == "in_producers" else ()


class SavingKey(NamedTuple):
    """Properties of a tensor that decide in which format it is saved, as in `SavedElements`."""

    role: Role
    num_orders: int
    also_read: bool
    produced: ProducedForms | None


class SavedTensors:
    """Tensors of a unit as they are saved for its backward pass; a gradient is kept in its own format."""

    def __init__(
        self, unit: ShardedUnit, operands: Iterable[ProductOperand], produced: Iterable[ProducedOperand] = ()
    ) -> None:
        self.unit, self.phases = unit, unit.phases()
        self.orders = {operand.name: len(operand.orders) for operand in operands if not operand.is_forward}
        self.produced = {operand.name: _forms_in_backward(operand) for operand in produced}
        self._cache: dict[str, SavingKey] = {}

    def saved(self, tensors: Iterable[tuple[str, Spec]]) -> tuple[SavedElements, ...]:
        """Return the elements of some tensors; those that are saved alike are summed."""
        elements_by_key: dict[SavingKey, Polynomial] = {}
        for name, spec in tensors:
            key = self.saving_key(name)
            elements_by_key[key] = elements_by_key.get(key, ZERO) + spec.local_elements() * density(key.role)
        return tuple(
            SavedElements(key.role, key.num_orders, key.also_read, elements, key.produced)
            for key, elements in elements_by_key.items()
        )

    def saving_key(self, name: str) -> SavingKey:
        """Return the properties of a tensor that decide in which format it is saved."""
        if name not in self._cache:
            unit, role = self.unit, self.unit.tensors[name].role
            by_products, also = False, True
            if name in unit.forward.program.tensors:
                by_products, also = saved_tensor_readers(self.phases, unit.tensors, name)
            self._cache[name] = SavingKey(
                role, self.orders[name] if by_products else 0, also or not by_products, self.produced.get(name)
            )
        return self._cache[name]


def _forms_in_backward(operand: ProducedOperand) -> ProducedForms:
    """Return the forms that a backward pass has of an operand."""
    is_saved = operand.phase == "forward"
    return ProducedForms(operand.saved if is_saved else operand.read, is_saved, operand.is_norm)


def weight_grad_inputs(
    unit: ShardedUnit, kernels: Iterable[Kernel], produced: Iterable[ProducedOperand]
) -> tuple[SavedElements, ...]:
    """Return what kernels that make weight gradients read, as it rests: kept until they run, in one order of dims.

    Source: Qi et al. 2023, appendix: M_W counts the inputs and the output gradients of the products.
    """
    specs = {**unit.backward.specs, **unit.saved}
    weight_grad_kernels = [kernel for kernel in kernels if kernel.makes_weight_grads]
    cast, plain = (
        {name for k in weight_grad_kernels if bool(k.operand_elements) is is_cast for name in k.inputs}
        for is_cast in (True, False)
    )
    read = ((name, unit.tensors[name].role) for name in sorted(cast | plain))
    columns = {
        operand.name: ProducedForms(frozenset[Form]({"columns"}), operand.phase == "forward", operand.is_norm)
        for operand in produced
    }
    return tuple(
        SavedElements(
            role,
            int(name in cast),
            name in plain,
            specs[name].local_elements() * density(role),
            None if name in plain else columns.get(name),
        )
        for name, role in read
        if role not in (Role.WEIGHT, Role.CONSTANT)
    )


class TensorFormats:
    """Bytes per element under one recipe and one optimizer."""

    def __init__(self, precision: Precision, optimizer: Optimizer | None = None) -> None:
        self.precision, self.optimizer = precision, optimizer or get_optimizer(DEFAULT_OPTIMIZER)
        scaling = get_scaling(precision.scaling) if precision.matmul and precision.scaling else None
        self.producer_forms = {
            has_rows: scaling.producer_forms(has_rows=has_rows) if scaling is not None else ()
            for has_rows in (False, True)
        }
        self.roles = bytes_by_role(precision, self.optimizer)
        self._cache: dict[tuple[bool, bool], Mapping[Role, float]] = {}

    def product_rate_format(self, kernel: Kernel) -> str:
        """Return the format that a kernel's FLOPs run in."""
        return self.precision.matmul_format if kernel.operand_elements else self.precision.activations

    def weight_at_rest(self, products: ProductOperands) -> float:
        """Return the bytes of a weight; without products that could run in `matmul`, weights are no narrower than
        activations."""
        rest = bytes_per_element(self.precision.weights)
        return rest if products.narrow else max(rest, bytes_per_element(self.precision.activations))

    @property
    def keeps_weight_casts(self) -> bool:
        """True if a weight may be cast ahead of its products: it rests wider than they take it."""
        recipe = self.precision
        return bool(recipe.matmul) and bytes_per_element(recipe.weights) >= bytes_per_element(recipe.activations)

    def resting_widths(self) -> dict[str, float]:
        """Return the bytes of each weight at rest, by field of `StateElements`.

        Weights of narrow products, with their share of a scale, may be narrower than activations; other weights may not. A cast
        that is kept has both orders of dims.
        """
        kept_width = {"kept": 2.0 * self.precision.cast_bytes(weight=True)} if self.keeps_weight_casts else {}
        rest, plain = (bytes_per_element(dtype) for dtype in (self.precision.weights, self.precision.activations))
        if self.precision.frozen:
            return {"resting": rest, "quantized": bytes_per_element(self.precision.frozen) - rest}
        if rest >= plain:
            return {"resting": rest, **kept_width}
        block = self.precision.weight_block
        return {"resting": plain, "cast": rest - plain + (self.precision.scale_bytes / block if block else 0.0)}

    def weight_in_use(self, products: ProductOperands) -> float:
        """Return the bytes of a weight as kernels read it and as ZeRO gathers it."""
        if self.precision.gathered is None:
            return self.weight_at_rest(products)
        return bytes_per_element(self.precision.gathered if products.narrow else self.precision.activations)

    def kernel_bytes(self, kernel: Kernel, products: ProductOperands, values: SymbolValues) -> Value:
        """Return the bytes that a kernel reads and writes."""
        widths = self._roles(products, kernel.phase)
        if kernel.phase == "backward":
            widths = {**widths, Role.WEIGHT_GRADIENT: self.accumulation_bytes}
        total = sum((elements.evaluate(values) * widths[role] for role, elements in kernel.elements.items()), start=0.0)
        if not self.precision.matmul:
            return total
        for role, elements in kernel.operand_elements.items():
            added_width = self.precision.cast_bytes(weight=role is Role.WEIGHT) - widths[role]
            total = total + elements.evaluate(values) * added_width
        for operand in self.produced_by(kernel, products):
            total = total + operand.elements.evaluate(values) * self.producer_bytes(operand)
        return total

    def produced_by(self, kernel: Kernel, products: ProductOperands) -> tuple[ProducedOperand, ...]:
        """Return the operands of products that a kernel makes and casts."""
        return tuple(
            operand
            for operand in products.produced
            if operand.phase == kernel.phase
            and operand.name in kernel.outputs
            and self._forms_written(operand) != ("plain",)
        )

    def producer_bytes(self, operand: ProducedOperand) -> float:
        """Return the bytes that the kernel which makes an operand moves for each element beyond writing it as it is."""
        forms, width = self._forms_written(operand), self.roles[operand.role]
        casts = sum(form != "plain" for form in forms) * self.precision.cast_bytes()
        reads_again = width if operand.is_norm and "columns" in forms else 0.0
        return casts + reads_again - (0.0 if "plain" in forms else width)

    def _forms_written(self, operand: ProducedOperand) -> tuple[Form, ...]:
        return operand.written(self.producer_forms[operand.is_norm])

    def _forms_cast(self, products: ProductOperands) -> dict[tuple[bool, str], frozenset[Form]]:
        """Return the forms that products have cast, by whether it is the forward pass, and by name."""
        forms: dict[tuple[bool, str], frozenset[Form]] = {}
        for operand in products.produced:
            is_forward = operand.phase == "forward"
            if is_forward:
                forms[False, operand.name] = frozenset(operand.saved_forms(self.producer_forms[operand.is_norm]))
            forms[is_forward, operand.name] = frozenset(self._forms_written(operand))
        return forms

    @property
    def accumulation_bytes(self) -> float:
        """Bytes that a product moves for each element of a weight's gradient: it is read, added to and written again.

        Source: Megatron-LM's fused weight gradients, which accumulate into the main gradient within the product; others add
        in a kernel of their own. Differs: the only micro-batch of a step, and ZeRO from stage 2 on, need not read it.
        """
        return 2.0 * bytes_per_element(self.precision.accumulated_gradients or self.precision.gradients)

    def extra_gradient_bytes(self, zero_stage: int) -> float:
        """Return the bytes per element of a gradient copy that a product of our engine makes beside the resting gradient.

        From ZeRO-2 on it is beside the gradient that is scattered. There is none where both have one format: the
        product then writes in place (`run/engine/calls.py`).
        """
        product_format = self.precision.activations
        rests = self.precision.gradients if zero_stage < 2 else self.precision.gradient_reduction
        return 0.0 if rests == product_format else bytes_per_element(product_format)

    def cast_bytes(self, phase: str, products: ProductOperands, values: SymbolValues) -> Value:
        """Return the bytes that the casts of a phase read and write, of frozen weights that are dequantized too; 0 where products
        run in the format of the activations, and weights rest in it."""
        if self.precision.frozen:
            casts = self.dequantized(phase, products)
        elif self.precision.matmul:
            casts = self.casts(phase, products)
        else:
            return 0.0
        return sum((num_bytes * operand.elements.evaluate(values) for operand, num_bytes in casts), start=0.0)

    def dequantized(self, phase: str, products: ProductOperands) -> Iterator[tuple[ProductOperand, float]]:
        """Yield each frozen weight that a phase takes, with the bytes read and written for an element of it.

        It is dequantized for each product. Source: bitsandbytes 0.49, autograd/_functions.py, MatMul4Bit: forward and backward
        both call dequantize_4bit, and nothing is saved.
        """
        num_bytes = bytes_per_element(self.precision.frozen or "") + bytes_per_element(self.precision.activations)
        for operand in products.operands:
            if operand.phase == phase and operand.frozen:
                yield operand, len(operand.orders) * num_bytes

    def dequantized_bytes(self, products: ProductOperands, values: SymbolValues) -> Value:
        """Return the bytes of the largest frozen weight in the format of the activations, which is there while a product runs."""
        if not self.precision.frozen:
            return 0.0
        width = bytes_per_element(self.precision.activations)
        frozen = (operand for operand in products.operands if operand.frozen)
        return maximum(0.0, *(operand.elements.evaluate(values) * width for operand in frozen))

    def casts(self, phase: str, products: ProductOperands) -> Iterator[tuple[ProductOperand, float]]:
        """Yield each operand that is cast in a phase, with the bytes read and written for an element of it.

        A weight whose cast is kept is cast once a step, in both orders of dims, which counts as a part of its update.
        """
        recipe, widths = self.precision, self._roles(products, phase)
        kept_weights = products.kept if self.keeps_weight_casts else frozenset()
        if phase == "update":
            for operand in products.operands:
                if operand.name in kept_weights and operand.is_forward:
                    num_reads = recipe.cast_reads * (2 if recipe.casts_orders_apart else 1)
                    yield operand, num_reads * widths[Role.WEIGHT] + 2 * recipe.cast_bytes(weight=True)
            return
        forward = {operand.name: operand.orders for operand in products.operands if operand.is_forward}
        backward = {operand.name: operand.orders for operand in products.operands if not operand.is_forward}
        forms_cast = self._forms_cast(products)
        for operand in (operand for operand in products.operands if operand.phase == phase):
            if operand.name in kept_weights:
                continue
            cast_before = forms_cast.get((operand.is_forward, operand.name), frozenset())
            orders = frozenset(order for order in operand.orders if form_of_order(order) not in cast_before)
            saves_cast = operand.saved and recipe.saves_casts
            if saves_cast and not operand.is_forward:
                continue
            if saves_cast:
                orders = orders | backward.get(operand.name, frozenset())
            if operand.is_weight and widths[Role.WEIGHT] == bytes_per_element(recipe.matmul_format):
                orders = orders - forward[operand.name]  # it comes cast, in the order of the forward pass
            copies = len(orders) if recipe.transposed_copies else min(len(orders), 1)
            if copies:
                written = copies * recipe.cast_bytes(weight=operand.is_weight)
                num_reads = recipe.cast_reads * (copies if recipe.casts_orders_apart else 1)
                num_bytes = num_reads * widths[operand.role] + written
                yield operand, num_bytes

    def rescale_bytes(self, phase: str, kernels: Iterable[Kernel], values: SymbolValues) -> Value:
        """Return the bytes that kernels move which apply scales to the results of a phase's products: read once and written."""
        if not self.precision.rescales_gradients or phase != "backward":
            return 0.0
        moved: Value = 0.0
        for kernel in (kernel for kernel in kernels if kernel.phase == phase and kernel.operand_elements):
            for role, elements in kernel.elements.items():
                results = elements.evaluate(values) - kernel.operand_elements.get(role, ZERO).evaluate(values)
                moved = moved + 2.0 * bytes_per_element(self.precision.activations) * results
        return moved

    def collective_width(self, collective: UnitCollective, products: ProductOperands) -> float:
        """Return the bytes of each element that a collective moves."""
        recipe = self.precision
        casts = recipe.casts_gathers if collective.kind is CollectiveKind.ALL_GATHER else recipe.casts_dispatch
        if collective.for_products and recipe.matmul and casts:
            return self.precision.cast_bytes()
        if recipe.frozen and collective.role is Role.WEIGHT and carries_frozen(collective, products):
            return bytes_per_element(recipe.frozen)
        return self._roles(products, collective.phase)[collective.role]

    def saved_bytes(self, saved: Iterable[SavedElements], values: SymbolValues) -> Value:
        """Return the bytes saved for the backward pass, or until weight gradients are made, without the logits."""
        with_widths = ((self.saved_as(tensor).width, tensor) for tensor in saved if tensor.role is not Role.LOGITS)
        return sum((tensor.elements.evaluate(values) * width for width, tensor in with_widths), start=0.0)

    def saved_as(self, tensor: SavedElements) -> SavedFormat:
        """Return the format in which a tensor is saved for the backward pass."""
        recipe = self.precision
        if tensor.produced is not None:
            forms = self._forms_live(tensor.produced)
            if forms != ("plain",):
                casts = len(forms) - ("plain" in forms)
                width = casts * recipe.cast_bytes() + (self.roles[tensor.role] if "plain" in forms else 0.0)
                return SavedFormat(width, f" in {recipe.matmul}{' and as it is' if 'plain' in forms else ''}")
        if not (recipe.matmul and recipe.saves_casts and tensor.num_orders):
            return SavedFormat(self.roles[tensor.role], "")
        copies = tensor.num_orders if recipe.transposed_copies else 1
        plain_width = self.roles[tensor.role] if tensor.also_read else 0.0
        cast = f" in {recipe.matmul}{' and as it is' if tensor.also_read else ''}"
        return SavedFormat(copies * recipe.cast_bytes() + plain_width, cast)

    def _forms_live(self, produced: ProducedForms) -> tuple[Form, ...]:
        """Return the forms in which a backward pass has an operand that its producer can cast."""
        forms = forms_with_casts(produced.read, self.producer_forms[produced.is_norm])
        return ("plain",) if produced.is_saved and "plain" in forms else forms

    def _roles(self, products: ProductOperands, phase: str) -> Mapping[Role, float]:
        key = products.narrow, phase == "update"
        if key not in self._cache:
            weight = self.weight_at_rest(products) if phase == "update" else self.weight_in_use(products)
            self._cache[key] = {**self.roles, Role.WEIGHT: weight}
        return self._cache[key]


def carries_frozen(collective: UnitCollective, products: ProductOperands) -> bool:
    """Return whether a collective gathers weights that are not trained, which are arrays of their own."""
    return any(operand.frozen and operand.name in collective.tensors for operand in products.operands)


def elements_with_role(saved: Sequence[SavedElements], role: Role) -> Polynomial:
    """Return the saved elements of one role."""
    return sum((tensor.elements for tensor in saved if tensor.role is role), start=ZERO)


def bytes_by_role(precision: Precision, optimizer: Optimizer) -> dict[Role, float]:
    """Return the bytes per element of each role.

    The optimizer's state has the mean of master copy and moments, which are read equally often. What has fewer numbers
    than a weight is not among these.
    """
    activations = bytes_per_element(precision.activations)
    master = precision.master_bytes or bytes_per_element(precision.weights)
    return {
        Role.WEIGHT: bytes_per_element(precision.weights),
        Role.WEIGHT_GRADIENT: bytes_per_element(precision.gradient_reduction), Role.ACTIVATION: activations,
        Role.RESIDUAL: activations, Role.CARRIED: activations, Role.ROUTED: activations,
        Role.LOGITS: activations, Role.STATISTIC: 4.0,
        Role.STATE: (master + moment_bytes(precision, optimizer)) / (1 + len(element_moments(precision, optimizer))),
        Role.FACTOR: factor_bytes(precision, optimizer), Role.MEAN: 4.0, Role.DIRECTION: activations,
        Role.CONSTANT: 4.0,
    }  # fmt: skip
