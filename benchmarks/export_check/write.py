"""Random launches of a target, each written to a folder of its own: what the judges beside this file read.

Each is read back from its files first, and is the launch that it was but for what the export says is lost.

PYTHONPATH=src:tests python benchmarks/export_check/write.py TARGET COUNT FOLDER
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

from export.random_launches import runnable_launches

from shardwise.interop.frameworks.targets import get_target
from shardwise.interop.launches.export_launch import build_files
from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.target import Target
from shardwise.interop.launches.translate_launch import lost_fields, to_options
from shardwise.interop.read_launch import parse_launch
from shardwise.interop.text_formats.option_tables import Options


def main(name: str, count: str, folder: str) -> None:
    target = get_target(name)
    for i, launch in enumerate(islice(runnable_launches(name, 3), int(count))):
        options = to_options(target, launch)
        files = build_files(target, options, launch)
        require_same_launch(target, launch, options)
        launch_folder = Path(folder, f"{i:04}")
        launch_folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (launch_folder / file).write_text(text, encoding="utf-8")


def require_same_launch(target: Target, launch: Launch, options: Options) -> None:
    """Raise `ValueError` unless a target's files read back as the launch, but for fields that are lost.

    A run without a number of tokens may have the framework's own length.
    """
    model = None if target.includes_model else launch.model
    read = parse_launch(target.write(options, launch), launch.machines, target=target.name, model=model).launch.fields()
    lost = {field for field, _ in lost_fields(target, launch, options)} | (
        {"job.tokens"} if not launch.job.tokens else set()
    )
    differing = [name for name, value in launch.fields().items() if name not in lost and read[name] != value]
    if differing:
        raise ValueError(
            f"{target.name}: {launch.model.name}, {launch.layout}: {', '.join(differing)} read back otherwise"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
