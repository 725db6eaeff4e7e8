"""Values of optimizers with their sources: the state of a parameter under a precision recipe, and every field."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.model import Granularity, Optimizer, factor_bytes, get_optimizer, moment_bytes, state_formats
from shardwise.model.optimizers.definition import OPTIMIZERS, PAIR_GRANULARITIES, Hyperparameter
from shardwise.values import Precision, SourcedValue, get_precision


def optimizer_values(name: str, precision: str | None = None) -> list[SourcedValue]:
    """Return state and bytes of a parameter, of matrices and of other weights where these differ, and every field."""
    optimizer, recipe = get_optimizer(name), optimizer_precision(precision)
    values: list[SourcedValue] = [
        ("whole_matrices", optimizer.updates_whole_matrices, optimizer.source),
        ("others", other_optimizer(name, optimizer), optimizer.source),
        ("precision", recipe.name, recipe.source),
    ]
    for prefix, part in optimizer_parts(optimizer):
        formats = state_formats(recipe, part)
        values.append((f"{prefix}state", list(formats), part.source))
        values += [
            (f"{prefix}state.{tensor}.format", format, part.source if _sets_format(part, tensor) else recipe.source)
            for tensor, format in formats.items()
        ]
        values.append((f"{prefix}state_bytes_per_parameter", update_bytes(part, recipe), recipe.source))
        if factor_bytes(recipe, part):
            unit = "_or_".join(word.replace(" ", "_") for word in factor_units(part))
            values.append((f"{prefix}state_bytes_per_{unit}", factor_bytes(recipe, part), recipe.source))
    for field_name, field in optimizer.fields.items():
        values += [
            (f"fields.{field_name}.{key}", value, optimizer.source) for key, value in _field_values(field).items()
        ]
    return values


def _field_values(field: Hyperparameter) -> dict[str, object]:
    low, high = field.limits
    return {
        "default": field.default, "minimum": low, "below": high, "whole": field.integer_only, "of_matrices": field.matrices_only,
        "meaning": field.help,
    }  # fmt: skip


def optimizer_precision(name: str | None) -> Precision:
    """Return the recipe whose state `show optimizers` prints, bf16 unless one is named."""
    return get_precision(name or "bf16")


def optimizer_parts(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """Yield (prefix of its values, optimizer) for matrices and, if it differs, for other weights."""
    yield "", optimizer
    if optimizer.fallback is not None:
        yield "others.", optimizer.fallback


def other_optimizer(name: str, optimizer: Optimizer) -> str | None:
    """Return the name of the optimizer that updates other weights than matrices, or None if it is the same."""
    if optimizer.fallback is None:
        return None
    return next((key for key, registered in OPTIMIZERS.items() if registered is optimizer.fallback), name)


def _sets_format(optimizer: Optimizer, tensor: str) -> bool:
    """Return True if the optimizer, and not the recipe, says the format of a tensor of its state."""
    update = optimizer.updates.get(tensor)
    return update is not None and update.format is not None


def update_bytes(optimizer: Optimizer, recipe: Precision) -> float:
    """Return the bytes of a parameter's master copy and moments."""
    return recipe.master_bytes + moment_bytes(recipe, optimizer)


def factor_units(optimizer: Optimizer) -> tuple[str, ...]:
    """Return what moments with fewer numbers than elements have a number for, each once: a row, a column, a pair of a side."""
    granularities = (optimizer.granularity(name) for name in optimizer.moments)
    return tuple(
        dict.fromkeys(
            "pair of a side" if granularity in PAIR_GRANULARITIES else str(granularity)
            for granularity in granularities
            if granularity is not Granularity.ELEMENT
        )
    )
