"""`ServingLaunch`: what an engine is started with, as one value; made of a deployment, or read from a launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from shardwise.interop.serving.checkpoints import identify_checkpoint, name_checkpoint, weight_formats
from shardwise.model import Architecture
from shardwise.serve import BatchLimits, ServingDeployment, ServingFormats, ServingLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLaunch:
    """An engine's start: the checkpoint, its model (None: not of the catalogue), the layout, formats, limits, and further flags.

    `replicas` of the layout are instances. `pool` is "prefill" or "decode" for one pool of a disaggregated deployment. `flags`
    are options that no other field has, by the engine's names.
    """

    engine: str
    checkpoint: str
    architecture: Architecture | None
    layout: ServingLayout
    formats: ServingFormats = field(default_factory=ServingFormats)
    batch_limits: BatchLimits = field(default_factory=BatchLimits)
    max_model_len: int | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    pool: str | None = None

    @property
    def has_experts(self) -> bool:
        """True if any layer of the model routes tokens to experts."""
        return self.architecture is not None and any(
            layer.num_experts for layer in self.architecture.layer_architectures.values()
        )

    def differences(self, read_back: ServingLaunch) -> Iterator[tuple[str, Any, Any]]:
        """Yield the fields, by dotted name, in which another launch differs from this one, with both values.

        The share of drafted tokens that is accepted is a workload's and no option of an engine, so it is not compared.
        """
        for name in ("engine", "checkpoint", "architecture", "max_model_len", "flags", "pool"):
            if getattr(self, name) != getattr(read_back, name):
                yield name, getattr(self, name), getattr(read_back, name)
        yield from _differences("layout", _degrees(self.layout), _degrees(read_back.layout))
        yield from _differences("formats", _formats(self.formats), _formats(read_back.formats))
        yield from _differences("batch_limits", _limits(self.batch_limits), _limits(read_back.batch_limits))


def _degrees(layout: ServingLayout) -> Mapping[str, Any]:
    degrees = {item.name: getattr(layout, item.name) for item in fields(ServingLayout)}
    return {**degrees, "expert_tp": layout.expert_tp_degree}


def _formats(formats: ServingFormats) -> Mapping[str, Any]:
    return {**weight_formats(formats), "cache": formats.cache}


def _limits(limits: BatchLimits) -> Mapping[str, Any]:
    return {item.name: getattr(limits, item.name) for item in fields(BatchLimits) if item.name != "acceptance"}


def _differences(group: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name, value in ours.items():
        if value != theirs[name]:
            yield f"{group}.{name}", value, theirs[name]


def launch_of_deployment(deployment: ServingDeployment, pool: str | None = None) -> ServingLaunch:
    """Return the launch of a deployment, or of one of two pools. A checkpoint without a name is chosen by model and formats."""
    problem, layout = deployment.problem, deployment.layout
    assert isinstance(layout, ServingLayout), "pools are launched apart"
    name = deployment.checkpoint or name_checkpoint(problem.architecture, problem.formats)
    return ServingLaunch(
        engine=problem.engine, checkpoint=name, architecture=problem.architecture, layout=layout, pool=pool,
        formats=problem.formats, batch_limits=problem.batch_limits, max_model_len=deployment.max_model_len,
        flags=dict(deployment.flags),
    )  # fmt: skip


def with_known_model(launch: ServingLaunch, architecture: Architecture) -> ServingLaunch:
    """Return a launch whose checkpoint the user says the model of."""
    return replace(launch, architecture=architecture)


def checkpoint_architecture(name: str) -> Architecture | None:
    """Return the catalogue's model of a checkpoint, if any."""
    return identify_checkpoint(name).architecture
