"""Names that are not known: what was found, what there is, and what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Of two texts that are as alike as difflib's ratio: "tpp" and "tp" have 0.8, "colour" and "source" 0.5. A choice.
CLOSE = 0.65
MOST_NAMED = 3  # of names that are equally near
LEAST_PART = 5  # characters of a part of a name that means the name. A choice
LONGEST = 100  # characters: what is longer is no misspelt name


def unknown(found: object, known: Iterable[object]) -> str:
    """The part of an error about an unknown name: what was found, the nearest known name, and all of them.

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

    Where none is alike, those that contain it, if it is long enough to mean them.

    >>> nearest("bubble", ["roofline", "pipeline-bubbles", "zero-stages"])
    ['pipeline-bubbles']
    """
    if not isinstance(found, str) or len(found) > LONGEST:
        return []
    names = list(map(str, known))
    if found in names:  # which is not what is wrong
        return []
    scores = {name: _likeness(_plain(found), _plain(name)) for name in names}
    best = max(scores.values(), default=0.0)
    alike = [name for name, score in scores.items() if score == best >= CLOSE]
    return (alike or [name for name in names if len(found) >= LEAST_PART and _plain(found) in _plain(name)])[
        :MOST_NAMED
    ]


def _plain(text: str) -> str:
    return re.sub(r"[-_\s]", "", text.rstrip("/").rpartition("/")[2].casefold())


def _likeness(found: str, name: str) -> float:
    """From 0 to 1. A name that is a part of the text, or begins or ends with it, is the nearer the more of the longer it is."""
    from difflib import SequenceMatcher

    if found == name or not found or not name:
        return float(found == name)
    part = len(name) > 2 and name in found
    part = part or (len(found) > 1 and (name.startswith(found) or name.endswith(found)))
    if part:
        return 0.7 + 0.25 * min(len(name), len(found)) / max(len(name), len(found))
    return SequenceMatcher(None, found, name, autojunk=False).ratio()
