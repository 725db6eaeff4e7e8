"""Draw the loop of the product, from a problem to a reconciled run and back, into `docs/pictures/loop.svg`.

python docs/generate/loop.py [FILE]
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

PICTURE = Path(__file__).parents[2] / "docs/pictures/loop.svg"
TITLE = "The loop: plan, run, measure, reconcile"
WIDTH, BOX, HEIGHT, GAP = 920, 160, 84, 20  # in pixels
# Of each step: its name, what happens in it, and the verbs that do it.
STEPS = (
    ("describe", "model, cluster, job", "show, read"),
    ("plan", "search every layout", "plan, memory, explain"),
    ("run", "exactly that plan", "train, export"),
    ("measure", "step, memory, collectives", "trace, mfu"),
    ("reconcile", "prediction by term", "reconcile"),
)
BACK = "what was wrong becomes measured constants: calibrate, bench"


def draw_loop() -> str:
    """Return an SVG: a box for each step, arrows between them, and the arrow back from the last to the plan."""
    height = 2 * GAP + HEIGHT + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'style="max-width:100%;height:auto" font-family="sans-serif" font-size="13" role="img" aria-label="{_description()}">',
        f"<title>{TITLE}</title>",
        "<style>"
        ".box{fill:#e8eef7;stroke:#5b7aa8}.ink{fill:#17202b}.quiet{fill:#4a5866}.line{stroke:#5b7aa8;fill:none}.head{fill:#5b7aa8}"
        "@media (prefers-color-scheme: dark){.box{fill:#24344d;stroke:#7f9ccb}.ink{fill:#e6ebf0}.quiet{fill:#aab6c2}"
        ".line{stroke:#7f9ccb}.head{fill:#7f9ccb}}</style>",
    ]
    for number, (name, description, verbs) in enumerate(STEPS):
        start, middle = _left(number), _left(number) + BOX / 2
        parts.append(
            f'<rect class="box" x="{start:g}" y="{GAP}" width="{BOX}" height="{HEIGHT}" rx="6"/>'
            f'<text class="ink" x="{middle:g}" y="{GAP + 26}" font-size="15" font-weight="bold" text-anchor="middle">'
            f"{name}</text>"
            f'<text class="ink" x="{middle:g}" y="{GAP + 46}" text-anchor="middle">{escape(description)}</text>'
            f'<text class="quiet" x="{middle:g}" y="{GAP + 67}" font-family="monospace" font-size="12" text-anchor="middle">'
            f"{escape(verbs)}</text>"
        )
        if number:
            parts.append(_arrow(_left(number) - GAP, GAP + HEIGHT / 2, start))
    parts += _way_back(GAP + HEIGHT)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _left(number: int) -> float:
    return (WIDTH - len(STEPS) * BOX - (len(STEPS) - 1) * GAP) / 2 + number * (BOX + GAP)


def _arrow(start: float, y: float, end: float) -> str:
    return (
        f'<path class="line" d="M{start:g} {y:g}H{end - 6:g}"/>'
        f'<path class="head" d="M{end:g} {y:g}l-8 -4v8z"/>'
    )  # fmt: skip


def _way_back(bottom: float) -> list[str]:
    """Return the arrow from below the last box to below the plan, with its text."""
    first, last, low = _left(1) + BOX / 2, _left(len(STEPS) - 1) + BOX / 2, bottom + 30
    return [
        f'<path class="line" d="M{last:g} {bottom:g}V{low:g}H{first:g}V{bottom + 8:g}"/>',
        f'<path class="head" d="M{first:g} {bottom:g}l-4 8h8z"/>',
        f'<text class="ink" x="{(first + last) / 2:g}" y="{low + 20:g}" text-anchor="middle">{BACK}</text>',
    ]


def _description() -> str:
    steps = "; ".join(f"{name}: {description}, with {verbs}" for name, description, verbs in STEPS)
    return f"{TITLE}. {steps}. Back to the plan: {BACK}."


def main() -> None:
    """Write the picture to the file that is named, or to the documentation's."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    target.write_text(draw_loop(), encoding="utf-8")


if __name__ == "__main__":
    main()
