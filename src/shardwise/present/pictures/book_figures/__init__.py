"""The data of the pictures: rooflines, communication against the batch, memory, scaling, pipelines, shardings.

Every number comes from the rules, from the derivation or from the estimate; `draw` draws what is made here.
"""

from shardwise.present.pictures.book_figures.communication_charts import Strategies, strategy_ratios, strategy_times
from shardwise.present.pictures.book_figures.layout_memory_chart import memory_chart
from shardwise.present.pictures.book_figures.roofline_charts import (
    attention_share_curves,
    block_chart,
    matmul_curves,
    roofline_chart,
)

__all__ = [
    "Strategies",
    "attention_share_curves",
    "block_chart",
    "matmul_curves",
    "memory_chart",
    "roofline_chart",
    "strategy_ratios",
    "strategy_times",
]
