"""Draw the floors of the package, from the import rules of `pyproject.toml`, into `docs/pictures/floors.svg`.

python docs/generate/floors.py [FILE]
"""

from __future__ import annotations

import sys
import tomllib
from html import escape
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PICTURE = REPOSITORY / "docs/pictures/floors.svg"
WIDTH, HEIGHT, GAP = 560, 34, 6  # of a floor, in pixels
TITLE = "Rooms of the package: each imports those below it"
# Rooms that belong together share a colour, on light and on dark paper; the page on design says what each holds.
COLOURS = {
    "describe": (
        "#e8eef7",
        "#24344d",
        ("values", "sharding", "hardware", "model", "pipeline", "records", "batch_size"),
    ),
    "derive and price": (
        "#e6f2ea",
        "#234233",
        ("layout", "derive", "step", "price", "book_formulas", "search", "serve"),
    ),
    "run and compare": ("#f8efe2", "#4a3a22", ("run", "interop", "train", "measure", "verify")),
    "show": ("#f3e8f3", "#432a45", ("present",)),
}


def floors(repository: Path = REPOSITORY) -> list[list[str]]:
    """Return the rooms of each floor that exist, the highest floor first."""
    configuration = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))
    layers = configuration["tool"]["importlinter"]["contracts"][0]["layers"]
    rows = [[room.strip(" ()") for room in layer.replace(":", "|").split("|")] for layer in layers]
    package = repository / "src/shardwise"
    coloured = {room for *_, rooms in COLOURS.values() for room in rooms}
    exists = {room for room in coloured if (package / room).is_dir() or (package / f"{room}.py").is_file()}
    return [row for row in ([room for room in row if room in exists] for row in rows) if row]


def draw_floors(rows: list[list[str]]) -> str:
    """Return an SVG with one row of boxes per floor, each resting on those that it may import."""
    height = len(rows) * (HEIGHT + GAP) + GAP
    below = "; ".join(", ".join(row) for row in rows)
    boxes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="14" role="img" aria-label="{TITLE}. From the top: {below}.">',
        f"<title>{TITLE}</title>",
        f"<style>{_style()}</style>",
    ]
    for number, row in enumerate(rows):
        width = (WIDTH - GAP * (len(row) + 1)) / len(row)
        top = GAP + number * (HEIGHT + GAP)
        for position, room in enumerate(row):
            left = GAP + position * (width + GAP)
            boxes.append(
                f'<rect x="{left:g}" y="{top}" width="{width:g}" height="{HEIGHT}" rx="4" '
                f'class="{_group(room)}"/>'
                f'<text x="{left + width / 2:g}" y="{top + HEIGHT / 2 + 5:g}" text-anchor="middle">'
                f"{escape(room)}</text>"
            )
    return "\n".join([*boxes, "</svg>", ""])


def _group(room: str) -> str:
    return next((f"group-{number}" for number, (_, _, rooms) in enumerate(COLOURS.values()) if room in rooms), "group")


def _style() -> str:
    light = ["rect { fill: #eeeeee; stroke: #7a8794 }", "text { fill: #1d2733 }"]
    dark = ["rect { fill: #333333 }", "text { fill: #e6edf3 }"]
    for number, (on_light, on_dark, _) in enumerate(COLOURS.values()):
        light.append(f"rect.group-{number} {{ fill: {on_light} }}")
        dark.append(f"rect.group-{number} {{ fill: {on_dark} }}")
    return " ".join([*light, f"@media (prefers-color-scheme: dark) {{ {' '.join(dark)} }}"])


def main() -> None:
    """Write the picture."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    path.write_text(draw_floors(floors()), encoding="utf-8")


if __name__ == "__main__":
    main()
