"""Reports of the catalogues: tables of entries, and the values of one entry with their sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from shardwise.book_formulas import get_rule
from shardwise.hardware import Chip, Pods, Topology, Torus, get_stack, load_chip, load_cluster
from shardwise.hardware.published_constants import is_measured, load_published_fit
from shardwise.interop import get_target
from shardwise.model import (
    Architecture,
    Optimizer,
    factor_bytes,
    get_optimizer,
    load_model,
    num_active_params,
    num_params,
    state_formats,
)
from shardwise.model.layer_pattern import count_layers, expand_pattern
from shardwise.model.optimizer_program import bytes_per_parameter
from shardwise.present import reports
from shardwise.present.catalogue_values import CatalogueEntries, StackConstant, plain_values, stack_constants
from shardwise.present.optimizer_values import (
    factor_units,
    optimizer_parts,
    optimizer_precision,
    other_optimizer,
    update_bytes,
)
from shardwise.present.rendering.numbers import count, share, significant
from shardwise.present.rendering.report import Block, Cell, Line, Number, Report, Row, Section, Table
from shardwise.values import (
    InputError,
    Precision,
    SourcedValue,
    bytes_per_element,
    format_count,
    format_quantity,
    format_seconds,
    get_precision,
)

UNITS = {
    "flops_per_s": "FLOP/s",
    "bytes_per_s": "B/s",
    "bytes": "B",
    "usd_per_hour": "USD/h",
    "clock_hz": "Hz",
    "flops_per_usd": "FLOP",
}  # by a part of a value's name
MAX_SOURCE_LENGTH = 100  # characters of a source in a table


def value_cell(key: str, value: Any, path: str) -> Cell:
    """Return a value of the catalogue as a cell: a number with its path in the payload, or a text."""
    text = format_catalogue_value(key, value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Number(text, value, next((unit for part, unit in UNITS.items() if part in key), ""), path)
    return text


def format_catalogue_value(key: str, value: Any) -> str:
    """Format a value in the unit that its name says.

    >>> format_catalogue_value("memory_bytes", 80e9), format_catalogue_value("wraps", (True, False))
    ('80 GB', 'yes, no')
    """
    if value is None or value == () or value == []:
        return "none"
    if isinstance(value, (list, tuple)):
        separator = "x" if isinstance(value[0], int) and not isinstance(value[0], bool) else ", "
        return separator.join(format_catalogue_value("", part) for part in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if key.endswith("num_params") and isinstance(value, float):
        return format_count(value)
    if key.endswith("_w"):
        return f"{value:g} W"
    for part, unit in UNITS.items():
        if part in key:
            return format_quantity(float(value), unit, digits=4)
    if key.endswith("latency_s"):
        return format_seconds(float(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def shorten_source(source: str) -> str:
    """Return a source without what it says, where that makes a table too wide."""
    if len(source) <= MAX_SOURCE_LENGTH:
        return source
    clause = source.partition(";")[0]
    return clause if len(clause) <= MAX_SOURCE_LENGTH else clause.partition(":")[0]


def chips_table(entries: CatalogueEntries) -> Report:
    """Report chips with their peaks, memory, power and price."""
    rows: list[Row] = [("chip", "vendor", "bf16", "fp8", "memory", "bandwidth", "matmul", "power", "per host", "USD/h")]
    rows += [_chip_row(load_chip(name), f"entries.{index}.values") for index, name in enumerate(entries.names)]
    notes = [
        "Dense peaks; matmul: what the best shapes reach of the bf16 peak; USD/h: of one chip,",
        "of the day that `show chips NAME` gives with its source. A dash: no source, or no such format.",
    ]
    return [Section([Table(rows=tuple(rows), right=range(2, 10))]), Section(notes)]


def _chip_row(chip: Chip, path: str) -> Row:
    peaks = (
        value_cell("flops_per_s", chip.peak_flops_per_s[dtype], f"{path}.peak_flops_per_s.{dtype}.value")
        if dtype in chip.peak_flops_per_s
        else "-"
        for dtype in ("bf16", "fp8")
    )
    memory = value_cell("memory_bytes", chip.memory_bytes, f"{path}.memory_bytes.value")
    bandwidth = value_cell("memory_bytes_per_s", chip.memory_bytes_per_s, f"{path}.memory_bytes_per_s.value")
    is_measured = "matmul_fraction" in chip.sources
    matmul = share(chip.matmul_fraction, f"{path}.matmul_fraction.value", digits=0) if is_measured else "-"
    power: Cell = Number(f"{chip.power_w:g} W", chip.power_w, "W", f"{path}.power_w.value") if chip.power_w else "-"
    price = chip.price_usd_per_hour
    usd: Cell = Number(f"{price:g}", price, "USD/h", f"{path}.price_usd_per_hour.value") if price else "-"
    return (chip.name, chip.vendor, *peaks, memory, bandwidth, matmul, power, str(chip.devices_per_host or "-"), usd)


FORMS: tuple[Row, ...] = (
    ("CHIP:COUNT", "devices behind switches: one node or less, or whole nodes (h100:512)"),
    ("CHIP:SHAPE", "a slice of a torus (tpu-v5p:4x4x8), twisted (tpu-v5p:4x4x8_twisted)"),
    ("CHIP:SHAPE*N", "N pods of such a slice on the data-centre network (tpu-v5e:16x16*4)"),
    ("local:N", "N processes that share one host"),
    ("FILE.toml", "your own chip and network: docs/extending.md"),
)


def clusters_table(entries: CatalogueEntries) -> Report:
    """Report the forms of clusters, and an example of each size of the catalogue's chips."""
    rows: list[Row] = [("cluster", "devices", "network")]
    for index, name in enumerate(entries.names):
        cluster = load_cluster(name)
        num_devices = count(cluster.num_devices, f"entries.{index}.values.num_devices.value")
        rows.append((name, num_devices, _network_text(cluster.topology)))
    return [Section([Table(rows=FORMS, head=False)]), Section([Table(rows=tuple(rows), right=(1,))])]


def _network_text(network: Topology) -> str:
    """Return a network in a few words."""
    if isinstance(network, Pods):
        rate = _rate(network.bytes_per_s)
        return f"{network.num_pods} pods of {_network_text(network.torus)}, {rate} for each chip between pods"
    if isinstance(network, Torus) and network.twisted:
        shape = format_catalogue_value("", network.shape)
        return f"twisted torus {shape}, links of {_rate(network.bytes_per_s)}"
    if isinstance(network, Torus):
        kinds = " x ".join(
            f"{'ring' if wraps else 'line'} of {size}" for size, wraps in zip(network.shape, network.wraps, strict=True)
        )
        return f"{kinds}, links of {_rate(network.bytes_per_s)}"
    return (
        " x ".join(
            f"{tier.name} {'mesh of ' if tier.links else ''}{tier.size} ({_rate(tier.bytes_per_s)})"
            for tier in network.tiers
            if tier.size > 1
        )
        or "one device"
    )


def _rate(bytes_per_s: float) -> str:
    return format_catalogue_value("bytes_per_s", bytes_per_s)


def optimizers_table(entries: CatalogueEntries) -> Report:
    """Report optimizers with their state and its bytes."""
    recipe = optimizer_precision(entries.precision)
    rows: list[Row] = [("optimizer", "state", "bytes/parameter", "others by", "fields", "source")]
    for index, name in enumerate(entries.names):
        optimizer = get_optimizer(name)
        tensors = ", ".join(state_formats(recipe, optimizer)) or "none"
        fallback = other_optimizer(name, optimizer) or "-"
        rows.append((
            name, tensors, _state_bytes(optimizer, recipe, f"entries.{index}.values"), fallback, f"{len(optimizer.fields)}",
            shorten_source(optimizer.source),
        ))  # fmt: skip
    return [Section([Table(rows=tuple(rows), right=(2, 4))]), Section([_remark(recipe)])]


def _state_bytes(optimizer: Optimizer, recipe: Precision, path: str) -> Number | Line:
    """Return the bytes of a parameter's state, and of each row or column where moments have a number for these."""
    total, factor = update_bytes(optimizer, recipe), factor_bytes(recipe, optimizer)
    number = Number(f"{total:g}", total, "B", f"{path}.state_bytes_per_parameter.value")
    return Line((number, f", {factor:g}/{' and '.join(factor_units(optimizer))}")) if factor else number


def _remark(recipe: Precision) -> str:
    other_bytes = bytes_per_element(recipe.weights) + recipe.gradient_bytes
    return (
        f"state and its bytes are those of {recipe.name} (--precision names another recipe); weights and gradients take "
        f"{other_bytes:g} more"
    )


def optimizer_entry(entries: CatalogueEntries) -> Report:
    """Report the state of a parameter, tensor by tensor, and the fields with their defaults and limits."""
    (name,), recipe = entries.names, optimizer_precision(entries.precision)
    optimizer = get_optimizer(name)
    blocks: list[Block] = []
    for prefix, part in optimizer_parts(optimizer):
        matrices = (
            " of matrices"
            + (" of blocks" if not optimizer.covers_vocabulary else "")
            + (", whole" if optimizer.updates_whole_matrices else "")
        )
        weights = f" of all else, by {other_optimizer(name, optimizer)}" if prefix else matrices
        weights = "" if optimizer.fallback is None else weights
        factor, total = factor_bytes(recipe, part), update_bytes(part, recipe)
        factor_text = f", {factor:g} of each moment's {' or '.join(factor_units(part))}" if factor else ""
        factor_text += f" of up to {part.max_preconditioned_side:,}" if part.max_preconditioned_side else ""
        number = Number(f"{total:g}", total, "B", f"entries.0.values.{prefix}state_bytes_per_parameter.value")
        line = Line((f"  state{weights}: ", number, f" bytes of a parameter{factor_text}"))
        blocks += [line, _state_table(part, recipe)]
    blocks += [
        "  fields", _fields_table(optimizer), f"  source: {optimizer.source}", f"  source of the formats: {recipe.source}",
    ]  # fmt: skip
    return [Section(blocks, title=f"{name} under {recipe.name}")]


def _state_table(optimizer: Optimizer, recipe: Precision) -> Table:
    rows: list[Row] = [("tensor", "format", "one for each", "bytes")]
    rows += [
        (tensor, format, str(optimizer.granularity(tensor)), f"{bytes_per_element(format):.7g}")
        for tensor, format in state_formats(recipe, optimizer).items()
    ]
    return Table(rows=tuple(rows), right=(3,), indent=4)


def _fields_table(optimizer: Optimizer) -> Table:
    rows: list[Row] = [("field", "default", "limits", "meaning")]
    for name, field in optimizer.fields.items():
        low, high = field.limits
        limits = f"{'whole, ' if field.integer_only else ''}at least {low:g}, below {high:g}"
        default = Number(f"{field.default:g}", field.default, "", f"entries.0.values.fields.{name}.default.value")
        meaning = field.help + ("; 0 for norms and biases" if field.matrices_only else "")
        rows.append((name, default, limits, meaning))
    return Table(rows=tuple(rows), right=(1,), indent=4)


PATTERN_WIDTH = 60  # columns of a pattern of layers that is written out


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
    num_layers = next((value for key, value, _ in values if key == "num_layers"), 0)
    special = [
        (key, _pattern_text(value, int(num_layers)) if key == "layer_pattern" else value, source)
        for key, value, source in special
    ]
    return _values_report(name, special, "the other fields are as in a plain block; --json prints them")


def _pattern_text(pattern: object, num_layers: int) -> str:
    """Return a pattern of layers as text: as it is written, or where that is long as the layers of each kind."""
    assert isinstance(pattern, (list, tuple))
    text = ", ".join(pattern)
    if len(text) <= PATTERN_WIDTH:
        return text
    counts = count_layers(expand_pattern(tuple(pattern), num_layers))
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) + "; --json has their order"


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
    facts += ", casts results of norms and gated activations as they are made" * (stack.casts == "in_producers")
    facts += ", casts weights that rest whole once a step" * (stack.weight_casts == "each_step")
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
