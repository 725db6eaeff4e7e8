"""Optimizers as PyTorch runs them: by a kernel of its own where there is one, else by their formulas
(`shardwise.optimizer`).

Moments may rest in 8 bits with a scale for each block, as `floats.dynamic` defines them, or in a narrow format with
one scale for all elements, as FP8 recipes keep gradients and moments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.optimizers.definition import GRADIENT, MASTER, Optimizer, StateUpdate, formula_values
from shardwise.model.optimizers.registry import OPTIMIZERS, get_optimizer
from shardwise.run.kernels.device_dispatch import at_least_fp32
from shardwise.values.quantization import get_dynamic_tree_format


@dataclass(frozen=True, slots=True, eq=False)
class BlockwiseMoment:
    """Elements [n] as `codes` [n] of a format, by its name, and the `scales` of its blocks, counted from the first element.

    What the formulas of optimizers need of a tensor it has too: a part of it, its values in a format, and other values in place.
    """

    codes: Tensor
    scales: Tensor
    format: str

    @classmethod
    def zeros(cls, size: int, format: str, device: torch.device) -> BlockwiseMoment:
        """So many elements of 0."""
        numbers = get_dynamic_tree_format(format)
        (zero,) = (numbers.values == 0.0).nonzero()[0]
        codes = torch.full((size,), int(zero), dtype=torch.uint8, device=device)
        return cls(codes, torch.zeros(-(-size // numbers.blocks.size), device=device), format)

    @property
    def dtype(self) -> torch.dtype:
        """That of the values which it stands for."""
        return self.scales.dtype

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return get_dynamic_tree_format(self.format).blocks.size

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, part: slice) -> BlockwiseMoment:
        """Some elements from the beginning of a block on, as views."""
        start, stop, _ = part.indices(len(self))
        if start % self.block:
            raise ValueError(f"a part begins at element {start}; a multiple of {self.block} is required")
        return BlockwiseMoment(
            self.codes[start:stop], self.scales[start // self.block : -(-stop // self.block)], self.format
        )

    def to(self, dtype: torch.dtype) -> Tensor:
        """The values [n]."""
        numbers, _ = _number_tables(self.format, self.codes.device)
        return (numbers[self.codes.int()] * self._expand_scales(self.scales)).to(dtype)

    def copy_(self, values: Tensor) -> BlockwiseMoment:
        """Take on other values [n]."""
        _, limits = _number_tables(self.format, self.codes.device)
        values = values.to(self.dtype)
        padded = F.pad(values, (0, -len(values) % self.block)).view(-1, self.block)
        self.scales.copy_(padded.abs().amax(1))
        scaled = values / self._expand_scales(self.scales.where(self.scales > 0, 1.0))
        self.codes.copy_(torch.bucketize(scaled, limits, right=True, out_int32=True))
        return self

    def _expand_scales(self, scales: Tensor) -> Tensor:
        """The scale of each element [n]."""
        return scales.repeat_interleave(self.block)[: len(self)]


@dataclass(frozen=True, slots=True, eq=False)
class ScaledTensor:
    """Elements [n] of a floating-point format, and the `scale` [1] that all of them are multiplied by.

    What the formulas of optimizers need of a tensor it has too: its values in a format, and other values in place. It has no
    parts, for a scale follows from all values.

    >>> found = ScaledTensor.zeros(3, torch.float8_e4m3fn, torch.device("cpu")).copy_(torch.tensor([1.0, -4.0, 0.001]))
    >>> found.elements.tolist(), found.to(torch.float32).tolist()
    ([112.0, -448.0, 0.109375], [1.0, -4.0, 0.0009765625])
    """

    elements: Tensor
    scale: Tensor

    @classmethod
    def zeros(cls, size: int, dtype: torch.dtype, device: torch.device) -> ScaledTensor:
        """So many elements of 0."""
        return cls(torch.zeros(size, dtype=dtype, device=device), torch.ones(1, device=device))

    def __len__(self) -> int:
        return len(self.elements)

    def to(self, dtype: torch.dtype) -> Tensor:
        """The values [n]."""
        return (self.elements.float() * self.scale).to(dtype)

    def copy_(self, values: Tensor) -> ScaledTensor:
        """Take on other values [n]: the largest size becomes the format's largest number, and what is not finite NaN."""
        values, largest = values.float(), torch.finfo(self.elements.dtype).max
        encode = torch.full_like(self.scale, largest) / values.abs().amax().clamp(min=LEAST_AMAX)
        self.scale.copy_(1.0 / encode)
        self.elements.copy_((values * encode).clamp(-largest, largest))
        return self


MomentTensor = Tensor | BlockwiseMoment | ScaledTensor
WeightState = dict[str, Any]  # of a weight: its moments, and the steps that they have seen
GroupSettings = dict[str, Any]  # of weights that are updated alike, as torch.optim has them
# Elements that formulas take at once. On a CPU what is between two of their operations stays in its cache; a GPU is kept busy.
BLOCK_ELEMENTS, GPU_BLOCK_ELEMENTS = 2**15, 2**24


class FusedKernel(NamedTuple):
    """An optimizer of PyTorch's: the `fields` that it has, by our names, its `settings` by PyTorch's, and its kernel, which takes
    the weights [n] of a group, their gradients, state and settings. An optimizer of the table with other fields than these is
    another one, and runs by its formulas."""

    fields: frozenset[str]
    settings: Callable[[Mapping[str, float]], GroupSettings]
    update: Callable[[list[Tensor], list[Tensor], list[WeightState], GroupSettings], None]


def _update_adamw(
    weights: list[Tensor], gradients: list[Tensor], states: list[WeightState], settings: GroupSettings
) -> None:
    """The kernel of torch.optim.AdamW(fused=True)."""
    averages, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        weights, gradients, averages, squares, [], steps, amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
        **settings,
    )  # fmt: skip


FUSED_KERNELS: Mapping[str, FusedKernel] = {
    "adamw": FusedKernel(
        frozenset({"beta1", "beta2", "epsilon", "weight_decay"}),
        lambda v: {"beta1": v["beta1"], "beta2": v["beta2"], "eps": v["epsilon"], "weight_decay": v["weight_decay"]},
        _update_adamw,
    ),
}


class TorchOptimizer(ABC):
    """Groups of weights with their settings, `lr` among them, and the state of each weight, as torch.optim.Optimizer has them.

    It is not one: to make one loads torch._dynamo, a fifth of what it takes a rank to start.
    """

    def __init__(self, groups: Sequence[GroupSettings]) -> None:
        self.param_groups = list(groups)
        self.state: dict[Tensor, WeightState] = {}

    @abstractmethod
    def step(self) -> None:
        """Update every weight [n] from its gradient."""


class FusedOptimizer(TorchOptimizer):
    """An optimizer that PyTorch has a kernel for."""

    def __init__(self, groups: Sequence[GroupSettings], kernel: FusedKernel) -> None:
        super().__init__(groups)
        self.kernel = kernel

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            settings = {name: value for name, value in group.items() if name != "params"}
            weights = group["params"]
            self.kernel.update(weights, [w.grad for w in weights], [self.state[w] for w in weights], settings)


class FormulaOptimizer(TorchOptimizer):
    """An optimizer of the table, a block of elements at a time, in float32 at least. The `step` of a weight is on the CPU, for
    formulas take a number. `gradients` [n] take the place of those of weights, whose format they need not have."""

    def __init__(self, groups: Sequence[GroupSettings], optimizer: Optimizer) -> None:
        super().__init__(groups)
        self.optimizer = optimizer
        self.gradients: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        assert not self.optimizer.reduces_means, "a mean is no matter of blocks (train.parallel.means)"
        for group in self.param_groups:
            fields = {name: group[name] for name in self.optimizer.fields}
            for weight in group["params"]:
                state = self.state[weight]
                state["step"] += 1
                values = formula_values(fields, learning_rate=group["lr"], step=int(state["step"]))
                moments = {name: state[name] for name in self.optimizer.moments}
                self._update(values, {MASTER: weight, GRADIENT: self.gradients.get(weight, weight.grad), **moments})

    def _update(self, values: Any, tensors: Mapping[str, MomentTensor]) -> None:
        weight = tensors[MASTER]
        assert isinstance(weight, Tensor)
        format = at_least_fp32(weight.dtype)
        for block in _split_into_blocks(tensors, block_elements(weight)):
            fine = {name: part.to(format) for name, part in block.items()}
            for name, updated in self.optimizer.step(values, fine).items():
                block[name].copy_(updated)


def _split_into_blocks(tensors: Mapping[str, MomentTensor], size: int) -> Iterator[Mapping[str, MomentTensor]]:
    """Tensors [n] in blocks of so many elements; whole, where one has a scale for all of them."""
    divisible = {name: one for name, one in tensors.items() if not isinstance(one, ScaledTensor)}
    if len(divisible) < len(tensors):
        yield tensors
        return
    for start in range(0, len(divisible[MASTER]), size):
        yield {name: one[start : start + size] for name, one in divisible.items()}


def block_elements(weight: Tensor) -> int:
    """How many elements formulas take at once on a weight's device."""
    return BLOCK_ELEMENTS if weight.device.type == "cpu" else GPU_BLOCK_ELEMENTS


def build_torch_optimizer(
    name: str,
    matrices: Sequence[nn.Parameter],
    others: Sequence[nn.Parameter],
    fields: Mapping[str, float],
    formats: tuple[torch.dtype, torch.dtype] | None = None,
    *,
    scaled: bool = False,
    products: bool = False,
) -> TorchOptimizer:
    """The optimizer of a table's name over flat weights [n] of matrices and of all else, with the values of its fields.

    `formats` are those of its moments and of the moments of squares, but for moments that have their own; None: those of the
    weights. With `scaled` each moment of a weight in FP8 or fp16 has a scale. With `products` the weights are matrices of
    products, which an optimizer may update otherwise than all else.

    Matrices that one takes whole are updated in `run.parallel.whole_matrix_update`; one that takes means runs in
    `run.parallel.factored_update`. The state is there at once and not after the first step, so that memory is the same in every
    step. Raises `InputError` for an optimizer that is not known, or values that it does not have.
    """
    values, one = (
        get_optimizer(name).resolve_hyperparameters(fields),
        get_optimizer(name).for_weight(is_matrix=products),
    )
    values = {field: values[field] for field in one.fields}
    kernel = next((kernel for known, kernel in FUSED_KERNELS.items() if OPTIMIZERS[known] is one), None)
    kernel = kernel if kernel and kernel.fields == set(one.fields) else None
    moment_dtypes = {
        moment: formats[update.is_second_moment] if formats else None for moment, update in one.moments.items()
    }
    every = (*matrices, *others)
    if len({weight.dtype for weight in every} | ({*moment_dtypes.values()} - {None})) > 1:
        kernel = None  # PyTorch's take one format
    groups = []
    for weights, matrix in ((matrices, True), (others, False)):
        own = one.hyperparameters_for(values, matrix=matrix)
        groups += [{"params": list(weights), "lr": 0.0, **(kernel.settings(own) if kernel else own)}] if weights else []
    made = FusedOptimizer(groups, kernel) if kernel else FormulaOptimizer(groups, one)
    for weight in every:
        device = weight.device if kernel else "cpu"
        made.state[weight] = {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            **{m: _zero_moment(weight, update, moment_dtypes[m], scaled=scaled) for m, update in one.moments.items()},
        }
    return made


def _zero_moment(weight: Tensor, update: StateUpdate, dtype: torch.dtype | None, *, scaled: bool) -> MomentTensor:
    """A moment of a weight [n] as it is at first."""
    if update.format is None:
        if scaled and dtype in SHORT_OF_RANGE:
            return ScaledTensor.zeros(len(weight), dtype, weight.device)
        return torch.zeros_like(weight, dtype=dtype)
    return BlockwiseMoment.zeros(len(weight), update.format, weight.device)


def step_optimizer(optimizer: TorchOptimizer, gradients: Mapping[nn.Parameter, Tensor]) -> None:
    """Update weights [n] from their gradients, which are released afterwards."""
    if isinstance(optimizer, FormulaOptimizer):
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
    """The numbers of a format, and the limits between them, on a device."""
    numbers = get_dynamic_tree_format(format)
    return torch.from_numpy(numbers.values).to(device), torch.from_numpy(numbers.rounding_boundaries).to(device)


# Formats whose range moments do not fit in without a scale. (In bf16 and fp32 they do.)
SHORT_OF_RANGE = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float16})
# The least largest size that is brought to the format's largest number, so that scales stay finite: squares of small gradients
# are far below `values.quantization.MIN_AMAX`.
LEAST_AMAX = 2.0**-100
