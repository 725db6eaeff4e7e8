"""A ladder of kernels as a value: what each rung computes with, moves and teaches. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One way to compute a ladder's function.

    `run` takes the ladder's operands and returns its results. `loaded_bytes` and `stored_bytes` are what its kernels ask of
    memory, before caches; `num_launches` how many kernels it launches. `lesson`: what the rung changes against the one before.
    """

    name: str
    lesson: str
    run: Callable[..., Any]
    loaded_bytes: float
    stored_bytes: float
    num_launches: int = 1
    uses_triton: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """A function computed in several ways.

    `make_operands(device)` returns its tensors; `reference` computes the results in float64 from them. `flops` are those of its
    formula, the same for all rungs; `product_flops` says that tensor cores have them. `least_bytes`: operands read and results
    written once.
    """

    name: str
    title: str
    sizes: str
    rungs: Sequence[Rung]
    make_operands: Callable[[str], tuple[Any, ...]]
    reference: Callable[..., Any]
    flops: float
    least_bytes: float
    product_flops: bool = False
