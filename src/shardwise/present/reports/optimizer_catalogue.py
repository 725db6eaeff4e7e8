"""Reports of optimizers: their state under a precision recipe, and their fields."""

from __future__ import annotations

from shardwise.model import Optimizer, factor_bytes, get_optimizer, state_formats
from shardwise.present.catalogue_values import CatalogueEntries
from shardwise.present.optimizer_values import (
    factor_units,
    optimizer_parts,
    optimizer_precision,
    other_optimizer,
    update_bytes,
)
from shardwise.present.rendering.report import Block, Line, Number, Report, Row, Section, Table
from shardwise.present.reports.catalogue_cells import shorten_source
from shardwise.values import Precision, bytes_per_element


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
