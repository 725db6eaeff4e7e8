"""Shardwise: how to shard a large transformer, what it costs, what bounds it.

    import shardwise as sw

    plan = sw.plan("llama-3-70b", "h100:512", global_batch_tokens="4Mi", seq_len=8192)
    print(plan)

Plans: `plan`, `plan_clusters`, `plan_to_loss`, `sweep`, `explain`, `simulation`. Launches of frameworks: `export_plan`,
`read_launch`. Prices:
`estimate`, `memory`, `roofline`. The books: `rule`, `rules`. What `--json` prints: `json_schemas`. Each takes names and paths, or
the values that `load_model`, `load_cluster`, `Job` and `Layout.parse` give (`shardwise.present.api`). Names are loaded
when they are first used, so that `import shardwise` is fast and imports no NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.batch_size.noise_scale import NoiseScale
    from shardwise.batch_size.run_noise import RunNoise, run_noise
    from shardwise.book_formulas.named_rules import NamedRule, RuleValue
    from shardwise.book_formulas.rooflines import BlockRoofline, KernelRoofline
    from shardwise.book_formulas.rules import Rule, book_rules
    from shardwise.hardware.chips import Chip, load_chip
    from shardwise.hardware.cluster import Cluster
    from shardwise.hardware.cluster_loading import load_cluster
    from shardwise.layout.choices import Choices
    from shardwise.layout.layout import Layout
    from shardwise.model.architecture import Architecture
    from shardwise.model.job import Job
    from shardwise.model.load import load_model
    from shardwise.model.parameters_and_flops import num_params
    from shardwise.present.api.books import rule, rules
    from shardwise.present.api.costs import estimate, memory, roofline
    from shardwise.present.api.figures import Figure, figure
    from shardwise.present.api.launches import export_plan, read_launch
    from shardwise.present.api.plans import explain, plan, plan_clusters, plan_to_loss, simulation
    from shardwise.present.api.schemas import json_schemas
    from shardwise.present.api.sweeps import sweep
    from shardwise.price.estimate import Estimate
    from shardwise.price.problem import Limits
    from shardwise.price.reliability import Reliability
    from shardwise.price.simulation.result import Simulation
    from shardwise.price.training_run import Run, training_run
    from shardwise.search.compare_clusters import Comparison
    from shardwise.search.explain.explanation import Explanation
    from shardwise.search.layout_memory import LayoutMemory
    from shardwise.search.layout_plan import plan_layout
    from shardwise.search.loss_time import LossSearch
    from shardwise.search.plan import Plan
    from shardwise.search.plan_file import dump_plan, load_plan
    from shardwise.search.plan_sweep import Swept
    from shardwise.values.errors import (
        InputError,
        MissedLimitError,
        MissingValueError,
        NothingFitsError,
        ShardwiseError,
    )
    from shardwise.values.progress import Progress
    from shardwise.version import __version__

_HOME = {
    "Architecture": "shardwise.model.architecture",
    "BlockRoofline": "shardwise.book_formulas.rooflines",
    "Chip": "shardwise.hardware.chips",
    "Choices": "shardwise.layout.choices",
    "Cluster": "shardwise.hardware.cluster",
    "Comparison": "shardwise.search.compare_clusters",
    "Estimate": "shardwise.price.estimate",
    "Explanation": "shardwise.search.explain.explanation",
    "Figure": "shardwise.present.api.figures",
    "InputError": "shardwise.values.errors",
    "Job": "shardwise.model.job",
    "KernelRoofline": "shardwise.book_formulas.rooflines",
    "Layout": "shardwise.layout.layout",
    "LayoutMemory": "shardwise.search.layout_memory",
    "Limits": "shardwise.price.problem",
    "LossSearch": "shardwise.search.loss_time",
    "MissedLimitError": "shardwise.values.errors",
    "MissingValueError": "shardwise.values.errors",
    "NoiseScale": "shardwise.batch_size.noise_scale",
    "NothingFitsError": "shardwise.values.errors",
    "Reliability": "shardwise.price.reliability",
    "NamedRule": "shardwise.book_formulas.named_rules",
    "Plan": "shardwise.search.plan",
    "Progress": "shardwise.values.progress",
    "Rule": "shardwise.book_formulas.rules",
    "RuleValue": "shardwise.book_formulas.named_rules",
    "Run": "shardwise.price.training_run",
    "RunNoise": "shardwise.batch_size.run_noise",
    "ShardwiseError": "shardwise.values.errors",
    "Simulation": "shardwise.price.simulation.result",
    "Swept": "shardwise.search.plan_sweep",
    "__version__": "shardwise.version",
    "book_rules": "shardwise.book_formulas.rules",
    "dump_plan": "shardwise.search.plan_file",
    "estimate": "shardwise.present.api.costs",
    "explain": "shardwise.present.api.plans",
    "export_plan": "shardwise.present.api.launches",
    "figure": "shardwise.present.api.figures",
    "json_schemas": "shardwise.present.api.schemas",
    "load_chip": "shardwise.hardware.chips",
    "load_cluster": "shardwise.hardware.cluster_loading",
    "load_model": "shardwise.model.load",
    "load_plan": "shardwise.search.plan_file",
    "memory": "shardwise.present.api.costs",
    "num_params": "shardwise.model.parameters_and_flops",
    "plan": "shardwise.present.api.plans",
    "plan_clusters": "shardwise.present.api.plans",
    "plan_layout": "shardwise.search.layout_plan",
    "plan_to_loss": "shardwise.present.api.plans",
    "read_launch": "shardwise.present.api.launches",
    "roofline": "shardwise.present.api.costs",
    "rule": "shardwise.present.api.books",
    "rules": "shardwise.present.api.books",
    "run_noise": "shardwise.batch_size.run_noise",
    "simulation": "shardwise.present.api.plans",
    "sweep": "shardwise.present.api.sweeps",
    "training_run": "shardwise.price.training_run",
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
