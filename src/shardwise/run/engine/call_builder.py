"""A kernel of PyTorch with what it reads and writes by name, and what a unit's calls are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.derive.low_precision_products import is_block_product
from shardwise.derive.sharded_program import CollectiveStep, ComputeStep
from shardwise.derive.sharded_unit import ShardedUnit
from shardwise.derive.tensor_specs import pad_vocabulary, weight_use_spec
from shardwise.model.architecture import Architecture
from shardwise.model.operations import Route
from shardwise.model.program import Role
from shardwise.run.engine.rank_coordinates import Rank
from shardwise.run.kernels.device_dispatch import at_least_fp32
from shardwise.run.kernels.matmul import ProductFormats, QuantizedMatmul
from shardwise.sharding.spec import Axes, Spec
from shardwise.step.instructions import UnitCollective
from shardwise.step.kernel_fusion import BATCH_DIMS

# What a call may read beside the tensors of the program: cosines and sines, and what queries see (both by parts of the sequence;
# in a ring of the block of each rank), a router's bias, what a loss adds to its gradient, whether a backward pass follows, and
# where gradients of weights go.
ANGLES, MASK, RING_MASKS, BALANCE_BIAS, PENALTY, TRAINS, GRADIENTS = (
    "@angles",
    "@sight",
    "@sights",
    "@balance",
    "@penalty",
    "@trains",
    "@gradients",
)
EXPERT_ROWS = "@rows"  # whose rows a rank has, where they are not those of its own tokens
ROUTER_STATISTICS = (
    "@routed"  # what a call may write beside them: the rows and the probabilities that each expert got, [2, E]
)

OutputTarget = tuple[
    Tensor | None, bool
]  # where a sum is written, if there is such a place, and whether it is added to what is there
NO_TARGET: OutputTarget = (None, False)


@dataclass(frozen=True, slots=True)
class KernelCall:
    """`writes` = kernel(*`reads`), by name.

    `over` has kernels that do the same and write over one of the operands, by its place; `into(target, *operands, add=...)`
    writes the result to a target, or adds it to what is there; `into_each(targets, *operands)` does so for several results, and
    gives them all. `is_view`: what it writes shares memory with what it reads.
    `never_compiled`: it is no kernel, and is compiled with none. `phase` is forward, recompute or backward. `results` are those
    of the operations that it stands for, whether or not it writes them; `traffic` the collective that it starts or waits for.
    """

    kernel: Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    phase: str = "forward"
    over: Mapping[int, Callable[..., Any]] = field(default_factory=dict)
    into: Callable[..., Any] | None = None
    into_each: Callable[..., Any] | None = None
    is_view: bool = False
    never_compiled: bool = False
    results: tuple[str, ...] = ()
    traffic: UnitCollective | None = None


class CallBuilder:
    """What the calls of one unit on one rank are made from; its activations are in `dtype`.

    A tensor goes by its name in the sharding in which it stays, and in another one by its name with that (`key`). `batch_parts`
    are the parts of the batch that are read: by key what it is, and the axes that split its sequences. `narrow`: what products
    with the unit's weights cast their operands to; None: nothing.
    """

    def __init__(
        self,
        unit: ShardedUnit,
        architecture: Architecture,
        rank: Rank,
        dtype: torch.dtype,
        narrow: ProductFormats | None = None,
    ) -> None:
        self.unit, self.architecture, self.rank, self.dtype, self.narrow = unit, architecture, rank, dtype, narrow
        self._moved: frozenset[str] | None = None
        self.batch_parts: dict[str, tuple[str, tuple[Axes, ...]]] = {}
        self.numerics, self.sizes = architecture.numerics, pad_vocabulary(architecture.dims, rank.mesh)
        routes = (one for one in unit.forward.program.operations if isinstance(one, Route))
        self.gates = next((one.outputs[0] for one in routes), "")

    def reduced_statistics(self) -> frozenset[str]:
        """The statistics of tokens that move between kernels, in either pass, and those whose gradients do."""
        if self._moved is None:
            steps = (
                step for steps in self.unit.phases().values() for step in steps if isinstance(step, CollectiveStep)
            )
            names = {one.tensor.name for one in steps if self._is_reduced(one)}
            self._moved = frozenset({*names, *(self.unit.tensors[name].gradient_of for name in names)})
        return self._moved

    def _is_reduced(self, step: CollectiveStep) -> bool:
        around = step.collective.before, step.collective.after
        before, after = (self.rank.sharding(spec) for spec in around)
        return step.tensor.dims == ("B", "T") and before != after

    def is_routed(self, *names: str) -> bool:
        """Whether any of these has the rows of experts."""
        return any(self.unit.tensors[name].role is Role.ROUTED for name in names)

    @property
    def statistics(self) -> torch.dtype:
        """The format of sums."""
        return at_least_fp32(self.dtype)

    def dtype_of(self, name: str) -> torch.dtype:
        """The format of a tensor: sums are kept finer."""
        return self.statistics if self.unit.tensors[name].role is Role.STATISTIC else self.dtype

    def key(self, name: str, spec: Spec) -> str:
        """What a tensor goes by in a sharding. Gradients of weights and scalars have one each."""
        tensor = self.unit.tensors.get(name)
        if tensor is None or not tensor.dims or tensor.role is Role.WEIGHT_GRADIENT:
            return name
        if tensor.role is Role.CONSTANT:
            return self.cut(name, spec.axes_of("T"))
        own, stays = self.rank.sharding(spec), self.rank.sharding(self._home_spec(name))
        return name if own == stays else f"{name} {own}"

    def _home_spec(self, name: str) -> Spec:
        """Of a weight that in which it is used; a use of its own may slice it further."""
        tensor = self.unit.tensors.get(name)
        if tensor is not None and tensor.role is Role.WEIGHT:
            return weight_use_spec(self.unit.family, tensor.dims)
        forward, backward = self.unit.forward.specs, self.unit.backward.specs
        return forward[name] if name in forward else backward[name]

    def cut(self, name: str, *axes: Axes) -> str:
        """The key of a part of the batch, whose sequences some axes split; of two parts where there are two kinds of axes."""
        split = tuple(self.rank.nontrivial_axes(each) for each in axes)
        key = " ".join([name, *("·".join(each) for each in split)]).rstrip()
        self.batch_parts[key] = name, split
        return key

    def rows(self, spec: Spec) -> str:
        """What says whose rows there are of routed tokens in a sharding: the router where they are its own."""
        own = self.rank.sharding(spec)
        experts, tokens = own.axes_of("E"), own.axes_of("T")
        is_own = not experts and tokens == self.rank.sharding(self._home_spec(self.gates)).axes_of("T")
        return self.gates if is_own else f"{EXPERT_ROWS} {'·'.join(experts)} {'·'.join(tokens)}"

    def with_tensor_keys(self, call: KernelCall, steps: Iterable[ComputeStep]) -> KernelCall:
        """A call of some steps, whose tensors go by the shardings in which the steps take and leave them."""
        keys: dict[str, str] = {}
        for step in steps:
            operands = zip(step.operation.operands, step.placed.inputs, strict=False)
            for name, spec in (*zip(step.operation.outputs, step.placed.outputs, strict=True), *operands):
                keys.setdefault(name, self.key(name, spec))
        reads, writes = (tuple(keys.get(name, name) for name in names) for names in (call.reads, call.writes))
        return replace(call, reads=reads, writes=writes)

    def quantized_matmul(self, step: ComputeStep) -> QuantizedMatmul | None:
        """A step's product of operands that are cast; None where they are not."""
        operation, tensors = step.operation, self.unit.tensors
        if self.narrow is None or not is_block_product(operation, tensors):
            return None
        left, right, result = (spec.dims for spec in (*step.placed.inputs, *step.placed.outputs))
        return self.narrow.product(left, right, result, [tensors[name] for name in operation.inputs])

    def local_sizes(self, step: ComputeStep) -> dict[str, int]:
        """This rank's part of every dim but those of tokens."""
        specs = (*step.placed.inputs, *step.placed.outputs)
        pairs = ((dim, axes) for spec in specs for dim, axes in zip(spec.dims, spec.axes, strict=True))
        return {dim: self.sizes[dim] // self.rank.mesh.size(axes) for dim, axes in pairs if dim not in BATCH_DIMS}
