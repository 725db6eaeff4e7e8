"""Values that notebooks show, and that have a picture; what is shown of each type is registered in `present`. Values of a
catalogue with their sources, as `shardwise show` lists them: lists are built beside the values that they describe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SourcedValue = tuple[str, Any, str]  # name, value, source; None and "": there is no source for it


class Picture(Protocol):
    """A drawn picture."""

    title: str

    def svg(self) -> str:
        """Return the picture as an SVG document."""

    def figure(self) -> Figure:
        """Return the picture as a figure of matplotlib, of `shardwise[plot]`. Raises `InputError` where it is not installed."""


class Display(Protocol):
    """Display of a value in a notebook: a title, tables and charts."""

    def drawing(self) -> Picture:
        """Return the charts, drawn."""

    def html(self) -> str:
        """Return a fragment of HTML without scripts."""


class Displayable:
    """A value that shows itself in a notebook and has a picture."""

    __slots__ = ()

    def drawing(self) -> Any:
        """Return the picture: `drawing().svg()` is its SVG. Raises `InputError` if there is too much or nothing to draw."""
        return _find_display(self).drawing()

    def figure(self) -> Figure:
        """Return the picture as a figure of matplotlib, of `shardwise[plot]`. Raises `InputError` where it is not installed."""
        return _find_display(self).drawing().figure()

    def _repr_html_(self) -> str:
        return _find_display(self).html()


_find_display: Callable[
    [Displayable], Display
]  # set by `shardwise/__init__.py`, which every import of the package runs


def set_display_finder(finder: Callable[[Displayable], Display]) -> None:
    """Set what finds the display of a value. The package does so when it is imported: no value imports `present`."""
    global _find_display
    _find_display = finder
