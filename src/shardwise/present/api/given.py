"""What a caller gives, by name or by value: models, clusters, jobs, layouts, pins."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from shardwise.batch_size import NoiseScale
from shardwise.hardware import Cluster, default_precision, load_cluster, stack_names
from shardwise.layout import Layout
from shardwise.model import Architecture, Job, load_model
from shardwise.values import InputError, did_you_mean, parse_count, parse_quantity, raise_problems, run_all

Model = str | os.PathLike[str] | Architecture
Where = str | os.PathLike[str] | Cluster
Pins = str | Mapping[str, Any]
Noise = str | float | os.PathLike[str] | NoiseScale


def resolved(
    model: Model, cluster: Where, job: Job | None, stack: str | None, job_fields: Mapping[str, Any]
) -> tuple[Architecture, Cluster, Job]:
    """The values that names and fields stand for. Raises `InputError` with all that is wrong with them."""
    architecture, where, what = run_all(
        lambda: architecture_of(model),
        lambda: cluster_of(cluster, stack),
        lambda: job_of(job, job_fields, stack_of([cluster], stack)),
    )
    return architecture, where, what


def architecture_of(model: Model) -> Architecture:
    """The model: of the catalogue by name, of a config.json by path."""
    return model if isinstance(model, Architecture) else load_model(os.fspath(model))


def cluster_of(cluster: Where, stack: str | None) -> Cluster:
    """The cluster; one by name under a software stack, if it is given. Raises `InputError` for a stack beside a `Cluster`."""
    if not isinstance(cluster, Cluster):
        return load_cluster(os.fspath(cluster), stack=stack)
    if stack is not None:
        raise InputError(
            f"stack: found {stack!r} for a Cluster; the name of the cluster is required, or load_cluster(NAME, stack={stack!r})"
        )
    return cluster


def layout_of(layout: str | Layout | None) -> Layout:
    """The layout, or that of its text."""
    if layout is None:
        raise InputError(
            'layout: missing; a Layout or its text is required, such as "tp=8 fsdp=16 recompute=selective"'
        )
    return Layout.parse(layout) if isinstance(layout, str) else layout


def stack_of(clusters: Sequence[Where], stack: str | None) -> str | None:
    """The software stack that is named, or that of clusters that have one; None where neither is."""
    calibrations = [one.calibration for one in clusters if isinstance(one, Cluster)]
    named = {one.stack for one in calibrations if one is not None}
    return stack or (named.pop() if len(named) == 1 else None)


def job_of(job: Job | None, given: Mapping[str, Any], stack: str | None = None) -> Job:
    """The job with some of its fields replaced, or one of these fields alone, in the precision that is usual under a stack."""
    kinds = {field.name: str(field.type) for field in fields(Job)}
    strange = [name for name in given if name not in kinds]
    raise_problems(
        [f"job: no field {name!r}{did_you_mean(name, kinds)}; it has {', '.join(kinds)}" for name in strange]
    )
    values = {name: _number(value, name, kinds[name]) for name, value in given.items()}
    if job is not None:
        return replace(job, **values)
    missing = [name for name in ("global_batch_tokens", "seq_len") if name not in given]
    if missing:
        raise InputError(
            f"job: {' and '.join(missing)} missing; a Job or its fields are required, such as global_batch_tokens='4Mi', "
            "seq_len=8192"
        )
    return Job(**{"precision": _usual_precision(stack), **values})


def _usual_precision(stack: str | None) -> str:
    """That of a stack's users; what is wrong with its name is said where the cluster is loaded."""
    return default_precision(stack if stack in stack_names() else None)


def _number(value: Any, name: str, kind: str) -> Any:
    """A field's value; of a number its text as people write it."""
    if not isinstance(value, str) or kind.startswith("str") or not kind.startswith(("int", "float")):
        return value
    what = f"job: {name}"
    return parse_count(value, label=what) if kind.startswith("int") else parse_quantity(value, label=what, unit="")


def pins_of(given: Pins, what: str) -> Mapping[str, Any]:
    """What is asked for by key."""
    from shardwise.layout.choices import parse_pins

    return parse_pins(given.split(), what) if isinstance(given, str) else given
