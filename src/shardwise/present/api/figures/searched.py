"""Figures that plan: the best layout of every model on every number of nodes."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.present.api.sweeps import sweep
from shardwise.present.draw.heat_map import HeatMap
from shardwise.present.pictures.sweep_charts import heat_map

MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3-8b", "llama-3-70b")
NODES = (1, 2, 4, 8, 16, 32, 64)
# Source: the playbook, "Benchmarking thousands of configurations": 1M tokens, sequences of 4,096.
BATCH_TOKENS, SEQ_LEN = 2**20, 4096


def best_layouts(models: Sequence[str] = MODELS, num_nodes: Sequence[int] = NODES) -> tuple[HeatMap]:
    """The layout with the best predicted MFU at every point, H100s in nodes of eight."""
    devices = ",".join(str(8 * nodes) for nodes in num_nodes)
    over = (f"model={','.join(models)}", f"gpus={devices}")
    swept = sweep(models[0], "h100:8", over=over, global_batch_tokens=BATCH_TOKENS, seq_len=SEQ_LEN)
    return (heat_map(swept),)
