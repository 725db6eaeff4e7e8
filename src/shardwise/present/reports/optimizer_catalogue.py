"""The part of `show` about optimizers: their state under a precision recipe, and their fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardwise.present.rendering.report import Block, Report, Row, Section, Table
from shardwise.present.reports.catalogue import first_words
from shardwise.values import SourcedValue

if TYPE_CHECKING:
    from shardwise.model import Optimizer
    from shardwise.model.optimizers.definition import Hyperparameter
    from shardwise.values import Precision


def optimizer_names() -> tuple[str, ...]:
    from shardwise.model import optimizer_names as names

    return names()


def values_of(name: str, precision: str | None = None) -> list[SourcedValue]:
    """State and bytes of a parameter, of matrices and of all else where these differ, and every field."""
    from shardwise.model import factor_bytes, get_optimizer

    one, recipe = get_optimizer(name), _recipe(precision)
    found: list[SourcedValue] = [
        ("whole_matrices", one.updates_whole_matrices, one.source),
        ("others", _others(name, one), one.source),
        ("precision", recipe.name, recipe.source),
    ]
    for prefix, part in _kinds(one):
        formats = _formats(part, recipe)
        found.append((f"{prefix}state", list(formats), part.source))
        found += [
            (f"{prefix}state.{tensor}.format", format, part.source if _is_own(part, tensor) else recipe.source)
            for tensor, format in formats.items()
        ]
        found.append((f"{prefix}state_bytes_per_parameter", _bytes(part, recipe), recipe.source))
        if factor_bytes(recipe, part):
            each = "_or_".join(word.replace(" ", "_") for word in _sides(part))
            found.append((f"{prefix}state_bytes_per_{each}", factor_bytes(recipe, part), recipe.source))
    for field_name, field in one.fields.items():
        found += [(f"fields.{field_name}.{key}", value, one.source) for key, value in _values_of_field(field).items()]
    return found


def _values_of_field(field: Hyperparameter) -> dict[str, object]:
    low, high = field.limits
    return {
        "default": field.default, "minimum": low, "below": high, "whole": field.integer_only, "of_matrices": field.matrices_only,
        "meaning": field.help,
    }  # fmt: skip


def _recipe(precision: str | None) -> Precision:
    from shardwise.values import get_precision

    return get_precision(precision or "bf16")


def _kinds(one: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """What updates matrices, and what updates all else where that is another one, with the prefix of its values."""
    yield "", one
    if one.fallback is not None:
        yield "others.", one.fallback


def _others(name: str, one: Optimizer) -> str | None:
    """The optimizer that updates what is no matrix, where that is another one or has other tensors of state."""
    from shardwise.model.optimizers.registry import OPTIMIZERS

    if one.fallback is None:
        return None
    return next((other for other, value in OPTIMIZERS.items() if value is one.fallback), name)


def _formats(one: Optimizer, recipe: Precision) -> dict[str, str]:
    """The number format of each tensor of the state; no master copy where the weights are their own, and the gradient where the
    update has a copy of its own."""
    from shardwise.model import GRADIENT, MASTER
    from shardwise.model.optimizer_program import moment_formats

    own = {MASTER: recipe.master, **moment_formats(recipe, one), GRADIENT: recipe.update_gradients}
    return {name: format for name, format in own.items() if format is not None}


def _is_own(one: Optimizer, tensor: str) -> bool:
    """Whether a tensor of the state has its format of the optimizer and not of the recipe."""
    update = one.updates.get(tensor)
    return update is not None and update.format is not None


def _bytes(one: Optimizer, recipe: Precision) -> float:
    from shardwise.model import moment_bytes

    return recipe.master_bytes + moment_bytes(recipe, one)


def _shown_bytes(one: Optimizer, recipe: Precision) -> str:
    from shardwise.model import factor_bytes

    factor = factor_bytes(recipe, one)
    return f"{_bytes(one, recipe):g}" + (f", {factor:g}/{' and '.join(_sides(one))}" if factor else "")


def _sides(one: Optimizer) -> tuple[str, ...]:
    """What moments that are no elements' have a number for, each once."""
    from shardwise.model import Granularity
    from shardwise.model.optimizers.definition import PAIR_GRANULARITIES

    every = (one.granularity(name) for name in one.moments)
    return tuple(
        dict.fromkeys(
            "pair of a side" if per in PAIR_GRANULARITIES else str(per)
            for per in every
            if per is not Granularity.ELEMENT
        )
    )


def optimizers_table(names: Sequence[str], precision: str | None = None) -> Report:
    """Optimizers with their state and its bytes."""
    from shardwise.model import get_optimizer

    recipe = _recipe(precision)
    rows: list[Row] = [("optimizer", "state", "bytes/parameter", "others by", "fields", "source")]
    for name in names:
        one = get_optimizer(name)
        tensors, others = ", ".join(_formats(one, recipe)) or "none", _others(name, one) or "-"
        rows.append((name, tensors, _shown_bytes(one, recipe), others, f"{len(one.fields)}", first_words(one.source)))
    return [Section([Table(rows=tuple(rows), right=(2, 4))]), Section([_remark(recipe)])]


def _remark(recipe: Precision) -> str:
    from shardwise.values import bytes_per_element

    further = bytes_per_element(recipe.weights) + recipe.gradient_bytes
    return (
        f"state and its bytes are those of {recipe.name} (--precision names another recipe); weights and gradients take "
        f"{further:g} more"
    )


def optimizer_entry(name: str, precision: str | None = None) -> Report:
    """The state of a parameter, tensor by tensor, and the fields with their defaults and limits."""
    from shardwise.model import factor_bytes, get_optimizer

    one, recipe = get_optimizer(name), _recipe(precision)
    blocks: list[Block] = []
    for prefix, part in _kinds(one):
        matrices = (
            " of matrices"
            + (" of blocks" if not one.covers_vocabulary else "")
            + (", whole" if one.updates_whole_matrices else "")
        )
        of = "" if one.fallback is None else f" of all else, by {_others(name, one)}" if prefix else matrices
        factor = factor_bytes(recipe, part)
        further = f", {factor:g} of each moment's {' or '.join(_sides(part))}" if factor else ""
        further += f" of up to {part.max_preconditioned_side:,}" if part.max_preconditioned_side else ""
        blocks += [f"  state{of}: {_bytes(part, recipe):g} bytes of a parameter{further}", _state_table(part, recipe)]
    blocks += ["  fields", _fields_table(one), f"  source: {one.source}", f"  source of the formats: {recipe.source}"]
    return [Section(blocks, title=f"{name} under {recipe.name}")]


def _state_table(one: Optimizer, recipe: Precision) -> Table:
    from shardwise.values import bytes_per_element

    rows: list[Row] = [("tensor", "format", "one for each", "bytes")]
    rows += [
        (tensor, format, str(one.granularity(tensor)), f"{bytes_per_element(format):.7g}")
        for tensor, format in _formats(one, recipe).items()
    ]
    return Table(rows=tuple(rows), right=(3,), indent=4)


def _fields_table(one: Optimizer) -> Table:
    rows: list[Row] = [("field", "default", "limits", "meaning")]
    for name, field in one.fields.items():
        low, high = field.limits
        limits = f"{'whole, ' if field.integer_only else ''}at least {low:g}, below {high:g}"
        rows.append(
            (
                name,
                f"{field.default:g}",
                limits,
                field.help + ("; 0 for norms and biases" if field.matrices_only else ""),
            )
        )
    return Table(rows=tuple(rows), right=(1,), indent=4)
