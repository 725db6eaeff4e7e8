"""The type of a payload that has the fields of several values; loads nothing of pydantic until a schema is asked for."""

from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from typing_extensions import TypedDict


class MergedFields:
    """A shape with the fields of several dataclasses, named tuples and typed dicts; the later ones take the place of the earlier.

    For payloads that put more beside the fields of a value: `Annotated[dict[str, Any], Fields(StepTime, More)]`.
    """

    def __init__(self, first: type, *others: type) -> None:
        self.kinds = (first, *others)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        shape = TypedDict(self.kinds[0].__name__, self._hints())  # type: ignore[misc]
        shape.__doc__ = self.kinds[0].__doc__
        return handler.generate_schema(shape)

    def _hints(self) -> dict[str, Any]:
        hints: dict[str, Any] = {}
        for kind in self.kinds:
            found = get_type_hints(kind, include_extras=True)
            hints |= {one.name: found[one.name] for one in fields(kind)} if is_dataclass(kind) else found
        return hints
