"""The folder of branches, as it is written: `branch.json` says what they begin with, `branches.jsonl` has a line for each.

{"batch_tokens", "learning_rate", "steps", "loss", "held_out_loss", "failed"}; `loss` is null where the branch failed, `failed`
null or the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.batch.branches import Branch, BranchPoint
from shardwise.batch.rows import json_rows, not_an_object, number_in, read_text
from shardwise.errors import InputError, require

KIND = "branch"
FILE = "branches.jsonl"
SCHEMA = "shardwise.batch_branch/1"  # of branch.json
REQUIRED = "the folder of branches that `shardwise batch branch` made"


def holds_branches(path: str | Path) -> bool:
    """Whether a folder is one of branches."""
    return Path(path, f"{KIND}.json").is_file()


def read_branch_point(path: str | Path) -> BranchPoint:
    """What the branches of a folder begin with. Raises `InputError` for a file that does not say it."""
    where = Path(path, f"{KIND}.json")
    try:
        said = json.loads(read_text(where, REQUIRED))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}; {REQUIRED} is required") from None
    if not isinstance(said, Mapping) or said.get("schema") != SCHEMA:
        found = said.get("schema") if isinstance(said, Mapping) else type(said).__name__
        raise InputError(f"{where}: found schema {found!r}; {SCHEMA!r} is required")
    problems: list[str] = []
    names = ("step", "batch_tokens", "learning_rate", "window_tokens")
    numbers = {name: number_in(said, name, str(where), problems, required=True) or 0.0 for name in names}
    require(problems)
    return BranchPoint(run=str(said.get("run")), **{**numbers, "step": int(numbers["step"])})  # type: ignore[arg-type]


def read_branches(path: str | Path) -> tuple[Branch, ...]:
    """The branches of a folder that have ended. Raises `InputError` with every line that is wrong."""
    where = Path(path, FILE)
    found: list[Branch] = []
    problems: list[str] = []
    for place, row in json_rows(read_text(where, REQUIRED), where):
        branch = _branch(row, place, problems)
        found += [branch] if branch else []
    require(problems)
    if not found:
        raise InputError(f"{where}: found no branches; a line for each is required")
    return tuple(found)


def _branch(row: Any, place: str, problems: list[str]) -> Branch | None:
    """The branch of a row, or None and what is wrong with it."""
    if not isinstance(row, Mapping):
        problems.append(not_an_object(row, place))
        return None
    before = len(problems)
    batch, rate, steps = (
        number_in(row, name, place, problems, required=True) for name in ("batch_tokens", "learning_rate", "steps")
    )
    loss, held_out = (number_in(row, name, place, problems) for name in ("loss", "held_out_loss"))
    failed = row.get("failed")
    if loss is None and not failed and len(problems) == before:
        problems.append(f"{place}: found neither a loss nor why it failed; one of them is required")
    if len(problems) > before or batch is None or rate is None or steps is None:
        return None
    return Branch(
        batch_tokens=batch, learning_rate=rate, steps=steps, loss=loss, held_out_loss=held_out,
        failed=None if failed is None else str(failed),
    )  # fmt: skip
