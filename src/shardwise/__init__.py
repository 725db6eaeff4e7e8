"""Shardwise: how to shard a large transformer, what it costs, what bounds it.

    import shardwise as sw

    sw.plan(sw.load_model("llama-3-70b"), sw.load_cluster("h100:512"), sw.Job(global_batch_tokens=2**22, seq_len=8192))

Names are loaded when they are first used, so that `import shardwise` is fast and imports no NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.cluster.chip import Chip
    from shardwise.cluster.chips import load_chip
    from shardwise.cluster.cluster import Cluster
    from shardwise.cluster.load import load_cluster
    from shardwise.cost.estimate import Estimate, estimate
    from shardwise.cost.operations import Operations
    from shardwise.cost.rules import book_rules
    from shardwise.cost.run import Run, training_run
    from shardwise.errors import InputError, MissedLimitError, NothingFitsError, ShardwiseError
    from shardwise.job import Job
    from shardwise.layout.layout import Layout
    from shardwise.model.architecture import Architecture
    from shardwise.model.counts import num_params
    from shardwise.model.load import load_model
    from shardwise.planning.codec import dump_plan, load_plan
    from shardwise.planning.compare import Limits
    from shardwise.planning.plan import Plan, plan_layout
    from shardwise.search.clusters import plan_clusters
    from shardwise.search.plan import plan
    from shardwise.version import __version__

_HOME = {
    "__version__": "shardwise.version",
    "Architecture": "shardwise.model.architecture",
    "Chip": "shardwise.cluster.chip",
    "Cluster": "shardwise.cluster.cluster",
    "Estimate": "shardwise.cost.estimate",
    "InputError": "shardwise.errors",
    "Job": "shardwise.job",
    "Layout": "shardwise.layout.layout",
    "Limits": "shardwise.planning.compare",
    "MissedLimitError": "shardwise.errors",
    "NothingFitsError": "shardwise.errors",
    "Operations": "shardwise.cost.operations",
    "Plan": "shardwise.planning.plan",
    "Run": "shardwise.cost.run",
    "ShardwiseError": "shardwise.errors",
    "book_rules": "shardwise.cost.rules",
    "dump_plan": "shardwise.planning.codec",
    "estimate": "shardwise.cost.estimate",
    "load_chip": "shardwise.cluster.chips",
    "load_cluster": "shardwise.cluster.load",
    "load_model": "shardwise.model.load",
    "load_plan": "shardwise.planning.codec",
    "num_params": "shardwise.model.counts",
    "plan": "shardwise.search.plan",
    "plan_clusters": "shardwise.search.clusters",
    "plan_layout": "shardwise.planning.plan",
    "training_run": "shardwise.cost.run",
}

__all__ = [
    "Architecture",
    "Chip",
    "Cluster",
    "Estimate",
    "InputError",
    "Job",
    "Layout",
    "Limits",
    "MissedLimitError",
    "NothingFitsError",
    "Operations",
    "Plan",
    "Run",
    "ShardwiseError",
    "__version__",
    "book_rules",
    "dump_plan",
    "estimate",
    "load_chip",
    "load_cluster",
    "load_model",
    "load_plan",
    "num_params",
    "plan",
    "plan_clusters",
    "plan_layout",
    "training_run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
