"""The optimizer's program: AdamW on a master copy, then the weights that the next step uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardwise.model.operations import Map
from shardwise.model.program import Program, ProgramBuilder, Role

STATE = ("master", "first", "second")


def update_program(weights: Mapping[str, tuple[str, ...]], gradients: Mapping[str, str]) -> Program:
    """AdamW for `weights` (name -> dims), whose gradients have the names in `gradients`.

    For a weight w it reads the gradient and `w.master`, `w.first`, `w.second`, and defines the same with an appended
    prime, and `w'`. Source: Loshchilov & Hutter 2019, algorithm 2.
    """
    builder = ProgramBuilder()
    outputs: list[str] = []
    for name, dims in weights.items():
        outputs += _adamw(builder, name, dims, gradients[name])
    return builder.build(outputs)


def _adamw(builder: ProgramBuilder, name: str, dims: tuple[str, ...], gradient: str) -> Iterable[str]:
    grad = builder.input(gradient, dims, Role.WEIGHT_GRADIENT)
    master, first, second = (builder.input(f"{name}.{part}", dims, Role.STATE) for part in STATE)
    new_first = _map(builder, "adamw_first", (first, grad), f"{first}'", dims, Role.STATE)
    new_second = _map(builder, "adamw_second", (second, grad), f"{second}'", dims, Role.STATE)
    new_master = _map(builder, "adamw_master", (master, new_first, new_second), f"{master}'", dims, Role.STATE)
    weight = _map(builder, "identity", (new_master,), f"{name}'", dims, Role.WEIGHT)
    return weight, new_master, new_first, new_second


def _map(
    builder: ProgramBuilder, function: str, inputs: tuple[str, ...], name: str, dims: tuple[str, ...], role: Role
) -> str:
    return builder.add(Map(inputs, (builder.tensor(name, dims, role),), function))
