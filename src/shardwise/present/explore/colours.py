"""The palette as a style sheet: a variable for each term, the same name and colour on every view, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.present.draw.palette import palette_payload

PAGE = ("paper", "ink", "faint", "grid", "empty")


def stylesheet() -> str:
    """Variables of both themes; a page follows the reader's system unless it says otherwise, and prints light."""
    themes = palette_payload()
    light, dark = (";".join(_variables(themes[name])) for name in ("light", "dark"))
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}\n"
    )


def _variables(theme: dict[str, Any]) -> Iterator[str]:
    on = theme["text_on"]
    yield from (f"--{name}:{theme[name]}" for name in PAGE)
    for name, colour in theme["terms"].items():
        plain = name.replace(" ", "-")
        yield f"--term-{plain}:{colour};--on-{plain}:{on[colour]}"
    for number, colour in enumerate(theme["series"]):
        yield f"--series-{number}:{colour};--on-series-{number}:{on[colour]}"
