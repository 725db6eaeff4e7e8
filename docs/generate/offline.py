"""Whether a built site needs nothing but its own folder: no page loads a script, a style, a font or a picture from another host.

python docs/generate/offline.py build/site
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data", "link": "href"}
STYLE = re.compile(r"url\(\s*['\"]?((?:https?:)?//[^)'\"]+)")
ELSEWHERE = re.compile(r"(?:https?:)?//")
NAMED_ONLY = ("canonical", "next", "prev")  # kinds of <link> that load nothing


class Loads(HTMLParser):
    """What a page loads from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called for each element."""
        attributes = dict(attrs)
        target = attributes.get(LOADS.get(tag, ""), "") or ""
        if ELSEWHERE.match(target) and not (tag == "link" and attributes.get("rel") in NAMED_ONLY):
            self.targets.append(target)


def loaded_from_elsewhere(site: Path) -> Iterator[str]:
    """A line for each page or style and each thing that it loads from another host."""
    for page in sorted(site.rglob("*.html")):
        parser = Loads()
        parser.feed(page.read_text(encoding="utf-8"))
        yield from (f"{page.relative_to(site)}: {target}" for target in parser.targets)
    for style in sorted(site.rglob("*.css")):
        yield from (
            f"{style.relative_to(site)}: {target}" for target in STYLE.findall(style.read_text(encoding="utf-8"))
        )


if __name__ == "__main__":
    foreign_loads = list(loaded_from_elsewhere(Path(sys.argv[1])))
    print("\n".join(foreign_loads) or "the site loads nothing from other hosts")
    sys.exit(1 if foreign_loads else 0)
