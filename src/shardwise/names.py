"""Names that are not known: what was found, what there is, and what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Of two texts that are as alike as difflib's ratio: "tpp" and "tp" have 0.8, "colour" and "source" 0.5. A choice.
CLOSE = 0.65
MOST_NAMED = 3  # of names that are equally near
LONGEST = 100  # characters: what is longer is no misspelt name


def unknown(found: object, known: Iterable[object]) -> str:
    """What an error says of a name that is none of those known: what was found, the nearest of them, and all of them.

    >>> unknown("hbn", ["host", "hbm", "vmem"])
    "found 'hbn' (did you mean 'hbm'?); one of host, hbm, vmem is required"
    """
    names = list(map(str, known))
    return f"found {found!r}{did_you_mean(found, names)}; one of {', '.join(names)} is required"


def did_you_mean(found: object, known: Iterable[object]) -> str:
    """The known names nearest to what was found, as an error says them; empty where none is near.

    >>> did_you_mean("--batch_tokens", ["--batch-tokens", "--seq-len"])
    " (did you mean '--batch-tokens'?)"
    >>> did_you_mean("llama-70b", ["llama-2-70b", "llama-3-8b", "llama-3-70b"])
    " (did you mean 'llama-2-70b' or 'llama-3-70b'?)"
    >>> did_you_mean("falcon", ["h100", "b200"])
    ''
    """
    names = [repr(name) for name in nearest(found, known)]
    listed = " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    return f" (did you mean {listed}?)" if names else ""


def nearest(found: object, known: Iterable[object]) -> list[str]:
    """The known names most like what was found, the first few of equals; none where nothing is like it.

    Case, separators and what stands before a slash do not count: "meta-llama/Llama-3.1-8B" is "llama-3.1-8b".

    >>> nearest("meta-llama/Llama-3.1-8B-Instruct", ["llama-3-8b", "llama-3.1-8b", "llama-3.1-70b"])
    ['llama-3.1-8b']
    """
    if not isinstance(found, str) or len(found) > LONGEST:
        return []
    scores = {str(name): _likeness(_plain(found), _plain(str(name))) for name in known}
    best = max(scores.values(), default=0.0)
    return [name for name, score in scores.items() if score == best >= CLOSE][:MOST_NAMED]


def _plain(text: str) -> str:
    return re.sub(r"[-_\s]", "", text.rstrip("/").rpartition("/")[2].casefold())


def _likeness(found: str, name: str) -> float:
    """From 0 to 1. A name that is a part of the text comes before one that begins or ends with it, the longer part first."""
    from difflib import SequenceMatcher

    if found == name or not found or not name:
        return float(found == name)
    if len(name) > 2 and name in found:
        return 0.9 + 0.1 * len(name) / len(found)
    if len(found) > 1 and (name.startswith(found) or name.endswith(found)):
        return 0.7 + 0.2 * len(found) / len(name)
    return SequenceMatcher(None, found, name, autojunk=False).ratio()
