"""The optimizer's program: its state after a step, then the weights that the next step uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwise.model.operations import Map
from shardwise.model.program import Program, ProgramBuilder, Role
from shardwise.optimizer.optimizer import GRADIENT, MASTER, Optimizer
from shardwise.optimizer.table import optimizer_named


def update_program(weights: Mapping[str, tuple[str, ...]], gradients: Mapping[str, str], optimizer: str) -> Program:
    """The update of `weights` (name -> dims), whose gradients have the names in `gradients`.

    For a weight w it reads the gradient and each tensor of the optimizer's state (`w.master`, ...), and defines the same with an
    appended prime, and `w'`. Raises `InputError` for an optimizer that is not known.
    """
    builder, one = ProgramBuilder(), optimizer_named(optimizer)
    outputs: list[str] = []
    for name, dims in weights.items():
        builder.input(gradients[name], dims, Role.WEIGHT_GRADIENT)
        outputs += _update(builder, optimizer, one, name, dims, gradients[name])
    return builder.build(outputs)


def _update(
    builder: ProgramBuilder, optimizer: str, one: Optimizer, name: str, dims: tuple[str, ...], gradient: str
) -> Iterator[str]:
    found = {part: builder.input(f"{name}.{part}", dims, Role.STATE) for part in one.state} | {GRADIENT: gradient}
    for part, update in one.updates.items():
        reads = tuple(found[read] for read in update.reads)
        found[f"{part}'"] = _map(builder, f"{optimizer}.{part}", reads, f"{name}.{part}'", dims, Role.STATE)
    yield _map(builder, "identity", (found[f"{MASTER}'"],), f"{name}'", dims, Role.WEIGHT)
    yield from (found[f"{part}'"] for part in one.state)


def _map(
    builder: ProgramBuilder, function: str, inputs: tuple[str, ...], name: str, dims: tuple[str, ...], role: Role
) -> str:
    return builder.add(Map(inputs, (builder.tensor(name, dims, role),), function))
