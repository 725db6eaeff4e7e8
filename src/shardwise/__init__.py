"""Shardwise: how to shard a large transformer, what it costs, what bounds it.

    import shardwise as sw

    plan = sw.plan("llama-3-70b", "h100:512", global_batch_tokens="4Mi", seq_len=8192)
    print(plan)

Plans: `plan`, `plan_clusters`, `plan_to_loss`, `sweep`, `explain`, `simulation`. Launches of frameworks: `export_plan`,
`read_launch`. Prices:
`estimate`, `memory`, `roofline`. The books: `rule`, `rules`. What `--json` prints: `json_schemas`. Each takes names and paths, or
the values that `load_model`, `load_cluster`, `Job` and `Layout.parse` give (`shardwise.api`). Names are loaded when they are
first used, so that `import shardwise` is fast and imports no NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.api.books import rule, rules
    from shardwise.api.costs import estimate, memory, roofline
    from shardwise.api.figures import Figure, figure
    from shardwise.api.launches import export_plan, read_launch
    from shardwise.api.plans import explain, plan, plan_clusters, plan_to_loss, simulation
    from shardwise.api.schemas import json_schemas
    from shardwise.api.sweeps import sweep
    from shardwise.batch.noise_scale import NoiseScale
    from shardwise.books.named_rules import NamedRule, RuleValue
    from shardwise.books.roofline import BlockRoofline, KernelRoofline
    from shardwise.books.rules import Rule, book_rules
    from shardwise.cluster.chip import Chip
    from shardwise.cluster.chips import load_chip
    from shardwise.cluster.cluster import Cluster
    from shardwise.cluster.load import load_cluster
    from shardwise.cost.estimate import Estimate
    from shardwise.cost.reliability import Reliability
    from shardwise.cost.run import Run, training_run
    from shardwise.errors import InputError, MissedLimitError, MissingValueError, NothingFitsError, ShardwiseError
    from shardwise.job import Job
    from shardwise.layout.layout import Layout
    from shardwise.model.architecture import Architecture
    from shardwise.model.counts import num_params
    from shardwise.model.load import load_model
    from shardwise.planning.codec import dump_plan, load_plan
    from shardwise.planning.compare import Comparison, Limits
    from shardwise.planning.explain import Explanation
    from shardwise.planning.memory import LayoutMemory
    from shardwise.planning.plan import Plan, plan_layout
    from shardwise.planning.run_noise import RunNoise, run_noise
    from shardwise.progress import Progress
    from shardwise.search.choices import Choices
    from shardwise.search.sweep.points import Swept
    from shardwise.search.to_loss.loss_points import LossSearch
    from shardwise.simulate.result import Simulation
    from shardwise.version import __version__

_HOME = {
    "Architecture": "shardwise.model.architecture",
    "BlockRoofline": "shardwise.books.roofline",
    "Chip": "shardwise.cluster.chip",
    "Choices": "shardwise.search.choices",
    "Cluster": "shardwise.cluster.cluster",
    "Comparison": "shardwise.planning.compare",
    "Estimate": "shardwise.cost.estimate",
    "Explanation": "shardwise.planning.explain",
    "Figure": "shardwise.api.figures",
    "InputError": "shardwise.errors",
    "Job": "shardwise.job",
    "KernelRoofline": "shardwise.books.roofline",
    "Layout": "shardwise.layout.layout",
    "LayoutMemory": "shardwise.planning.memory",
    "Limits": "shardwise.planning.compare",
    "LossSearch": "shardwise.search.to_loss.loss_points",
    "MissedLimitError": "shardwise.errors",
    "MissingValueError": "shardwise.errors",
    "NoiseScale": "shardwise.batch.noise_scale",
    "NothingFitsError": "shardwise.errors",
    "Reliability": "shardwise.cost.reliability",
    "NamedRule": "shardwise.books.named_rules",
    "Plan": "shardwise.planning.plan",
    "Progress": "shardwise.progress",
    "Rule": "shardwise.books.rules",
    "RuleValue": "shardwise.books.named_rules",
    "Run": "shardwise.cost.run",
    "RunNoise": "shardwise.planning.run_noise",
    "ShardwiseError": "shardwise.errors",
    "Simulation": "shardwise.simulate.result",
    "Swept": "shardwise.search.sweep.points",
    "__version__": "shardwise.version",
    "book_rules": "shardwise.books.rules",
    "dump_plan": "shardwise.planning.codec",
    "estimate": "shardwise.api.costs",
    "explain": "shardwise.api.plans",
    "export_plan": "shardwise.api.launches",
    "figure": "shardwise.api.figures",
    "json_schemas": "shardwise.api.schemas",
    "load_chip": "shardwise.cluster.chips",
    "load_cluster": "shardwise.cluster.load",
    "load_model": "shardwise.model.load",
    "load_plan": "shardwise.planning.codec",
    "memory": "shardwise.api.costs",
    "num_params": "shardwise.model.counts",
    "plan": "shardwise.api.plans",
    "plan_clusters": "shardwise.api.plans",
    "plan_layout": "shardwise.planning.plan",
    "plan_to_loss": "shardwise.api.plans",
    "read_launch": "shardwise.api.launches",
    "roofline": "shardwise.api.costs",
    "rule": "shardwise.api.books",
    "rules": "shardwise.api.books",
    "run_noise": "shardwise.planning.run_noise",
    "simulation": "shardwise.api.plans",
    "sweep": "shardwise.api.sweeps",
    "training_run": "shardwise.cost.run",
}

__all__ = [
    "Architecture",
    "BlockRoofline",
    "Chip",
    "Choices",
    "Cluster",
    "Comparison",
    "Estimate",
    "Explanation",
    "Figure",
    "InputError",
    "Job",
    "KernelRoofline",
    "Layout",
    "LayoutMemory",
    "Limits",
    "LossSearch",
    "MissedLimitError",
    "MissingValueError",
    "NamedRule",
    "NoiseScale",
    "NothingFitsError",
    "Plan",
    "Progress",
    "Reliability",
    "Rule",
    "RuleValue",
    "Run",
    "RunNoise",
    "ShardwiseError",
    "Simulation",
    "Swept",
    "__version__",
    "book_rules",
    "dump_plan",
    "estimate",
    "explain",
    "export_plan",
    "figure",
    "json_schemas",
    "load_chip",
    "load_cluster",
    "load_model",
    "load_plan",
    "memory",
    "num_params",
    "plan",
    "plan_clusters",
    "plan_layout",
    "plan_to_loss",
    "read_launch",
    "roofline",
    "rule",
    "rules",
    "run_noise",
    "simulation",
    "sweep",
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
