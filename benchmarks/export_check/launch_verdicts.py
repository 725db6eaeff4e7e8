"""Parts that judges of launches share: folders on the command line, a line for each refused launch, and their count."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def launch_arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser for folders that hold launches, at any depth."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a launch, or a folder of launches")
    return parser


def find_launches(folders: Iterable[Path], file: str) -> list[Path]:
    """Return the folders at or below some that have a file of this name."""
    return sorted({path.parent for folder in folders for path in folder.rglob(file)})


def print_refusals(launches: Sequence[Path], problem: Callable[[Path], str | None]) -> int:
    """Print a line for each launch that the framework refuses, then how many it takes; return the exit status.

    `problem` returns why a launch is refused, or None. No launch at all is a failure too.
    """
    num_refused = 0
    for launch in launches:
        reason = problem(launch)
        if reason is not None:
            num_refused += 1
            print(f"{launch}: refused: {' '.join(reason.split())[:300]}", flush=True)
    print(f"{len(launches) - num_refused} of {len(launches)} accepted", flush=True)
    return int(num_refused > 0 or not launches)
