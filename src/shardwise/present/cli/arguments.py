"""The arguments that verbs share, and the values they stand for."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shardwise.values import InputError, apply_overrides, parse_count, parse_overrides, parse_quantity, run_all

if TYPE_CHECKING:
    from shardwise.hardware import Chip, Cluster, MeasuredCluster, Stack
    from shardwise.layout import Layout
    from shardwise.model import Architecture, Job
    from shardwise.values import Parser
    from shardwise.values.argument_parser import ArgumentGroup

MODEL = "a model of the catalogue, such as llama-3-70b, or a Hugging Face config.json"
PLAN = "a file that `shardwise plan --out` wrote"


def layout_help() -> str:
    """What a layout on the command line may look like."""
    from shardwise.model import POLICY_FORMS, policy_names
    from shardwise.pipeline.registry import schedule_names

    return (
        'such as "tp=8 pp=4 fsdp=16 recompute=selective"; recompute is one of '
        f"{', '.join((*policy_names(), *POLICY_FORMS))}, schedule of {', '.join(schedule_names())}"
    )


def add_output_arguments(parser: Parser, *, verbose: bool = False) -> None:
    """`--json`; and of verbs whose reports have details `--verbose`."""
    output = parser.group("output")
    if verbose:
        output.add_argument("-v", "--verbose", action="store_true", help="print the whole report, with all its details")
    output.add_argument("--json", action="store_true", help="print the payload as JSON")


def add_set_argument(group: ArgumentGroup, rooms: str, example: str) -> None:
    """`--set`, which replaces values of the catalogue."""
    group.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help=f"replace a value of {rooms}, such as {example}; may be repeated",
    )  # fmt: skip


def resolve(arguments: argparse.Namespace) -> tuple[Architecture, Cluster, Job]:
    """Model, cluster and job of the arguments. Raises `InputError` with everything that is wrong with them."""
    model, (cluster,), job = resolve_several(arguments, [arguments.cluster])
    return model, cluster, job


def resolve_several(
    arguments: argparse.Namespace, clusters: Iterable[str]
) -> tuple[Architecture, tuple[Cluster, ...], Job]:
    """Model, clusters and job; `--set chip.NAME` holds for the chips of all. Raises `InputError` with all that is wrong."""
    from shardwise.hardware import get_stack, load_measured_cluster
    from shardwise.model import load_model

    changes = parse_overrides(arguments.set)
    clusters = [text.strip() for text in clusters]
    twice = sorted({text for text in clusters if clusters.count(text) > 1})
    if twice:
        raise InputError(f"cluster: found {', '.join(twice)} more than once; each cluster once is required")
    model, job, stack, *found = run_all(
        lambda: load_model(arguments.model),
        lambda: _job(arguments, clusters, changes["job"]),
        lambda: None if arguments.stack is None else get_stack(arguments.stack),
        *(partial(load_measured_cluster, text) for text in clusters),
    )
    if stack is not None and job.overlap is not None:
        raise InputError(
            f"--stack: found {stack.name} beside --overlap {job.overlap}: a stack predicts how much communication is exposed, a "
            "convention of overlap gives a bound; leave out one of the two"
        )
    model = apply_overrides(model, changes["model"], "model")
    return model, tuple(run_all(*(partial(_reached, own, changes["chip"], stack, job) for own in found))), job


def _reached(own: MeasuredCluster, changes: Mapping[str, str], stack: Stack | None, job: Job) -> Cluster:
    """The cluster as it is planned on, with values of its chip replaced; a fraction of a peak that is set takes the place of
    what was measured. Raises `InputError`."""
    from shardwise.hardware import CONSTANTS
    from shardwise.hardware.catalog_networks import replace_chip
    from shardwise.hardware.cluster_loading import apply_stack
    from shardwise.price import with_problem_defaults

    nominal = replace_chip(own.nominal, _changed_chip(own.nominal.chip, changes))
    cluster, _ = with_problem_defaults(apply_stack(own._replace(nominal=nominal), stack), job)
    calibration = cluster.calibration
    fractions = {name: getattr(nominal.chip, name) for name in changes if name in CONSTANTS}
    if calibration is None or not fractions:
        return cluster
    names = ", ".join(f"chip.{name}" for name in fractions)
    measured = replace(
        calibration,
        constants={**calibration.constants, **fractions},
        source=f"{calibration.source}; {names} set by hand",
    )
    return replace(cluster, calibration=measured)


def _changed_chip(chip: Chip, changes: Mapping[str, str]) -> Chip:
    """The chip with the user's own values: they have no other source, and the user's own price not the catalogue's date."""
    changed: Chip = apply_overrides(chip, changes, "chip")
    date = chip.price_date if "price_usd_per_hour" not in changes else None
    date = changed.price_date if "price_date" in changes else date
    own = {name: "set by hand" for name in changes if name != "sources"}
    return replace(changed, price_date=date, sources={**chip.sources, **own})


def _batch_tokens(text: str | None, clusters: Sequence[str]) -> int | None:
    """Tokens of a global batch, given as such or as so many per device. Raises `InputError`.

    >>> _batch_tokens("4Mi", ["h100:64"]), _batch_tokens("32Ki/device", ["h100:64"])
    (4194304, 2097152)
    """
    from shardwise.hardware import load_measured_cluster

    if text is None:
        return None
    number, slash, unit = text.partition("/")
    if not slash:
        return parse_count(text, label="--batch-tokens")
    if unit.strip() != "device":
        raise InputError(
            f"--batch-tokens: found {text!r}; tokens, or tokens per device such as 32Ki/device, are required"
        )
    sizes = {load_measured_cluster(cluster).nominal.num_devices for cluster in clusters}
    if len(sizes) > 1:
        raise InputError(
            f"--batch-tokens: found {text!r} for clusters of {', '.join(f'{size:,}' for size in sorted(sizes))} devices, which "
            "would have other batches; tokens of one global batch are required"
        )
    return parse_count(number, label="--batch-tokens") * sizes.pop()


def _job(arguments: argparse.Namespace, clusters: Sequence[str], changes: Mapping[str, str]) -> Job:
    from shardwise.hardware import default_precision
    from shardwise.model import Job

    batch, seq_len, tokens = run_all(
        lambda: _batch_tokens(arguments.batch_tokens, clusters),
        lambda: parse_count(arguments.seq_len, label="--seq-len"),
        lambda: parse_quantity(arguments.tokens, label="--tokens", unit="") if arguments.tokens else None,
    )
    # A batch that is left out is one sequence until the layout is known, which only `memory` allows.
    seq_len = (
        parse_count(changes["seq_len"], label="--set job.seq_len")
        if batch is None and "seq_len" in changes
        else seq_len
    )
    given = {"global_batch_tokens": batch or seq_len, "seq_len": seq_len, "tokens": tokens}
    precision = arguments.precision or default_precision(arguments.stack)
    job: Job = apply_overrides(Job(**given, precision=precision, overlap=arguments.overlap), changes, "job")
    return job


def parse_layout_text(text: str, model: Architecture, job: Job, flag: str = "--layout") -> Layout:
    """The layout of a flag's text: `Layout.parse`, and what follows from it for a model and job may be said too."""
    from shardwise.layout import DERIVED_FIELDS, layout_from_fields, parse_fields
    from shardwise.layout.payload import check_derived_fields

    found = parse_fields(text, prefix=flag, extra_counts=DERIVED_FIELDS)
    given = {key: found.pop(key) for key in DERIVED_FIELDS if key in found}
    return check_derived_fields(layout_from_fields(found), given, model, job)


def write_file(flag: str, target: str, text: str) -> None:
    """Write what a flag asks for. Raises `InputError` where that cannot be."""
    from pathlib import Path

    from shardwise.values import InputError

    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{flag}: cannot write {target}: {error.strerror}") from None
