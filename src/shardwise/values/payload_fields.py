"""Payload types that merge the fields of several classes; pydantic is loaded only when a schema is asked for."""

from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from typing_extensions import TypedDict


class MergedFields:
    """Shape with the fields of several dataclasses, named tuples and typed dicts; later ones replace fields of earlier ones.

    For payloads that add keys to the fields of a value: `Annotated[dict[str, Any], MergedFields(StepTime, More)]`.
    """

    def __init__(self, first: type, *later: type) -> None:
        self.kinds = (first, *later)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        merged_type = TypedDict(self.kinds[0].__name__, self._hints())  # type: ignore[misc]
        merged_type.__doc__ = self.kinds[0].__doc__
        return handler.generate_schema(merged_type)

    def _hints(self) -> dict[str, Any]:
        hints: dict[str, Any] = {}
        for kind in self.kinds:
            types = get_type_hints(kind, include_extras=True)
            hints |= {field.name: types[field.name] for field in fields(kind)} if is_dataclass(kind) else types
        return hints
