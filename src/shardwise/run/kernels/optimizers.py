"""Optimizers on tensors: by PyTorch's fused kernel where there is one, else by their formulas (`model.optimizers`).

Moments may be stored in 8 bits with a scale for each block (`values.quantization.DynamicTreeFormat`), or in a narrow
format with one scale for all elements, as FP8 recipes keep gradients and moments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model import GRADIENT, MASTER, Optimizer, formula_values, get_optimizer
from shardwise.model.optimizers.definition import OPTIMIZERS, StateUpdate
from shardwise.run.kernels import device_dispatch
from shardwise.run.kernels.device_dispatch import at_least_fp32
from shardwise.values.quantization import get_dynamic_tree_format


@dataclass(frozen=True, slots=True, eq=False)
class BlockwiseMoment:
    """A moment [n] stored as 8-bit `codes` [n] of a format, given by name, and one of `scales` per block of elements.

    It has the parts of a tensor's interface that formulas of optimizers use: slices, conversion to a dtype, and
    `copy_`.
    """

    codes: Tensor
    scales: Tensor
    format: str

    @classmethod
    def zeros(cls, size: int, format: str, device: torch.device) -> BlockwiseMoment:
        """Return `size` elements of 0."""
        numbers = get_dynamic_tree_format(format)
        (zero,) = (numbers.values == 0.0).nonzero()[0]
        codes = torch.full((size,), int(zero), dtype=torch.uint8, device=device)
        return cls(codes, torch.zeros(-(-size // numbers.blocks.size), device=device), format)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values that it stands for."""
        return self.scales.dtype

    @property
    def block(self) -> int:
        """Number of elements that share a scale."""
        return get_dynamic_tree_format(self.format).blocks.size

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, part: slice) -> BlockwiseMoment:
        """Return views of some elements; the first must be the first of a block."""
        start, stop, _ = part.indices(len(self))
        if start % self.block:
            raise ValueError(f"a part begins at element {start}; a multiple of {self.block} is required")
        return BlockwiseMoment(
            self.codes[start:stop], self.scales[start // self.block : -(-stop // self.block)], self.format
        )

    def to(self, dtype: torch.dtype) -> Tensor:
        """Return the values [n]."""
        numbers, _ = _number_tables(self.format, self.codes.device)
        return (numbers[self.codes.int()] * self._expand_scales(self.scales)).to(dtype)

    def copy_(self, values: Tensor, allows: Tensor | None = None) -> BlockwiseMoment:
        """Quantize other values [n] in place, if the scalar `allows` is true (None: it is)."""
        _, limits = _number_tables(self.format, self.codes.device)
        values = values.to(self.dtype)
        padded = F.pad(values, (0, -len(values) % self.block)).view(-1, self.block)
        scales = padded.abs().amax(1)
        scaled = values / self._expand_scales(scales.where(scales > 0, 1.0))
        write_where(self.codes, torch.bucketize(scaled, limits, right=True, out_int32=True), allows)
        write_where(self.scales, scales, allows)
        return self

    def _expand_scales(self, scales: Tensor) -> Tensor:
        """Return the scale of each element [n]."""
        return scales.repeat_interleave(self.block)[: len(self)]


@dataclass(frozen=True, slots=True, eq=False)
class ScaledTensor:
    """Elements [n] in a floating-point format, and the `scale` [1] by which all are multiplied.

    It has the parts of a tensor's interface that formulas of optimizers use: conversion to a dtype, and `copy_`. It has
    no slices, for its scale depends on all values.

    >>> found = ScaledTensor.zeros(3, torch.float8_e4m3fn, torch.device("cpu")).copy_(torch.tensor([1.0, -4.0, 0.001]))
    >>> found.elements.tolist(), found.to(torch.float32).tolist()
    ([112.0, -448.0, 0.109375], [1.0, -4.0, 0.0009765625])
    """

    elements: Tensor
    scale: Tensor

    @classmethod
    def zeros(cls, size: int, dtype: torch.dtype, device: torch.device) -> ScaledTensor:
        """Return `size` elements of 0."""
        return cls(torch.zeros(size, dtype=dtype, device=device), torch.ones(1, device=device))

    def __len__(self) -> int:
        return len(self.elements)

    def to(self, dtype: torch.dtype) -> Tensor:
        """Return the values [n]."""
        return (self.elements.float() * self.scale).to(dtype)

    def copy_(self, values: Tensor, allows: Tensor | None = None) -> ScaledTensor:
        """Store other values [n], the largest as the format's largest number, non-finite ones as NaN, if the scalar
        `allows` is true (None: it is)."""
        values, largest = values.float(), torch.finfo(self.elements.dtype).max
        encode = torch.full_like(self.scale, largest) / values.abs().amax().clamp(min=LEAST_AMAX)
        write_where(self.scale, 1.0 / encode, allows)
        write_where(self.elements, (values * encode).clamp(-largest, largest), allows)
        return self


def write_where(target: Tensor, values: Tensor, allows: Tensor | None) -> None:
    """Copy values to a tensor if the scalar `allows`, which stays on the device, is true (None: it is)."""
    target.copy_(values if allows is None else torch.where(allows, values, target.to(values.dtype)))


MomentTensor = Tensor | BlockwiseMoment | ScaledTensor
WeightState = dict[
    str, Any
]  # the moments of a weight, and its number of steps: on the device for a kernel, else a number
GroupSettings = dict[str, Any]  # weights with the same settings, as in torch.optim
# Elements that formulas take at once: on a CPU intermediate results stay in its cache, and a GPU is kept busy.
BLOCK_ELEMENTS, GPU_BLOCK_ELEMENTS = 2**15, 2**24


class TorchOptimizer(ABC):
    """Groups of weights with their settings (`lr` among them) and the state of each weight, in the layout of
    torch.optim.Optimizer.

    It is no subclass: to construct one loads torch._dynamo, a fifth of a rank's start-up time. A step changes nothing
    where the scalar `allows` is false (None: it is true); the host does not read it.
    """

    def __init__(self, groups: Sequence[GroupSettings]) -> None:
        self.param_groups = list(groups)
        self.state: dict[Tensor, WeightState] = {}
        self.allows: Tensor | None = None
        self.gradients: Mapping[nn.Parameter, Tensor] = {}

    @abstractmethod
    def step(self) -> None:
        """Update every weight [n] from its gradient."""


# The hyperparameters of AdamW by our names, as PyTorch's kernel names them.
ADAMW_SETTINGS = {"beta1": "beta1", "beta2": "beta2", "epsilon": "eps", "weight_decay": "weight_decay"}


class FusedAdamW(TorchOptimizer):
    """AdamW by PyTorch's kernel, that of torch.optim.AdamW(fused=True)."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            settings = {name: setting for name, setting in group.items() if name != "params"}
            weights = group["params"]
            states = [self.state[weight] for weight in weights]
            averages, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
            is_left_out = None if self.allows is None else (~self.allows).float()
            torch._foreach_add_(steps, 1)
            if is_left_out is not None:  # a list: with one tensor for all PyTorch reads it on a CPU
                torch._foreach_sub_(steps, [is_left_out] * len(steps))
            torch._fused_adamw_(
                weights, [weight.grad for weight in weights], averages, squares, [], steps, amsgrad=False, maximize=False,
                grad_scale=None, found_inf=is_left_out, **settings,
            )  # fmt: skip


class TritonAdamW(TorchOptimizer):
    """AdamW by Triton's kernel: one pass over memory, which reads gradients in their dtype, scales them, and writes a copy of the
    weights in a second dtype.

    `control` [2] on the device are the factor of the gradients, and 0 where nothing is to change (None: 1 and 1).
    `copies` [n] of some weights take their new values. The `step` of a weight is a number, as in `FormulaOptimizer`.
    """

    def __init__(self, groups: Sequence[GroupSettings]) -> None:
        super().__init__(groups)
        self.control: Tensor | None = None
        self.copies: Mapping[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        from shardwise.run.triton_kernels import adamw

        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state["step"] += 1
                settings = adamw.AdamWSettings(
                    group["lr"], group["beta1"], group["beta2"], group["epsilon"], group["weight_decay"],
                    1.0 - group["beta1"] ** state["step"], 1.0 - group["beta2"] ** state["step"],
                )  # fmt: skip
                moments, control = (state["exp_avg"], state["exp_avg_sq"]), self.control
                control = weight.new_ones(2, dtype=torch.float32) if control is None else control
                adamw.update(weight, self.gradients[weight], moments, self.copies.get(weight), control, settings)

    @staticmethod
    def takes(weights: Sequence[Tensor], moment_dtypes: Iterable[torch.dtype | None]) -> bool:
        """Return whether the kernel takes these weights and moments (None: of the weights' dtype)."""
        stored = all(dtype is None or dtype in PLAIN_MOMENTS for dtype in moment_dtypes)
        return stored and bool(weights) and device_dispatch.has_triton(*weights)


class FormulaOptimizer(TorchOptimizer):
    """An optimizer that runs by its formulas, a block of elements at a time, in float32 or wider.

    The `step` of a weight is a number, as formulas take it; it counts steps that were not allowed too. `gradients` [n]
    replace those of weights, from whose dtype they may differ.
    """

    def __init__(self, groups: Sequence[GroupSettings], optimizer: Optimizer) -> None:
        super().__init__(groups)
        self.optimizer = optimizer

    @torch.no_grad()
    def step(self) -> None:
        assert not self.optimizer.reduces_means, "a mean is no matter of blocks (run.parallel.factored_update)"
        for group in self.param_groups:
            fields = {name: group[name] for name in self.optimizer.fields}
            for weight in group["params"]:
                state = self.state[weight]
                state["step"] += 1
                formula_inputs = formula_values(fields, learning_rate=group["lr"], step=state["step"])
                moments = {name: state[name] for name in self.optimizer.moments}
                self._update(
                    formula_inputs, {MASTER: weight, GRADIENT: self.gradients.get(weight, weight.grad), **moments}
                )

    def _update(self, formula_inputs: Any, tensors: Mapping[str, MomentTensor]) -> None:
        weight = tensors[MASTER]
        assert isinstance(weight, Tensor)
        dtype = at_least_fp32(weight.dtype)
        for block in _split_into_blocks(tensors, block_elements(weight)):
            widened = {name: part.to(dtype) for name, part in block.items()}
            for name, updated in self.optimizer.step(formula_inputs, widened).items():
                part = block[name]
                if isinstance(part, Tensor):
                    write_where(part, updated, self.allows)
                else:
                    part.copy_(updated, self.allows)


def _split_into_blocks(tensors: Mapping[str, MomentTensor], size: int) -> Iterator[Mapping[str, MomentTensor]]:
    """Yield tensors [n] in blocks of `size` elements; undivided where one has a scale for all of them."""
    divisible = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, ScaledTensor)}
    if len(divisible) < len(tensors):
        yield tensors
        return
    for start in range(0, len(divisible[MASTER]), size):
        yield {name: tensor[start : start + size] for name, tensor in divisible.items()}


def block_elements(weight: Tensor) -> int:
    """Return how many elements formulas take at once on a weight's device."""
    return BLOCK_ELEMENTS if weight.device.type == "cpu" else GPU_BLOCK_ELEMENTS


@dataclass(frozen=True, slots=True)
class MomentDtypes:
    """Dtypes of moments, and of second moments. `scaled`: each moment of a weight in FP8 or fp16 has a scale."""

    first: torch.dtype
    second: torch.dtype
    scaled: bool = False


def build_torch_optimizer(
    name: str, matrices: Sequence[nn.Parameter], non_matrices: Sequence[nn.Parameter], fields: Mapping[str, float],
    dtypes: MomentDtypes | None = None, *, products: bool = False,
) -> TorchOptimizer:  # fmt: skip
    """Build a named optimizer over flat weights [n], matrices and others apart, with the values of its fields.

    `dtypes` are those of its moments, except of moments that define their own; None: those of the weights. With
    `products`, the weights are matrices of products, which some optimizers update by another rule. An optimizer that
    PyTorch has a fused kernel for runs by it, unless its fields were extended or its dtypes differ; AdamW on a GPU with
    Triton by one of ours.

    Optimizers that need whole matrices are in `run.parallel.whole_matrix_update`, those that need means over rows and
    columns in `run.parallel.factored_update`. The state is allocated here and not after the first step, so that memory
    is the same in every step. Raises `InputError` for an unknown optimizer, or for hyperparameters that it lacks.
    """
    hyperparameters = get_optimizer(name).resolve_hyperparameters(fields)
    optimizer = get_optimizer(name).for_weight(is_matrix=products)
    hyperparameters = {field: hyperparameters[field] for field in optimizer.fields}
    moment_dtypes = {
        moment: None if dtypes is None else dtypes.second if update.is_second_moment else dtypes.first
        for moment, update in optimizer.moments.items()
    }
    weights = (*matrices, *non_matrices)
    num_dtypes = len({weight.dtype for weight in weights} | ({*moment_dtypes.values()} - {None}))
    has_adamw_fields = optimizer is OPTIMIZERS["adamw"] and set(optimizer.fields) == set(ADAMW_SETTINGS)
    # PyTorch's kernel takes one dtype, that of the gradients too, which are at least fp32
    is_fused = has_adamw_fields and num_dtypes <= 1 and all(w.dtype == at_least_fp32(w.dtype) for w in weights)
    by_triton = has_adamw_fields and TritonAdamW.takes(weights, moment_dtypes.values())
    is_fused = is_fused and not by_triton
    groups = []
    for group, matrix in ((matrices, True), (non_matrices, False)):
        settings = dict(optimizer.hyperparameters_for(hyperparameters, matrix=matrix))
        if is_fused:
            settings = {ADAMW_SETTINGS[field]: setting for field, setting in settings.items()}
        if group:
            groups.append({"params": list(group), "lr": 0.0, **settings})
    torch_optimizer: TorchOptimizer
    if by_triton:
        torch_optimizer = TritonAdamW(groups)
    else:
        torch_optimizer = FusedAdamW(groups) if is_fused else FormulaOptimizer(groups, optimizer)
    for weight in weights:
        state: WeightState = {"step": torch.zeros((), dtype=torch.float32, device=weight.device) if is_fused else 0}
        for moment, update in optimizer.moments.items():
            scaled = dtypes is not None and dtypes.scaled
            state[moment] = _zero_moment(weight, update, moment_dtypes[moment], scaled=scaled)
        torch_optimizer.state[weight] = state
    return torch_optimizer


def _zero_moment(weight: Tensor, update: StateUpdate, dtype: torch.dtype | None, *, scaled: bool) -> MomentTensor:
    """Return a weight's initial moment [n]."""
    if update.format is None:
        if scaled and dtype in SHORT_OF_RANGE:
            return ScaledTensor.zeros(len(weight), dtype, weight.device)
        return torch.zeros_like(weight, dtype=dtype)
    return BlockwiseMoment.zeros(len(weight), update.format, weight.device)


def step_optimizer(
    optimizer: TorchOptimizer, gradients: Mapping[nn.Parameter, Tensor], allows: Tensor | None = None
) -> None:
    """Update weights [n] from their gradients, which are released afterwards; nothing where `allows`, a scalar on their
    device, is false (None: it is true)."""
    optimizer.allows = allows
    if isinstance(optimizer, TritonAdamW):
        optimizer.control = None if allows is None else torch.stack((torch.ones_like(allows), allows)).float()
    if not isinstance(optimizer, FusedAdamW):
        optimizer.gradients = dict(gradients)
        optimizer.step()
        optimizer.gradients = {}
        return
    for weight, gradient in gradients.items():
        weight.grad = gradient
    optimizer.step()
    for weight in gradients:
        weight.grad = None


@lru_cache
def _number_tables(format: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the numbers of a format and its rounding boundaries, on a device."""
    numbers = get_dynamic_tree_format(format)
    return torch.from_numpy(numbers.values).to(device), torch.from_numpy(numbers.rounding_boundaries).to(device)


PLAIN_MOMENTS = frozenset({torch.float32, torch.bfloat16})
# Formats whose range is too small for moments without a scale.
SHORT_OF_RANGE = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float16})
# Smallest amax that is scaled to the format's largest number, so that scales stay finite: squares of small gradients are far
# below `values.quantization.MIN_AMAX`.
LEAST_AMAX = 2.0**-100
