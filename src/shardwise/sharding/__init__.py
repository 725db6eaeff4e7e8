"""Named-axis shardings, as text and as arithmetic: parse them, reshard them, and find the cheapest sharded matmul.

`A[I_X, J_Y]{U_Z}`: the array A has dims I and J, I is split over the mesh axis X and J over Y, and each device along Z holds
a partial sum. The notation is the scaling book's (S2, "Sharded matrices"). Entry points: `parse_tensor`, `Spec`, `Mesh`,
`reshard`, `contract`, and `matmul_search`. Imports `values` alone, neither NumPy nor a framework, and no prices: these are
passed in.
"""

from shardwise.sharding.collectives import Collective, transpose_collective, transpose_contraction
from shardwise.sharding.contraction import Contraction, contract
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.notation import parse_expression, parse_tensor
from shardwise.sharding.resharding import reshard
from shardwise.sharding.spec import Spec

__all__ = [
    "Collective",
    "Contraction",
    "Mesh",
    "Spec",
    "contract",
    "parse_expression",
    "parse_tensor",
    "reshard",
    "transpose_collective",
    "transpose_contraction",
]
