"""Products of two tensors with named dims as matrix products of views; operands as they are, or quantized.

A precision recipe says to which format with which scales operands are cast. Products that the device's tensor cores multiply
run there (`kernels.tensor_cores`); all others, and all on a CPU, are emulated: elements are widened to float32, so that each
product of two is exact, and sums are in float32. That equals the hardware's result up to the order of its sums. Source:
`values.quantization` cites the recipes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.derive.producer_casts import Form, ProducedOperand
from shardwise.model import Role
from shardwise.model import Tensor as Named
from shardwise.run.kernels.activation_casts import CastActivation, OutputCast
from shardwise.run.kernels.device_dispatch import device_capability
from shardwise.run.kernels.quantization import QuantizedTensor, quantize_matrix, scaled_product
from shardwise.run.kernels.quantized_weights import CastWeight, TiledWeight, WeightFormat
from shardwise.run.kernels.tensor_cores import ProductOperands, cast_operand, record_product, tensor_core_product
from shardwise.sharding import assign_letters, einsum_subscripts
from shardwise.step.kernel_fusion import BATCH_DIMS
from shardwise.values import NumberFormat, Precision
from shardwise.values.dtypes import get_number_format
from shardwise.values.engine_policies import Casts
from shardwise.values.scalings import ScaleBlock, ScaleKind, Scaling, get_scaling

Dims = tuple[str, ...]
View = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Matmul:
    """`result = left · right` with dims as in an einsum, as one `mm` of matrices that are views of the operands.

    `swapped`: the right operand has the rows of the result. The result's leading `tokens[1]` dims are tokens, with
    sizes from the operand at index `tokens[0]`; `widths` are the sizes of its other dims.
    """

    first: View
    second: View
    swapped: bool
    tokens: tuple[int, int]
    widths: tuple[int, ...]

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        rows, columns = self.matrices(left, right)
        return multiply(rows, columns).view(self.shape(left, right))

    def matrices(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two matrices whose product is the result."""
        return (self.first(right), self.second(left)) if self.swapped else (self.first(left), self.second(right))

    def into(self, target: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None:
        """Write the product to `target`, a contiguous tensor of the result's shape, or add it to what is there."""
        rows, columns = self.matrices(left, right)
        matrix = target.view(rows.shape[0], columns.shape[1])
        if accumulates_in_fp32(rows):
            product = multiply(rows, columns)
            matrix.add_(product) if add else matrix.copy_(product)
        elif add:
            matrix.addmm_(rows, columns)
        else:
            torch.mm(rows, columns, out=matrix)

    def shape(self, left: Tensor, right: Tensor) -> tuple[int, ...]:
        """Return the shape of the result."""
        takes_right, num_dims = self.tokens
        return (*(right if takes_right else left).shape[:num_dims], *self.widths)


def accumulates_in_fp32(rows: Tensor) -> bool:
    """Return whether a product is computed in float32 and rounded: in fp16 on a CPU, where PyTorch's own kernel takes
    twenty times as long.

    Its sums are then float32, as on tensor cores.
    """
    return rows.dtype == torch.float16 and rows.device.type == "cpu"


def multiply(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the product of two matrices in their dtype, summed in float32."""
    return (
        torch.mm(rows.float(), columns.float()).to(rows.dtype) if accumulates_in_fp32(rows) else torch.mm(rows, columns)
    )


def as_matmul(left: Dims, right: Dims, result: Dims, sizes: Mapping[str, int]) -> Matmul | None:
    """Return the product of operands with these dims as a matrix product; None where no views of them are matrices.

    `sizes` are those of the dims that are not tokens.
    """
    summed = tuple(dim for dim in left if dim in right and dim not in result)
    if set(left) & set(right) & set(result) or not summed:
        return None
    for swapped, (row_operand, column_operand) in enumerate(((left, right), (right, left))):
        rows, columns = _unshared_dims(row_operand, column_operand), _unshared_dims(column_operand, row_operand)
        if (*rows, *columns) != result:
            continue
        first, second = _as_matrix(row_operand, rows, summed, sizes), _as_matrix(column_operand, summed, columns, sizes)
        if first is None or second is None:
            return None
        leading = [dim for dim in result if dim in BATCH_DIMS]
        if tuple(leading) != result[: len(leading)] or (leading and tuple(leading) != row_operand[: len(leading)]):
            return None
        widths = tuple(sizes[dim] for dim in result[len(leading) :])
        return Matmul(first, second, bool(swapped), (swapped, len(leading)), widths)
    return None


def _unshared_dims(dims: Dims, excluded: Dims) -> Dims:
    return tuple(dim for dim in dims if dim not in excluded)


def _as_matrix(dims: Dims, rows: Dims, columns: Dims, sizes: Mapping[str, int]) -> View | None:
    """Return a view of an operand as a matrix [rows, columns]; None where its dims are in another order."""
    if dims == (*rows, *columns):
        shape = _matrix_shape(rows, columns, sizes)
        return lambda x: x.reshape(shape)
    if dims == (*columns, *rows):
        transposed_shape = _matrix_shape(columns, rows, sizes)
        return lambda x: x.reshape(transposed_shape).t()
    return None


def _matrix_shape(rows: Dims, columns: Dims, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return the shape of a matrix, with -1 for dims of tokens."""
    count, width = (
        -1 if set(dims) & set(BATCH_DIMS) else math.prod(sizes[dim] for dim in dims) for dims in (rows, columns)
    )
    return count, width


class Einsum:
    """A product whose dims are in no matrix's order, with the interface of `Matmul`."""

    def __init__(self, operands: Sequence[Dims], result: Dims) -> None:
        self.operands, self.result = operands, result
        self.subscripts = einsum_subscripts(operands, result, assign_letters(dim for dims in operands for dim in dims))

    def __call__(self, *tensors: Tensor) -> Tensor:
        return torch.einsum(self.subscripts, *tensors)

    def into(self, target: Tensor, *tensors: Tensor, add: bool) -> None:
        """Write the product to `target`, or add it to what is there."""
        product = self(*tensors)
        target.add_(product) if add else target.copy_(product)

    def shape(self, *tensors: Tensor) -> tuple[int, ...]:
        """Return the shape of the result."""
        pairs = zip(self.operands, tensors, strict=True)
        sizes = {dim: size for dims, tensor in pairs for dim, size in zip(dims, tensor.shape, strict=True)}
        return tuple(sizes[dim] for dim in self.result)


def matmul_or_einsum(left: Dims, right: Dims, result: Dims, sizes: Mapping[str, int]) -> Matmul | Einsum:
    """Return the product of two operands, as a matrix product where possible."""
    return as_matmul(left, right, result, sizes) or Einsum((left, right), result)


MatmulOperand = Tensor | TiledWeight | CastWeight | CastActivation
Cast = Callable[[Tensor, NumberFormat, ScaleBlock, ScaleKind, Tensor | None], QuantizedTensor]
SCALES_INPUT = "@scales"  # slot of a unit's `OperandScales`


@dataclass(frozen=True, slots=True)
class OperandCast:
    """Cast of an operand to a format with a scale for each block [rows, summed]; `name` is the tensor's."""

    to: NumberFormat
    block: ScaleBlock
    name: str = ""


class OperandScales(Protocol):
    """Scales of one unit's operands, from earlier steps."""

    def factor(self, name: str, tensor: Tensor) -> Tensor:
        """Return the scale factor of a named tensor, a scalar; record its amax for later steps."""


@dataclass(frozen=True, slots=True)
class ProductFormats:
    """Formats of products with a block's weights: of activations and weights, and of gradients.

    `casts_in_producers`: what scales allow is cast by the kernel that makes it, else all in the products.
    """

    operand: NumberFormat
    gradient: NumberFormat
    scaling: Scaling
    casts_in_producers: bool = False

    def of(self, tensor: Named) -> OperandCast:
        """Return the cast of a tensor of a unit."""
        block = self.scaling.weight_block if tensor.role is Role.WEIGHT else self.scaling.block
        return OperandCast(self.gradient if tensor.gradient_of else self.operand, block, tensor.name)

    def of_weight(self, shape: torch.Size, num_stacked: int, num_rows: int) -> WeightFormat | None:
        """Return the format of a weight that is cast before its products: the first `num_stacked` dims are a stack of matrices,
        the next `num_rows` their rows. None: two numbers of 4 bits in a byte would straddle its rows or columns."""
        sides = shape[num_stacked : num_stacked + num_rows].numel(), shape[num_stacked + num_rows :].numel()
        if self.operand.bits < 8 and any(side % 2 for side in sides):
            return None
        return WeightFormat(self.operand, self.scaling.weight_block, self.scaling.kind)

    def of_result(self, tensor: Named, produced: ProducedOperand) -> OutputCast | None:
        """Return the forms in which the kernel that makes a tensor writes it; None: as it is."""
        forms, operand = produced.written(self.producer_forms(produced)), self.of(tensor)
        return None if forms == ("plain",) else OutputCast(forms, operand.to, operand.block, self.scaling.kind)

    def producer_forms(self, produced: ProducedOperand) -> tuple[Form, ...]:
        """Return the forms of a result that the kernel which makes it casts."""
        return self.scaling.producer_forms(has_rows=produced.is_norm) if self.casts_in_producers else ()

    def product(self, left: Dims, right: Dims, result: Dims, tensors: Sequence[Named]) -> QuantizedMatmul:
        """Return the product of two tensors of a unit with these dims."""
        first, second = (self.of(tensor) for tensor in tensors)
        return QuantizedMatmul(left, right, result, (first, second), self.scaling)


def product_formats(precision: Precision, casts: Casts = "in_products") -> ProductFormats | None:
    """Return the product formats of a recipe; None: products run in the dtype of activations."""
    if precision.operand is None or precision.gradient_operand is None or precision.scaling is None:
        return None
    operand, gradient = get_number_format(precision.operand), get_number_format(precision.gradient_operand)
    return ProductFormats(operand, gradient, get_scaling(precision.scaling), casts == "in_producers")


def _is_activation(operand: MatmulOperand) -> bool:
    return isinstance(operand, Tensor | CastActivation)


@dataclass(frozen=True, slots=True)
class QuantizedMatmul:
    """`result = left · right` with dims as in an einsum, of quantized operands; with the interface of `Matmul`.

    Dims of one operand only are the rows of its matrix; dims of both are summed, in the left one's order. With delayed
    scaling a call reads the unit's `scales` after the operands.
    """

    left: Dims
    right: Dims
    result: Dims
    operands: tuple[OperandCast, OperandCast]
    scaling: Scaling
    scales: OperandScales | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of what a call reads besides the operands."""
        return (SCALES_INPUT,) if self.scaling.is_delayed else ()

    def at(self, *scales: OperandScales) -> QuantizedMatmul:
        """Return the same product with the scales that `reads` names."""
        return replace(self, scales=scales[0]) if scales else self

    def of(self, left: Dims, right: Dims, result: Dims, *, is_transposed: bool) -> QuantizedMatmul:
        """Return the same product for other dims; `is_transposed`: their left operand is the second here."""
        operands = self.operands[::-1] if is_transposed else self.operands
        return QuantizedMatmul(left, right, result, operands, self.scaling)

    def split(self, dims: Dims) -> int | None:
        """Return how many leading dims of an operand are the rows or the columns of its matrix; None: it is no view of one."""
        rows, summed = self._rows(dims), self._summed()
        return {(*rows, *summed): len(rows), (*summed, *rows): len(summed)}.get(dims)

    def __call__(self, left: MatmulOperand, right: MatmulOperand, *scales: OperandScales) -> Tensor:
        dtype = right.dtype if isinstance(left, TiledWeight | CastWeight) else left.dtype
        return self.at(*scales).multiply(left, right, dtype)

    def into(
        self, target: Tensor, left: MatmulOperand, right: MatmulOperand, *scales: OperandScales, add: bool
    ) -> None:
        """Write the product to `target`, a tensor of the result's shape, or add it, in the target's dtype."""
        product = self.at(*scales).multiply(left, right, target.dtype)
        target.add_(product) if add else target.copy_(product)

    def multiply(self, left: MatmulOperand, right: MatmulOperand, dtype: torch.dtype) -> Tensor:
        """Return the product in a dtype, from tensor cores where the device has them for these operands."""
        operands = padded = self.describe_operands(left, right)
        capability = device_capability(left.device)
        if capability is not None:
            padded = operands.pad(left=_is_activation(left), right=_is_activation(right))
        on_tensor_cores = padded.run_on(capability)
        record_product(operands, on_tensor_cores=on_tensor_cores)
        if not on_tensor_cores:
            return self.multiply_in_fp32(left, right).to(dtype)
        (num_rows, num_columns, width) = padded.sizes
        first = self._cast(left, self.left, self.operands[0], cast_operand, (num_rows, width))
        second = self._cast(right, self.right, self.operands[1], cast_operand, (num_columns, width))
        product = tensor_core_product(first, second, operands.blocks, operands.writes(dtype))
        product = product[: operands.sizes[0], : operands.sizes[1]].contiguous()
        return self._in_order_of_result(product, left, right).to(dtype)

    def multiply_in_fp32(self, left: MatmulOperand, right: MatmulOperand) -> Tensor:
        """Return the product in float32, emulated."""
        first, second = (
            self._cast(tensor, dims, operand, quantize_matrix)
            for tensor, dims, operand in zip((left, right), (self.left, self.right), self.operands, strict=True)
        )
        blocks = self._blocks(left, right)
        product = scaled_product(first, blocks[0], second, blocks[1], is_local=self.scaling.scales_inside_matmul)
        return self._in_order_of_result(product, left, right)

    def describe_operands(self, left: MatmulOperand, right: MatmulOperand) -> ProductOperands:
        """Return what decides where a product runs."""
        sizes = dict(zip((*self.left, *self.right), (*left.shape, *right.shape), strict=True))
        num_rows = (math.prod(sizes[dim] for dim in self._rows(dims)) for dims in (self.left, self.right))
        width = math.prod(sizes[dim] for dim in self._summed())
        formats = self.operands[0].to.name, self.operands[1].to.name
        return ProductOperands((*num_rows, width), formats, self._blocks(left, right), self.scaling.kind)

    def _blocks(self, left: MatmulOperand, right: MatmulOperand) -> tuple[ScaleBlock, ScaleBlock]:
        """Return the blocks of scales of both operands, as they are or will be cast."""
        first, second = (
            tensor.block if isinstance(tensor, CastWeight) else operand.block
            for tensor, operand in zip((left, right), self.operands, strict=True)
        )
        return first, second

    def _in_order_of_result(self, product: Tensor, left: MatmulOperand, right: MatmulOperand) -> Tensor:
        """Return a product of matrices with the dims of the result."""
        sizes = dict(zip((*self.left, *self.right), (*left.shape, *right.shape), strict=True))
        row_dims = (*self._rows(self.left), *self._rows(self.right))
        return product.view([sizes[dim] for dim in row_dims]).permute([row_dims.index(dim) for dim in self.result])

    def _factor(self, operand: OperandCast, matrix: Tensor) -> Tensor | None:
        """Return the factor of an operand from earlier steps; None where its own magnitudes decide."""
        return None if self.scales is None else self.scales.factor(operand.name, matrix)

    def _matrix(self, tensor: Tensor, dims: Dims) -> Tensor:
        """Return an operand as a matrix [rows, summed]."""
        rows = self._rows(dims)
        transposed = tensor.permute([dims.index(dim) for dim in (*rows, *self._summed())])
        return transposed.reshape(math.prod(transposed.shape[: len(rows)]), -1)

    def _cast(
        self, tensor: MatmulOperand, dims: Dims, operand: OperandCast, cast: Cast, shape: tuple[int, int] | None = None
    ) -> QuantizedTensor:
        """Return an operand as a quantized matrix [rows, summed], with zeros up to a `shape`."""
        rows = self._rows(dims)
        if isinstance(tensor, CastActivation):
            return tensor.quantized if shape is None else tensor.pad(shape)
        if isinstance(tensor, TiledWeight | CastWeight):
            return tensor.operand(by_columns=(dims[: len(rows)] != rows) is not tensor.turned)
        matrix = self._matrix(tensor, dims)
        if shape is not None and matrix.shape != shape:
            matrix = F.pad(matrix, (0, shape[1] - matrix.shape[1], 0, shape[0] - matrix.shape[0]))
        return cast(matrix, operand.to, operand.block, self.scaling.kind, self._factor(operand, matrix))

    def _summed(self) -> Dims:
        return tuple(dim for dim in self.left if dim in self.right)

    def _rows(self, dims: Dims) -> Dims:
        return tuple(dim for dim in dims if dim not in self._summed())
