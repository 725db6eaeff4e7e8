"""The kinds of operation: contract, map (elementwise, with or without a reduction), join, lookup, scan, route, carry,
function of a matrix.

Each kind knows three things: which shardings it needs and gives (`place`), its transpose (`gradients`), and what it
costs (`flops`; bytes are those of its operands). Layouts, costs and executors only ask these.
"""

from shardwise.model.operations.attention import Scan, ScanGradient
from shardwise.model.operations.base import Dims, Operation, Placed
from shardwise.model.operations.carries import Carry
from shardwise.model.operations.contract import Contract
from shardwise.model.operations.joins import Join, Part
from shardwise.model.operations.lookups import Lookup, Scatter
from shardwise.model.operations.maps import Accumulate, Map
from shardwise.model.operations.of_matrix import OfMatrix
from shardwise.model.operations.routes import Route, RouteGradient

__all__ = [
    "Accumulate",
    "Carry",
    "Contract",
    "Dims",
    "Join",
    "Lookup",
    "Map",
    "OfMatrix",
    "Operation",
    "Part",
    "Placed",
    "Route",
    "RouteGradient",
    "Scan",
    "ScanGradient",
    "Scatter",
]
