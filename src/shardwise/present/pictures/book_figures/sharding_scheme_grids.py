"""The book's shardings of a layer: who holds what before, between and after its products, derived step by step."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.derive.sharded_einsum import derive_by_cases, shard_expression
from shardwise.present.draw.grids import GridChart
from shardwise.present.pictures.shard_holder_grids import shards_chart
from shardwise.present.pictures.sharded_product_steps import moments
from shardwise.sharding import Mesh, parse_expression

SIZES = {"B": 64, "D": 64, "F": 256}
# Both products of the book's MLP. Source: the book, "Training", its table of four schemes.
SCHEMES: Mapping[str, tuple[str, str]] = {
    "data parallelism": ("In[B_X, D] * Win[D, F] -> Tmp[B_X, F]", "Tmp[B_X, F] * Wout[F, D] -> Out[B_X, D]"),
    "FSDP": ("In[B_X, D] * Win[D_X, F] -> Tmp[B_X, F]", "Tmp[B_X, F] * Wout[F, D_X] -> Out[B_X, D]"),
    "tensor parallelism": ("In[B, D_Y] * Win[D, F_Y] -> Tmp[B, F_Y]", "Tmp[B, F_Y] * Wout[F_Y, D] -> Out[B, D_Y]"),
    "FSDP and tensor parallelism": (
        "In[B_X, D_Y] * Win[D_X, F_Y] -> Tmp[B_X, F_Y]", "Tmp[B_X, F_Y] * Wout[F_Y, D_X] -> Out[B_X, D_Y]",
    ),
}  # fmt: skip


def sharding_scheme(name: str, mesh: Mapping[str, int]) -> tuple[GridChart, GridChart]:
    """The two products of an MLP under a scheme of `SCHEMES`, each from its operands as they rest to its result."""
    first, second = (_product(f"{name}: {text}", text, Mesh.of(mesh)) for text in SCHEMES[name])
    return first, second


def _product(title: str, text: str, mesh: Mesh) -> GridChart:
    expression = parse_expression(text)
    made = shard_expression(expression, mesh, {dim: size for dim, size in SIZES.items() if dim in text})
    return shards_chart(title, moments(made, derive_by_cases(made)), made.mesh)
