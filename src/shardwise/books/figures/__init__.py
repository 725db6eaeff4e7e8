"""The data of the pictures: rooflines, communication against the batch, memory, scaling, pipelines, shardings.

Every number comes from the rules, from the derivation or from the estimate; `draw` draws what is made here.
"""

from shardwise.books.figures.plans import memory_chart, stage_memories
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
]
