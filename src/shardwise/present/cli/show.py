"""`shardwise show`: what the catalogues have, each value with its source."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from shardwise.present.catalogue_values import catalogue_payload
from shardwise.present.cli.arguments import add_output_arguments
from shardwise.present.rendering.report import Report, Row, Section, Table
from shardwise.present.reports import catalogue, hardware_catalogue, optimizer_catalogue
from shardwise.present.reports.catalogue import first_words, shown
from shardwise.values import InputError, Parser, SourcedValue

DESCRIPTION = "List what the catalogues have. With a name: every value of it with its source."
EXAMPLES = (
    "shardwise show models qwen",
    "shardwise show chips h200",
    'shardwise show clusters "tpu-v5e:16x16*4" --json',
    "shardwise show stacks nemo-25 --chip h100",
    "shardwise show optimizers muon --precision bf16_bf16_moments",
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    catalogue = parser.group("catalogue")
    catalogue.add_argument(
        "kind",
        choices=tuple(NAMES),
        help="which catalogue",
    )
    catalogue.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        completes=lambda before: names_of(before[0]),
        help="one entry, or a part of the names of several; of clusters also a shorthand or the path of a .toml file",
    )
    catalogue.add_argument(
        "--chip", metavar="NAME", completes="chips", help="of a stack: show the constants of this chip beside its own"
    )
    catalogue.add_argument(
        "--precision",
        metavar="NAME",
        completes="precisions",
        help="of optimizers: the recipe of their state (default: bf16)",
    )
    add_output_arguments(parser)


class Catalogue(NamedTuple):
    """What `show` knows of one kind: the values of one, a table of some, and one for people."""

    values: Callable[[str], list[SourcedValue]]
    table: Callable[[Sequence[str]], Report]
    entry: Callable[[str], Report]


def run(arguments: argparse.Namespace) -> str | Report:
    """The catalogue, those of its entries that a name is a part of, or one entry; as text or as JSON."""
    kind, name = _catalogues(arguments.chip, arguments.precision)[arguments.kind], arguments.name
    if arguments.chip and not (arguments.kind == "stacks" and (name or arguments.json)):
        raise InputError("--chip: found without a stack; it goes with one, such as show stacks nemo-25 --chip h100")
    if arguments.precision and arguments.kind != "optimizers":
        raise InputError(
            f"--precision: found with {arguments.kind}; it goes with optimizers, such as show optimizers muon --precision fp32"
        )
    listed = _listed(names_of(arguments.kind), name)
    if arguments.json:
        entries = {entry: kind.values(entry) for entry in listed or [name]}
        return json.dumps(catalogue_payload(arguments.kind, entries), indent=2)
    return kind.table(listed) if listed and not arguments.chip else kind.entry(name)


def _listed(names: Sequence[str], text: str | None) -> Sequence[str]:
    """The names that a text is a part of, all without one; none where the text is itself a name, or a part of none."""
    if text is None:
        return names
    text = text.strip().lower()
    return [] if text in names else [name for name in names if text in name]


def _catalogues(chip: str | None, precision: str | None) -> Mapping[str, Catalogue]:
    from shardwise.present.catalogue_values import (
        chip_values,
        cluster_values,
        model_values,
        precision_values,
        stack_values,
        target_values,
    )

    return {
        "models": Catalogue(model_values, _models, lambda name: _model_entry(name, model_values(name))),
        "chips": Catalogue(
            chip_values, hardware_catalogue.chips_table,
            lambda name: _entry(name, chip_values(name)),
        ),
        "clusters": Catalogue(
            cluster_values, hardware_catalogue.clusters_table,
            lambda name: _entry(name, cluster_values(name)),
        ),
        "precisions": Catalogue(
            precision_values, _precisions, lambda name: _entry(name, precision_values(name))
        ),
        "stacks": Catalogue(
            partial(stack_values, chip=chip), catalogue.stacks_table,
            partial(catalogue.stack_entry, chip=chip),
        ),
        "targets": Catalogue(
            target_values, catalogue.targets_table,
            lambda name: _entry(name, target_values(name)),
        ),
        "rules": Catalogue(
            catalogue.values_of, catalogue.rules_table, catalogue.rule_entry
        ),
        "optimizers": Catalogue(
            partial(optimizer_catalogue.values_of, precision=precision),
            partial(optimizer_catalogue.optimizers_table, precision=precision),
            partial(optimizer_catalogue.optimizer_entry, precision=precision),
        ),
    }  # fmt: skip


def _entry(name: str, values: Sequence[SourcedValue], remark: str = "") -> Report:
    sources = {source for _, _, source in values}
    remarks = [f"  {remark}"] if remark else []
    rows: tuple[Row, ...]
    if len(values) > 1 and len(sources) == 1:  # said once
        rows = tuple((key, shown(key, value)) for key, value, _ in values)
        remarks = [f"  source: {sources.pop()}", *remarks]
    else:
        rows = tuple(
            (key, "no source" if value is None and not source else shown(key, value), source)
            for key, value, source in values
        )
    return [Section([Table(rows=rows, head=False, indent=2), *remarks], title=name)]


def _model_entry(name: str, values: Sequence[SourcedValue]) -> Report:
    """A model without the fields that are as in a plain block: most models have few that are not."""
    from shardwise.present.catalogue_values import plain_values

    plain = plain_values()
    told = [value for value in values if value[0] not in plain or value[1] != plain[value[0]]]
    return _entry(name, told, "the other fields are as in a plain block; --json prints them")


def _model_names() -> tuple[str, ...]:
    from shardwise.model import model_names

    return model_names()


def _models(names: Sequence[str]) -> Report:
    from shardwise.model import load_model, num_active_params, num_params
    from shardwise.values import format_count

    rows: list[Row] = [
        ("model", "parameters", "active", "experts", "layers", "d_model", "d_ff", "heads", "kv heads", "vocabulary")
    ]
    for name in names:
        model = load_model(name)
        sizes = (model.num_layers, model.d_model, model.d_ff, model.num_heads, model.num_kv_heads, model.vocab_size)
        active = format_count(num_active_params(model)) if model.num_experts else "-"
        experts = f"{model.experts_per_token} of {model.num_experts}" if model.num_experts else "-"
        rows.append((name, format_count(num_params(model)), active, experts, *map(str, sizes)))
    return [Section([Table(rows=tuple(rows), right=range(1, 10))])]


def _precision_names() -> tuple[str, ...]:
    from shardwise.values import PRECISIONS

    return tuple(PRECISIONS)


def _precisions(names: Sequence[str]) -> Report:
    from shardwise.model.optimizer_program import bytes_per_parameter
    from shardwise.values import PRECISIONS

    rows: list[Row] = [
        (
            "precision",
            "bytes/parameter",
            "weights",
            "gradients",
            "master",
            "moments",
            "activations",
            "products",
            "source",
        )
    ]
    for name in names:
        recipe = PRECISIONS[name]
        moments = recipe.moments + (f"+{recipe.second_moment}" if recipe.second_moment else "")
        formats = (
            recipe.weights,
            recipe.gradients,
            recipe.master or "-",
            moments,
            recipe.activations,
            recipe.matmul_format,
        )
        rows.append((name, f"{bytes_per_parameter(recipe):g}", *formats, first_words(recipe.source)))
    return [Section([Table(rows=tuple(rows), right=(1,))])]


NAMES: Mapping[str, Callable[[], tuple[str, ...]]] = {
    "models": _model_names, "chips": hardware_catalogue.chip_names, "clusters": hardware_catalogue.cluster_names,
    "precisions": _precision_names, "stacks": catalogue.stack_names, "targets": catalogue.target_names,
    "rules": catalogue.rule_names, "optimizers": optimizer_catalogue.optimizer_names,
}  # fmt: skip


def names_of(kind: str) -> tuple[str, ...]:
    """Names of a catalogue's entries; none of what is no catalogue."""
    return NAMES[kind]() if kind in NAMES else ()
