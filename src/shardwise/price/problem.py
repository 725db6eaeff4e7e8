"""Problems, which are to be sharded and priced (a model, a cluster and a job), and how users write them.

A user gives names and paths of model and cluster, a job's fields as text, and values to replace. The command line and the Python
functions resolve their arguments here, so that both accept the same forms, fill in the same defaults, and report every problem at
once, each under the name that the user wrote (`argument_label`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from shardwise.hardware import (
    CONSTANTS,
    Chip,
    Cluster,
    MeasuredCluster,
    Stack,
    default_precision,
    get_stack,
    load_measured_cluster,
    stack_names,
    with_published_constants,
)
from shardwise.hardware.cluster import replace_chip
from shardwise.hardware.cluster_loading import apply_stack
from shardwise.hardware.stacks import default_stack
from shardwise.model import Architecture, Job, default_seq_len, load_model
from shardwise.model.adapters import move_adapters_to_model
from shardwise.model.job import usual_whole_batch
from shardwise.model.load import override_architecture
from shardwise.price.reliability import Reliability
from shardwise.price.roofline import loss_kind
from shardwise.values import (
    InputError,
    apply_overrides,
    argument_label,
    did_you_mean,
    parse_count,
    parse_overrides,
    parse_quantity,
    raise_problems,
    run_all,
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A model, a cluster and a job, for which a layout is searched or priced.

    >>> import shardwise as sw
    >>> job = sw.Job(global_batch_tokens=2**20, seq_len=4096)
    >>> problem = Problem(sw.load_model("llama-3-8b"), sw.load_cluster("h100:16"), job)
    >>> problem.cluster.num_devices, problem.job.num_seqs
    (16, 256)
    """

    architecture: Architecture
    cluster: Cluster
    job: Job

    def with_defaults(self) -> Problem:
        """Return the problem with the defaults of `with_problem_defaults` filled in."""
        return Problem(self.architecture, *with_problem_defaults(self.cluster, self.job))


def with_problem_defaults(cluster: Cluster, job: Job) -> tuple[Cluster, Job]:
    """Return the cluster and the job of a plan, with defaults filled in.

    A cluster without measurements is predicted under the typical stack of its chip, unless the job names a convention of
    overlap: then the plan is made by the bound of that convention. A host, or a chip of an unknown vendor, is also planned by
    the bound. The loss is the one with the least memory that the stack has.
    """
    stack = default_stack(cluster.chip) if cluster.calibration is None and job.overlap is None else None
    cluster = with_published_constants(cluster, stack) if stack else cluster
    return cluster, replace(job, loss=loss_kind(cluster, job))


ModelLike = str | os.PathLike[str] | Architecture
ClusterLike = str | os.PathLike[str] | Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemInputs:
    """Inputs that arguments stand for; `defaults` names what was left out and assumed: "global_batch_tokens", "seq_len"."""

    architecture: Architecture
    clusters: tuple[Cluster, ...]
    job: Job
    reliability: Reliability
    defaults: tuple[str, ...]

    @property
    def problem(self) -> Problem:
        """The problem on the first cluster."""
        return Problem(self.architecture, self.clusters[0], self.job)

    @property
    def default_names(self) -> tuple[str, ...]:
        """The names of the defaults in payloads: "seq_len", "batch_tokens"."""
        return tuple("batch_tokens" if name == "global_batch_tokens" else name for name in reversed(self.defaults))


def resolve_problem(
    model: ModelLike, clusters: Sequence[ClusterLike], job: Job | None = None, fields: Mapping[str, Any] | None = None, *,
    assume_stack: bool = True,
) -> ProblemInputs:  # fmt: skip
    """Return the problem of names and texts. `fields` are fields of a `Job`, and `stack` and `overrides`.

    Numbers may be texts ("4Mi", of the batch also "32Ki/device"). `overrides` are texts such as "chip.memory_bytes=96GB",
    of `model`, `job`, `chip` (those of all clusters) and `run`. A batch or sequence that is left out is the usual one of the
    model (`model.job`), and `defaults` says so. A cluster by name is predicted under `stack`, or under the typical stack of
    its chip, unless the job names a convention of overlap; without `assume_stack` only a named or measured one predicts, and
    prices are bounds otherwise. Raises `InputError` with all that is wrong.

    >>> inputs = resolve_problem("llama-3-8b", ["h100:64"], fields={"global_batch_tokens": "32Ki/device", "tokens": "1T"})
    >>> inputs.job.global_batch_tokens, inputs.job.seq_len, inputs.defaults
    (2097152, 4096, ('seq_len',))
    """
    values = dict(fields or {})
    stack_name, settings = values.pop("stack", None), values.pop("overrides", ())
    overrides = move_adapters_to_model(parse_overrides(settings))
    _require_distinct(clusters)
    make_job = partial(_resolve_job, clusters, job, values, overrides["job"], stack_name)
    architecture, known_job, stack, *loaded = run_all(
        lambda: _load_architecture(model),
        make_job,
        lambda: None if stack_name is None else get_stack(stack_name),
        *(partial(_load_cluster, cluster) for cluster in clusters),
    )
    architecture = override_architecture(architecture, overrides["model"])
    known_job = known_job or make_job(architecture)
    assert known_job is not None  # with the architecture no size is open
    resolved_job, defaults = known_job
    if stack is not None and resolved_job.overlap is not None:
        raise InputError(
            f"{argument_label('stack')}: found {stack.name} beside {argument_label('overlap')} {resolved_job.overlap}: a stack "
            "predicts how much communication is exposed, a convention of overlap gives a bound; leave out one of the two"
        )
    ready = run_all(
        *(
            partial(_cluster_as_planned, cluster, overrides["chip"], stack, resolved_job if assume_stack else None)
            for cluster in loaded
        )
    )
    reliability: Reliability = apply_overrides(Reliability(), overrides["run"], "run")
    return ProblemInputs(
        architecture=architecture, clusters=tuple(ready), job=resolved_job, reliability=reliability, defaults=defaults
    )


def _require_distinct(clusters: Sequence[ClusterLike]) -> None:
    names = [cluster.strip() for cluster in clusters if isinstance(cluster, str)]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InputError(f"cluster: found {', '.join(repeated)} more than once; each cluster once is required")


def _load_architecture(model: ModelLike) -> Architecture:
    return model if isinstance(model, Architecture) else load_model(os.fspath(model))


def _load_cluster(cluster: ClusterLike) -> MeasuredCluster | Cluster:
    return cluster if isinstance(cluster, Cluster) else load_measured_cluster(os.fspath(cluster).strip())


def _cluster_as_planned(
    cluster: MeasuredCluster | Cluster, changes: Mapping[str, str], stack: Stack | None, job: Job | None
) -> Cluster:
    """Return the cluster with `chip.*` overrides applied; for a job under the typical stack of its chip, if no other is known.

    A fraction of a peak that is set replaces the measured one.
    """
    if isinstance(cluster, Cluster):
        if stack is not None:
            raise InputError(
                f"stack: found {stack.name!r} for a Cluster; the name of the cluster is required, or "
                f"load_cluster(NAME, stack={stack.name!r})"
            )
        return replace(cluster, chip=_changed_chip(cluster.chip, changes)) if changes else cluster
    nominal = replace_chip(cluster.nominal, _changed_chip(cluster.nominal.chip, changes))
    planned = apply_stack(cluster._replace(nominal=nominal), stack)
    if job is not None:
        planned, _ = with_problem_defaults(planned, job)
    calibration = planned.calibration
    fractions = {name: getattr(nominal.chip, name) for name in changes if name in CONSTANTS}
    if calibration is None or not fractions:
        return planned
    names = ", ".join(f"chip.{name}" for name in fractions)
    measured = replace(
        calibration,
        constants={**calibration.constants, **fractions},
        source=f"{calibration.source}; {names} set by hand",
    )
    return replace(planned, calibration=measured)


def _changed_chip(chip: Chip, changes: Mapping[str, str]) -> Chip:
    """Return the chip with the user's values: they have no other source, and a user's price not the catalogue's date."""
    changed: Chip = apply_overrides(chip, changes, "chip")
    date = chip.price_date if "price_usd_per_hour" not in changes else None
    date = changed.price_date if "price_date" in changes else date
    sources = {name: "set by hand" for name in changes if name != "sources"}
    return replace(changed, price_date=date, sources={**chip.sources, **sources})


def _resolve_job(
    clusters: Sequence[ClusterLike], job: Job | None, values: Mapping[str, Any], overrides: Mapping[str, str],
    stack: str | None, architecture: Architecture | None = None,
) -> tuple[Job, tuple[str, ...]] | None:  # fmt: skip
    """Return the job, and the names of the fields that are assumed.

    Without the architecture return None if a size is left out, which is then the usual one of the model; all other problems of
    the job are reported all the same.
    """
    parsed = _parse_fields(values, clusters)
    if job is not None:
        changed: Job = apply_overrides(replace(job, **parsed), overrides, "job")
        return changed, ()
    sizes = ("global_batch_tokens", "seq_len")
    defaults = tuple(name for name in sizes if parsed.get(name) is None and name not in overrides)
    overridden = {name: parse_count(overrides[name], label=f"--set job.{name}") for name in sizes if name in overrides}
    job_fields = {"precision": _usual_precision(clusters, stack), **_drop_none(parsed), **overridden}
    if defaults and architecture is None:
        if "seq_len" in job_fields:  # a batch of one sequence shows the job's other problems
            apply_overrides(Job(**{"global_batch_tokens": job_fields["seq_len"], **job_fields}), overrides, "job")
        return None
    if architecture is not None:
        seq_len = job_fields.setdefault("seq_len", default_seq_len(architecture))
        job_fields.setdefault("global_batch_tokens", usual_whole_batch(architecture, seq_len))
    resolved: Job = apply_overrides(Job(**job_fields), overrides, "job")
    return resolved, defaults


def _parse_fields(values: Mapping[str, Any], clusters: Sequence[ClusterLike]) -> dict[str, Any]:
    """Return the fields of a job with numbers parsed. Raises `InputError` with all that is wrong."""
    kinds = {field.name: str(field.type) for field in fields(Job)}
    raise_problems(
        [
            f"job: no field {name!r}{did_you_mean(name, kinds)}; it has {', '.join(kinds)}"
            for name in values
            if name not in kinds
        ]
    )
    parsed = run_all(*(partial(_parse_field, name, value, kinds[name], clusters) for name, value in values.items()))
    return dict(zip(values, parsed, strict=True))


def _drop_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _usual_precision(clusters: Sequence[ClusterLike], stack: str | None) -> str:
    """Return the precision of a stack's users on the clusters' chips; the stack is the named one, or that of clusters that have
    one."""
    calibrations = [cluster.calibration for cluster in clusters if isinstance(cluster, Cluster)]
    names = {calibration.stack for calibration in calibrations if calibration is not None}
    stack = stack or (names.pop() if len(names) == 1 else None)
    return default_precision(stack if stack in stack_names() else None, _chips_of(clusters))


def _chips_of(clusters: Iterable[ClusterLike]) -> Iterator[Chip]:
    """Yield the chips of the clusters that can be loaded; what is wrong with the others is reported where they are needed."""
    for cluster in clusters:
        with suppress(InputError):
            loaded = _load_cluster(cluster)
            yield loaded.chip if isinstance(loaded, Cluster) else loaded.nominal.chip


def _parse_field(name: str, value: Any, kind: str, clusters: Sequence[ClusterLike]) -> Any:
    """Return the value of a job's field; a number may be a text as people write it."""
    label = argument_label(name, f"job: {name}")
    if not isinstance(value, str) or kind.startswith("str") or not kind.startswith(("int", "float")):
        return value
    if name == "global_batch_tokens":
        return _parse_batch_tokens(value, clusters, label)
    return parse_count(value, label=label) if kind.startswith("int") else parse_quantity(value, label=label, unit="")


def _parse_batch_tokens(text: str, clusters: Sequence[ClusterLike], label: str) -> int:
    """Return the tokens of a global batch, written as such or per device ("32Ki/device")."""
    number, slash, unit = text.partition("/")
    if not slash:
        return parse_count(text, label=label)
    if unit.strip() != "device":
        raise InputError(f"{label}: found {text!r}; tokens, or tokens per device such as 32Ki/device, are required")
    sizes = {_nominal_size(cluster) for cluster in clusters}
    if len(sizes) > 1:
        raise InputError(
            f"{label}: found {text!r} for clusters of {', '.join(f'{size:,}' for size in sorted(sizes))} devices, which "
            "would have other batches; tokens of one global batch are required"
        )
    return parse_count(number, label=label) * sizes.pop()


def _nominal_size(cluster: ClusterLike) -> int:
    loaded = _load_cluster(cluster)
    return loaded.num_devices if isinstance(loaded, Cluster) else loaded.nominal.num_devices
