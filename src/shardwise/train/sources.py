"""Where a run's data come from: folders of token shards, each with the weight by which its sequences are drawn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from shardwise.errors import InputError
from shardwise.units import parse_quantity

Source = tuple[str, float]  # the folder and its weight: in a recipe


def parse_source(text: str) -> Source:
    """What `--data` says: DIR, of weight 1, or DIR=WEIGHT. Raises `InputError` for a weight that is not positive.

    >>> parse_source("data"), parse_source("shards/code=0.3")
    (('data', 1.0), ('shards/code', 0.3))
    """
    folder, equals, weight = text.rpartition("=")
    if not equals or Path(text).is_dir():
        return text, 1.0
    found = parse_quantity(weight, what="--data", unit="")
    if not folder or not 0 < found < math.inf:
        raise InputError(
            f"--data: found {text!r}; DIR or DIR=WEIGHT, with a weight above 0, is required, such as data=0.7"
        )
    return folder, found


def source_words(sources: Sequence[Source]) -> list[str]:
    """The flags that say the same."""
    words = [folder if weight == 1.0 else f"{folder}={weight!r}" for folder, weight in sources]
    return [word for source in words for word in ("--data", source)]


def source_names(sources: Sequence[Source]) -> tuple[str, ...]:
    """What each is called in logs and summaries: its folder's own name, or its whole path where two share one.

    >>> source_names([("a/web", 1.0), ("a/code", 1.0)]), source_names([("a/en", 1.0), ("b/en", 1.0)])
    (('web', 'code'), ('a/en', 'b/en'))
    """
    short = [Path(folder).name or folder for folder, _ in sources]
    counts = Counter(short)
    return tuple(name if counts[name] == 1 else folder for name, (folder, _) in zip(short, sources, strict=True))


def require_distinct(sources: Sequence[Source]) -> None:
    """Raise `InputError` where a folder is given twice."""
    counts = Counter(Path(folder) for folder, _ in sources)
    twice = [str(folder) for folder, count in counts.items() if count > 1]
    if twice:
        raise InputError(
            f"--data: found {', '.join(twice)} more than once; each folder once, with its weight, is required"
        )
