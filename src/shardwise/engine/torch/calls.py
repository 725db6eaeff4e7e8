"""A kernel of PyTorch with what it reads and writes by name, and what a unit's calls are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.derive.derivation import Unit
from shardwise.derive.walk import Compute
from shardwise.engine.torch.functions import at_least_fp32
from shardwise.lowering.kernels import BATCH_DIMS
from shardwise.model.architecture import Architecture
from shardwise.model.operations import Route
from shardwise.model.program import Role
from shardwise.sharding.mesh import Mesh

# What a call may read beside the tensors of the program: cosines and sines, what queries see, a router's bias, what a loss
# adds to its gradient, whether a backward pass follows, and where gradients of weights go.
ANGLES, SIGHT, BALANCE_BIAS, PENALTY, TRAINS, GRADIENTS = (
    "@angles",
    "@sight",
    "@balance",
    "@penalty",
    "@trains",
    "@gradients",
)
ROUTED = "@routed"  # what a call may write beside them: the rows and the probabilities that each expert got, [2, E]


@dataclass(frozen=True, slots=True)
class Call:
    """`writes` = kernel(*`reads`), by name.

    `over` has kernels that do the same and write over one of the operands, by its place; `into(target, *operands, add=...)`
    writes the result to a target, or adds it to what is there. `is_view`: what it writes shares memory with what it reads.
    `phase` is forward, recompute or backward.
    """

    kernel: Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    phase: str = "forward"
    over: Mapping[int, Callable[..., Any]] = field(default_factory=dict)
    into: Callable[..., Any] | None = None
    is_view: bool = False


class Calls:
    """What the calls of one unit on one rank of a mesh are made from; its activations are in `dtype`."""

    def __init__(self, unit: Unit, architecture: Architecture, mesh: Mesh, dtype: torch.dtype) -> None:
        self.unit, self.architecture, self.mesh, self.dtype = unit, architecture, mesh, dtype
        self.numerics, self.sizes = architecture.numerics, architecture.dims
        routes = (one for one in unit.forward.program.operations if isinstance(one, Route))
        self.gates = next((one.outputs[0] for one in routes), "")

    def is_routed(self, *names: str) -> bool:
        """Whether any of these has the rows of experts."""
        return any(self.unit.tensors[name].role is Role.ROUTED for name in names)

    def format_of(self, name: str) -> torch.dtype:
        """The format of a tensor: sums are kept finer."""
        return at_least_fp32(self.dtype) if self.unit.tensors[name].role is Role.STATISTIC else self.dtype

    def local_sizes(self, step: Compute) -> dict[str, int]:
        """This rank's part of every dim but those of tokens."""
        specs = (*step.placed.inputs, *step.placed.outputs)
        pairs = ((dim, axes) for spec in specs for dim, axes in zip(spec.dims, spec.axes, strict=True))
        return {dim: self.sizes[dim] // self.mesh.size(axes) for dim, axes in pairs if dim not in BATCH_DIMS}
