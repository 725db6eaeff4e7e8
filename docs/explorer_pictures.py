"""Draw the pictures of docs/explorer.md: the explorer's views as a real Chromium shows them.

python docs/explorer_pictures.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal, NamedTuple

from playwright.sync_api import Browser

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from web.chromium import PATH, WHY, browser, explorer  # noqa: E402

JOB = "model=llama-3-8b&cluster=h100:64&batch_tokens=1Mi&seq_len=8192"
LAYOUT = f"{JOB}&layout=tp=2+pp=4+fsdp=8+zero_stage=1"
SEARCHED_MS = 120_000


class Shot(NamedTuple):
    """A picture: its name, the state, what has to be there, the size of the window."""

    name: str
    query: str
    until: str
    size: tuple[int, int]
    scheme: Literal["light", "dark"] = "light"


SHOTS = (
    Shot("explorer-overview", LAYOUT, ".takes", (1280, 1500)),
    Shot("explorer-illegal", f"{JOB}&layout=tp=64", ".takes", (1280, 700)),
    Shot("explorer-notation", f"{JOB}&layout=tp=2+fsdp=32&view=notation", ".part", (1280, 640)),
    Shot("explorer-memory", f"{LAYOUT}&view=memory", ".segment", (1280, 640)),
    Shot("explorer-schedule", f"{LAYOUT}+schedule=zb_h1&view=schedule", ".pass", (1280, 700), "dark"),
    Shot("explorer-batch", f"{LAYOUT}&view=batch", ".disc", (1280, 700), "dark"),
)


def draw(chromium: Browser, url: str, shot: Shot) -> None:
    """One picture."""
    width, height = shot.size
    page = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=shot.scheme).new_page()
    page.goto(f"{url}?{shot.query}")
    page.wait_for_selector(shot.until, timeout=SEARCHED_MS)
    page.wait_for_timeout(1500)  # figures that follow one another
    page.screenshot(path=ROOT / "docs" / "pictures" / f"{shot.name}.png")
    page.context.close()


def main() -> int:
    """Draw all of them. Returns an exit code."""
    if PATH is None:
        print(WHY, file=sys.stderr)
        return 1
    with browser() as chromium, explorer() as url:
        for shot in SHOTS:
            draw(chromium, url, shot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
