"""Random launches of a target, each written to a folder of its own: what the judges beside this file read.

PYTHONPATH=src:tests python benchmarks/export_check/write.py TARGET COUNT FOLDER
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

from export.random_launches import runnable_launches

from shardwise.interop.frameworks.targets import get_target
from shardwise.interop.launches.export_launch import build_files
from shardwise.interop.launches.translate_launch import to_options


def main(name: str, count: str, folder: str) -> None:
    target = get_target(name)
    for i, launch in enumerate(islice(runnable_launches(name, 3), int(count))):
        own = Path(folder, f"{i:04}")
        own.mkdir(parents=True, exist_ok=True)
        for file, text in build_files(target, to_options(target, launch), launch).items():
            (own / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
