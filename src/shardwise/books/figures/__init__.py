"""The data of the pictures: rooflines, communication against the batch, memory of layouts, utilisation by model and nodes.

Every number comes from the rules or from the estimate; `lines`, `bars` and `heat_map` of `draw` draw what is made here.
"""

from shardwise.books.figures.plans import memory_chart, stage_memories, utilisation_map
from shardwise.books.figures.rooflines import attention_share_curves, block_chart, matmul_curves, roofline_chart
from shardwise.books.figures.strategies import Strategies, strategy_ratios, strategy_times

__all__ = [
    "Strategies",
    "attention_share_curves",
    "block_chart",
    "matmul_curves",
    "memory_chart",
    "roofline_chart",
    "stage_memories",
    "strategy_ratios",
    "strategy_times",
    "utilisation_map",
]
