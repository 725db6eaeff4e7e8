"""A deployment: a serving problem, the layout that answers it, and what the engine's launch says beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.serve.pooled_layout import PooledLayout
from shardwise.serve.serving_layout import ServingLayout
from shardwise.serve.serving_problem import BatchLimits, ServingProblem
from shardwise.values import raise_problems

# A value of an option: text, number, truth value, or JSON. Nested values are the engine's.
FlagValue = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingDeployment:
    """A model as an engine is started with it: the value that launches are written from and read into.

    `checkpoint` is the folder or the name on the Hugging Face hub that the engine loads (None: that of the catalogue's model).
    `max_model_len` is the largest number of input and output tokens of a request (None: what the checkpoint says). `flags` are
    further options of the engine, by its own names, which are written as they are. Where the layout is of two pools, both have
    the problem's batch limits, or the decode pool has `decode_limits`.

    >>> import shardwise as sw
    >>> from shardwise.serve import Workload
    >>> problem = ServingProblem(
    ...     architecture=sw.load_model("qwen3-32b"), cluster=sw.load_cluster("h100:8"),
    ...     workload=Workload(isl=2000, osl=500, concurrency=64),
    ... )
    >>> deployment = ServingDeployment(problem=problem, layout=ServingLayout(tp=4, replicas=2), max_model_len=8192)
    >>> deployment.layout.num_devices, deployment.problem.engine
    (8, 'vllm')
    """

    problem: ServingProblem
    layout: ServingLayout | PooledLayout
    checkpoint: str | None = None
    max_model_len: int | None = None
    flags: Mapping[str, FlagValue] = field(default_factory=dict)
    decode_limits: BatchLimits | None = None

    def __post_init__(self) -> None:
        workload, problems = self.problem.workload, []
        if self.decode_limits is not None and not isinstance(self.layout, PooledLayout):
            problems.append("decode_limits: found limits of a decode pool; a layout of two pools is required, or none")
        if self.max_model_len is not None and self.max_model_len < workload.total_tokens:
            problems.append(
                f"max_model_len is {self.max_model_len!r}; at least isl + osl = {workload.total_tokens} tokens are required"
            )
        if self.layout.num_devices > self.problem.cluster.num_devices:
            problems.append(
                f"layout: {self.layout} takes {self.layout.num_devices} devices; at most the {self.problem.cluster.num_devices} "
                f"of {self.problem.cluster.name} are required"
            )
        raise_problems(problems)

    @property
    def pools(self) -> Mapping[str, ServingDeployment]:
        """Deployments of each pool by name; none where the instances do both."""
        if not isinstance(self.layout, PooledLayout):
            return {}
        limits = {"prefill": self.problem.batch_limits, "decode": self.decode_limits or self.problem.batch_limits}
        return {
            name: replace(
                self, layout=layout, problem=replace(self.problem, batch_limits=limits[name]), decode_limits=None
            )
            for name, layout in self.layout.pools.items()
        }
