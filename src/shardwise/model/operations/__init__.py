"""Kinds of operation: contract, map (elementwise, with or without a reduction), lookup, scatter, scan, route, carry, and
function of whole matrices.

Each kind knows three things: which shardings it needs and gives (`propagate_sharding`), its transpose (`gradients`), and what
it costs (`flops`; bytes are those of its operands). Layouts, costs and executors only ask these.
"""

from shardwise.model.operations.base import Carry, Dims, Operation, OperationSharding
from shardwise.model.operations.elementwise import Accumulate, Concatenate, ConcatenateGradient, Map
from shardwise.model.operations.indexing import Lookup, Route, RouteGradient, Scatter
from shardwise.model.operations.matmul_and_attention import (
    ATTENTION_OPERATIONS,
    Contract,
    MatrixFunction,
    Scan,
    ScanGradient,
)

__all__ = [
    "ATTENTION_OPERATIONS",
    "Accumulate",
    "Carry",
    "Concatenate",
    "ConcatenateGradient",
    "Contract",
    "Dims",
    "Lookup",
    "Map",
    "MatrixFunction",
    "Operation",
    "OperationSharding",
    "Route",
    "RouteGradient",
    "Scan",
    "ScanGradient",
    "Scatter",
]
