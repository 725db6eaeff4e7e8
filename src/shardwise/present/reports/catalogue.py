"""Reports of the catalogues: tables of entries, and the values of one entry with their sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from shardwise.book_formulas import get_rule
from shardwise.hardware import get_stack
from shardwise.hardware.published_constants import is_measured, load_published_fit
from shardwise.interop import get_target
from shardwise.model import Architecture, load_model, num_active_params, num_params
from shardwise.model.optimizer_program import bytes_per_parameter
from shardwise.present import reports
from shardwise.present.catalogue_values import CatalogueEntries, StackConstant, plain_values, stack_constants
from shardwise.present.rendering.numbers import significant
from shardwise.present.rendering.report import Block, Cell, Number, Report, Row, Section, Table
from shardwise.present.reports.catalogue_cells import shorten_source, value_cell
from shardwise.present.reports.hardware_catalogue import chips_table, clusters_table
from shardwise.present.reports.optimizer_catalogue import optimizer_entry, optimizers_table
from shardwise.values import InputError, SourcedValue, format_count, get_precision


def catalogue_report(entries: CatalogueEntries) -> Report:
    """Report entries as a table, or one entry with all of its values. Raises `InputError` for a chip beside several stacks."""
    if not entries.is_listing:
        return _ENTRIES.get(entries.kind, _entry)(entries)
    if entries.chip:
        raise InputError("--chip: found without a stack; it goes with one, such as show stacks nemo-25 --chip h100")
    return _TABLES[entries.kind](entries)


def _entry(entries: CatalogueEntries) -> Report:
    ((name, values),) = entries.entries.items()
    return _values_report(name, values)


def _values_report(name: str, values: Sequence[SourcedValue], remark: str = "") -> Report:
    """Return the values of an entry; a source that all of them have is printed once, below."""
    sources = {source for _, _, source in values}
    remarks = [f"  {remark}"] if remark else []
    rows: tuple[Row, ...]
    if len(values) > 1 and len(sources) == 1:
        rows = tuple((key, _value_cell(key, value)) for key, value, _ in values)
        remarks = [f"  source: {sources.pop()}", *remarks]
    else:
        rows = tuple(
            (key, "no source" if value is None and not source else _value_cell(key, value), source)
            for key, value, source in values
        )
    return [Section([Table(rows=rows, head=False, indent=2), *remarks], title=name)]


def _value_cell(key: str, value: object) -> Cell:
    return value_cell(key, value, f"entries.0.values.{key}.value")


def _model_entry(entries: CatalogueEntries) -> Report:
    """Return a model without the fields that are as in a plain block: most models have few that are not."""
    ((name, values),) = entries.entries.items()
    plain = plain_values()
    special = [value for value in values if value[0] not in plain or value[1] != plain[value[0]]]
    return _values_report(name, special, "the other fields are as in a plain block; --json prints them")


def _models_table(entries: CatalogueEntries) -> Report:
    rows: list[Row] = [
        ("model", "parameters", "active", "experts", "layers", "d_model", "d_ff", "heads", "kv heads", "vocabulary")
    ]
    rows += [_model_row(load_model(name), f"entries.{index}.values") for index, name in enumerate(entries.names)]
    return [Section([Table(rows=tuple(rows), right=range(1, 10))])]


def _model_row(model: Architecture, path: str) -> Row:
    total, active = num_params(model), num_active_params(model)
    sizes = ("num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "vocab_size")
    return (
        model.name,
        Number(format_count(total), total, "", f"{path}.num_params.value"),
        Number(format_count(active), active, "", f"{path}.num_active_params.value") if model.num_experts else "-",
        f"{model.experts_per_token} of {model.num_experts}" if model.num_experts else "-",
        *(Number(str(getattr(model, name)), getattr(model, name), "", f"{path}.{name}.value") for name in sizes),
    )


def _precisions_table(entries: CatalogueEntries) -> Report:
    rows: list[Row] = [(
        "precision", "bytes/parameter", "weights", "gradients", "master", "moments", "activations", "products", "source",
    )]  # fmt: skip
    for index, name in enumerate(entries.names):
        recipe = get_precision(name)
        moments = recipe.moments + (f"+{recipe.second_moment}" if recipe.second_moment else "")
        state_bytes = bytes_per_parameter(recipe)
        rows.append((
            name, Number(f"{state_bytes:g}", state_bytes, "B", f"entries.{index}.values.bytes_per_parameter.value"),
            recipe.weights, recipe.gradients, recipe.master or "-", moments, recipe.activations, recipe.matmul_format,
            shorten_source(recipe.source),
        ))  # fmt: skip
    return [Section([Table(rows=tuple(rows), right=(1,))])]


def _stack_entry(entries: CatalogueEntries) -> Report:
    """Return a line for each constant and for each ability, each source once."""
    (name,), chip = entries.names, entries.chip
    stack, constants = get_stack(name), list(stack_constants(name, chip))
    facts = ", attention writes its scores to memory" * stack.unfused_attention
    facts += ", overlaps tensor parallelism with products" * stack.overlaps_tp
    facts += ", casts operands of narrow products in these alone" * (stack.casts == "in_products")
    sources = dict.fromkeys((constant.owner, constant.source) for constant in constants)
    abilities: tuple[Row, ...] = tuple((key, _ability_text(values)) for key, values in stack.abilities.items())
    usual = [f"  source (precision): {stack.precision_source}"] if stack.precision_source else []
    blocks: list[Block] = [
        Table(rows=tuple(_constant_rows(constants)), right=(1,), indent=2),
        *(f"  source ({owner}): {source}" for owner, source in sources),
        "  what it runs",
        Table(rows=abilities, head=False, indent=2),
        f"  source (what it runs): {stack.abilities.source}",
        f"  precision where none is named: {stack.precision}",
        *usual,
        *([] if chip else ["  --chip NAME shows the constants of a chip beside them"]),
    ]
    return [Section(blocks, title=f"{name}{f' on {chip}' if chip else ''}: a stack of the kind {stack.kind}{facts}")]


def _constant_rows(constants: Sequence[StackConstant]) -> Iterator[Row]:
    yield "constant", "value", "one deviation", "meaning"
    for constant in constants:
        name = f"{constant.owner}.{constant.name}"
        value = significant(constant.value, f"entries.0.values.{name}.value")
        yield name, value, f"{constant.low:.3g} to {constant.high:.3g}", constant.meaning


def _ability_text(values: bool | Sequence[object]) -> str:
    if isinstance(values, bool):
        return "yes" if values else "no"
    return ", ".join(map(str, values)) or "none"


def _stacks_table(entries: CatalogueEntries) -> Report:
    """Return stacks and kinds with their four constants."""
    constants_by_stack = {name: list(stack_constants(name, None)) for name in entries.names}
    columns = next(iter(constants_by_stack.values()))
    rows: list[Row] = [("stack", "kind", *(constant.name for constant in columns), "from")]
    for index, (name, constants) in enumerate(constants_by_stack.items()):
        stack, path = get_stack(name), f"entries.{index}.values"
        origin = "runs" if is_measured(stack) else "expected of its kind"
        values = (
            significant(constant.value, f"{path}.stack.{constant.name}.value", digits=3) for constant in constants
        )
        rows.append((name, stack.kind, *values, origin))
    meanings = [f"{constant.name}: {constant.meaning}" for constant in columns]
    table = Table(rows=tuple(rows), right=range(2, 2 + len(columns)))
    return [Section([table]), Section([*meanings, f"runs: {load_published_fit()['source']}"])]


def _targets_table(entries: CatalogueEntries) -> Report:
    """Return targets with their releases and stacks."""
    rows: list[Row] = [("target", "framework", "release", "stack", "says the model", "options")]
    for index, name in enumerate(entries.names):
        target = get_target(name)
        says_model = "yes" if target.includes_model else "no: --model"
        num_options = len(target.options)
        options = Number(f"{num_options:,}", num_options, "", f"entries.{index}.values.num_options.value")
        rows.append((name, target.title, target.version, target.stack, says_model, options))
    return [Section([Table(rows=tuple(rows), right=(5,))])]


def _rules_table(entries: CatalogueEntries) -> Report:
    """Return the rules by topic, a line for each."""
    by_topic = groupby(map(get_rule, entries.names), key=lambda rule: rule.topic)
    sections = [
        Section([Table(rows=tuple((rule.name, rule.summary) for rule in rules), head=False, indent=2)], title=topic)
        for topic, rules in by_topic
    ]
    return [*sections, Section(["shardwise rule NAME says what a rule takes, its formula and its source"])]


def _rule_entry(entries: CatalogueEntries) -> Report:
    (name,) = entries.names
    return reports.rule_report(get_rule(name))


_TABLES: Mapping[str, Callable[[CatalogueEntries], Report]] = {
    "models": _models_table, "chips": chips_table, "clusters": clusters_table, "precisions": _precisions_table,
    "stacks": _stacks_table, "targets": _targets_table, "rules": _rules_table, "optimizers": optimizers_table,
}  # fmt: skip
_ENTRIES: Mapping[str, Callable[[CatalogueEntries], Report]] = {
    "models": _model_entry, "stacks": _stack_entry, "rules": _rule_entry, "optimizers": optimizer_entry,
}  # fmt: skip
