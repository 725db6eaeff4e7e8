"""Every value of a precision recipe with its source, for `shardwise show precisions`."""

from dataclasses import asdict

from shardwise.model.optimizer_program import bytes_per_parameter
from shardwise.values import SourcedValue, get_precision


def precision_values(name: str) -> list[SourcedValue]:
    """Every value of a recipe with its source. Raises `InputError` for an unknown name."""
    recipe = get_precision(name)
    values = asdict(recipe)
    source = values.pop("source")
    values.pop("name")
    return [
        ("bytes_per_parameter", bytes_per_parameter(recipe), source),
        *((k, "none" if v is None else v, source) for k, v in values.items()),
    ]
