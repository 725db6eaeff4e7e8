"""`shardwise export`: a plan as the launch of a framework."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.present.cli.arguments import PLAN, add_output_arguments
from shardwise.present.rendering.report import Report, Section
from shardwise.values import Parser

if TYPE_CHECKING:
    from shardwise.interop.launches.export_launch import ExportedLaunch
    from shardwise.search import Plan

DESCRIPTION = """Write a plan as the launch of a framework: its configuration, a script that starts it, a batch script for SLURM
and a page that says what they are. What the framework cannot run is refused with the nearest layout that it can; what it has
no option for is listed. `shardwise show targets` lists the frameworks with their releases."""
EXAMPLES = (
    "shardwise plan llama-3-8b h100:64 --batch-tokens 1Mi --seq-len 8Ki --stack megatron --out plan.json",
    "shardwise export plan.json --to megatron --out run/",
    "shardwise export plan.json --to megatron --json",
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    plan, output = parser.groups("plan", "output")
    plan.add_argument("plan", metavar="PLAN", help=PLAN)
    plan.add_argument(
        "--to",
        required=True,
        metavar="TARGET",
        completes="targets",
        help="the framework, as `shardwise show targets` names it",
    )
    output.add_argument("--out", metavar="FOLDER", help="where to write the files; without it they are printed")
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """What was written, or the files themselves."""
    from shardwise.interop import export, get_target
    from shardwise.search import load_plan

    found = export(load_plan(arguments.plan), get_target(arguments.to))
    if arguments.out:
        write_folder(arguments.out, found.files)
    return json.dumps(found.payload(), indent=2) if arguments.json else _answer(found, arguments.out)


def write_launch(plan: Plan, folder: str) -> None:
    """Write the launch of the framework that a plan's stack is. Raises `InputError` where no framework runs the plan."""
    from shardwise.interop import TARGETS, export
    from shardwise.interop.frameworks.targets import find_target
    from shardwise.values import InputError

    target = find_target(plan)
    if target is None:
        raise InputError(
            f"--export: no framework of this plan's stack runs it; `shardwise export PLAN --to TARGET` with one of "
            f"{', '.join(TARGETS)} says why"
        )
    write_folder(folder, export(plan, target).files)


def write_folder(folder: str, files: Any) -> None:
    """Write texts by name into a folder, which is made. Raises `InputError` for one that cannot be written."""
    from shardwise.values import InputError

    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"--out: cannot write {folder}: {getattr(error, 'strerror', None) or error}") from None


def _answer(found: ExportedLaunch, folder: str | None) -> str | Report:
    """The files by name with what to know of them; the texts themselves, whole, where they are written nowhere."""
    listed = [f"not expressible: {text}" for text in found.not_expressible] + [
        f"note: {text}" for text in found.warnings
    ]
    if folder is None:
        texts = [f"==> {name} <==\n{text.rstrip()}" for name, text in found.files.items()]
        return "\n\n".join([*texts, "\n".join(listed)])
    written = [f"wrote {folder.rstrip('/')}/{name}" for name in found.files]
    title = f"{found.target}, {found.version}"
    return [Section([*written, *listed, f"start it on each node: {found.command}"], title=title)]
