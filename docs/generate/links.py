"""Links of a Markdown page: where they stand, and how GitHub names the anchors of headings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

FENCE = re.compile(r"^(```+|~~~+).*?^\1$", re.DOTALL | re.MULTILINE)
INLINE_CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"(?<=\]\()([^()\s]+)(?=\))")
HEADING = re.compile(r"^#+ +(.+?)(?: +#+)?$", re.MULTILINE)
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:")


def replace_links(text: str, replacement: Callable[[str], str]) -> str:
    """The page with each target of a link replaced; code stays as it is.

    >>> replace_links("[a](b.md), `[a](b.md)`", str.upper)
    '[a](B.MD), `[a](b.md)`'
    """
    parts, end = [], 0
    for code in _code(text):
        parts += [LINK.sub(lambda link: replacement(link[1]), text[end : code.start()]), code.group()]
        end = code.end()
    return "".join([*parts, LINK.sub(lambda link: replacement(link[1]), text[end:])])


def relative_links(text: str) -> list[str]:
    """Targets of the links that stay within the repository, anchors included.

    >>> relative_links("[a](b.md#c) [d](https://example.org) [e](#f)")
    ['b.md#c', '#f']
    """
    targets: list[str] = []
    replace_links(text, lambda target: targets.append(target) or target)
    return [target for target in targets if not SCHEME.match(target)]


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings: lower case, spaces as hyphens, punctuation left out, a number behind repeated ones.

    >>> sorted(anchors("# One\\n## 1.1: a `b`, c\\n# One"))
    ['11-a-b-c', 'one', 'one-1']
    """
    counts: Counter[str] = Counter()
    slugs = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        slug = re.sub(r"[^\w\- ]", "", LINK.sub("", heading).lower()).strip().replace(" ", "-")
        slugs.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
        counts[slug] += 1
    return slugs


def _code(text: str) -> Iterator[re.Match[str]]:
    """Fenced blocks, and code within lines outside of them, in order."""
    end = 0
    for fence in FENCE.finditer(text):
        yield from INLINE_CODE.finditer(text, end, fence.start())
        yield fence
        end = fence.end()
    yield from INLINE_CODE.finditer(text, end)
