"""Decoders as transformers defines them, read and planned here: one command for counts, names, plans and refusals.

    python benchmarks/decoders.py [--parts files list changes names commands] [--configs FOLDER] [--changes 300] [--seed 1]
        [--processes 2] [--families NAME ...]

Parts, each with its figures, and every case that is wrong:

- `files`: config.json files that people publish (`tests/crosscheck/public_configs.jsonl`, or a folder with `counts.csv`: name,
  parameters, parameters of the text part), exact, refused or different;
- `list`: every causal language model of transformers at its default config, beside the state in `tests/crosscheck/decoders.csv`;
- `changes`: configs with one key changed;
- `names`: names and shapes of parameters, `show models --against-transformers`;
- `commands`: `plan`, `estimate` and `serve estimate` of each exact one with its config.json, and `plan` with adapters, also on
  quantised weights: no traceback, and what each refuses, by its reason.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).parents[1] / "tests"
sys.path.append(str(TESTS))

from crosscheck.decoders import REQUIRED_KEYS, classify, code_year, counted, read_decoders  # noqa: E402
from crosscheck.one_key_changes import OneKeyChange, draw_changes, judge  # noqa: E402

from shardwise.model.huggingface.config import parse_config  # noqa: E402
from shardwise.model.parameters_and_flops import num_params  # noqa: E402
from shardwise.present.command_line import main as run_command  # noqa: E402
from shardwise.values.errors import InputError  # noqa: E402
from shardwise.verify.transformers_judge import compare_with_transformers  # noqa: E402

TRAINING, SERVING = "h100:64", "h100:8"
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "plan": ("plan", "CONFIG", TRAINING),
    "estimate": ("estimate", "CONFIG", TRAINING, "--layout", "fsdp=64 micro_batch_seqs=1"),
    "serve estimate": (
        "serve", "estimate", "CONFIG", SERVING, "--layout", "replicas=8", "--isl", "1000", "--osl", "200", "--concurrency", "8",
    ),
    "plan, LoRA": ("plan", "CONFIG", TRAINING, "--set", "job.lora_rank=16"),
    "plan, QLoRA": ("plan", "CONFIG", TRAINING, "--set", "job.lora_rank=16", "--precision", "qlora_nf4"),
}  # fmt: skip
FINE, WRONG_INPUT, NOTHING_FITS = 0, 2, 3


class CommandOutcome(NamedTuple):
    """What a command on one config gave: its exit status (None: a traceback), what it said on stderr, and its CPU seconds."""

    family: str
    command: str
    status: int | None
    message: str
    cpu_s: float


def report(part: str, states: Counter[str], wrong: Iterable[str]) -> bool:
    """Print the states of a part's cases and what is wrong; whether nothing is."""
    problems = [*wrong]
    print(f"{part:<10} {', '.join(f'{count} {state}' for state, count in states.most_common())}")
    for problem in problems:
        print(f"  wrong: {problem}")
    return not problems


# --- files that people publish -------------------------------------------------------------------------------------------------


def published_configs(folder: Path | None) -> Iterator[tuple[str, Mapping[str, Any], set[int]]]:
    """Yield name, config and the counts that are right: of all parts together, or of the text part; none where nobody says."""
    if folder is None:
        for line in (TESTS / "crosscheck" / "public_configs.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            yield row["name"], row["config"], {row["num_params"]} - {None}
        return
    with (folder / "counts.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            config = json.loads((folder / f"{row['config']}.json").read_text(encoding="utf-8"))
            counts = {int(row[key]) for key in ("parameters", "parameters_of_text_part") if row[key]}
            yield row["config"], config, counts


def check_files(folder: Path | None) -> bool:
    states, wrong = Counter[str](), []
    for name, config, counts in published_configs(folder):
        try:
            model = parse_config(config)
        except InputError as error:
            states["refused"] += 1
            print(f"  {name}: {error}")
            continue
        text = num_params(model)
        total = text + sum(part.num_params or 0 for part in model.omitted_parts)
        if not counts:
            states["read, of a count that is not known"] += 1
        elif {text, total} & counts:
            states["exact"] += 1
        else:
            states["different"] += 1
            wrong.append(f"{name}: {text:,} parameters, {total:,} with what is left out; {counts} in transformers")
    return report("files", states, wrong)


# --- the list of decoders and changes of their configs -------------------------------------------------------------------------


def check_list(families: Sequence[str], workers: ProcessPoolExecutor) -> bool:
    rows = [row for row in read_decoders() if not families or row.model_type in families]
    outcomes = workers.map(classify, [row.model_type for row in rows])
    states, wrong = Counter[str](), []
    for row, (state, count, reason) in zip(rows, outcomes, strict=True):
        states[state] += 1
        if (state, count, reason) != (row.state, row.num_params, row.reason) or row.year != code_year(row.model_type):
            wrong.append(
                f"{row.model_type}: {state} {count} {reason}; in the list {row.state} {row.num_params} {row.reason}"
            )
    judged = counted(rows)
    exact = sum(row.state == "exact" for row in judged)
    print(f"  {exact} of {len(judged)} that are counted are exact ({exact / max(len(judged), 1):.1%})")
    return report("list", states, wrong)


def check_changes(count: int, seed: int, families: Sequence[str], workers: ProcessPoolExecutor) -> bool:
    changes: list[OneKeyChange] = []
    for change in draw_changes(count if not families else 100 * count, seed):
        if (not families or change.model_type in families) and len(changes) < count:
            changes.append(change)
    states, wrong = Counter[str](), []
    for change, state in zip(changes, workers.map(judge, changes, chunksize=4), strict=True):
        known = state in ("exact", "refused", "unbuildable")
        states[state if known else "different"] += 1
        if not known:
            wrong.append(f"{change}: {state}")
    print(f"  {len(changes)} changes of {len({change.model_type for change in changes})} families, seed {seed}")
    return report("changes", states, wrong)


# --- names and shapes, and commands --------------------------------------------------------------------------------------------


def write_configs(folder: Path, families: Sequence[str]) -> list[Path]:
    """Write the default config.json of each exact family into a folder of its own; return the folders."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        folders = []
        for row in read_decoders():
            if row.state != "exact" or (families and row.model_type not in families):
                continue
            config = transformers.AutoConfig.for_model(row.model_type, **REQUIRED_KEYS.get(row.model_type, {}))
            values = {**config.to_dict(), "model_type": row.model_type}
            folders.append(folder / row.model_type)
            folders[-1].mkdir()
            (folders[-1] / "config.json").write_text(json.dumps(values, default=str), encoding="utf-8")
    return folders


def compare_names(folder: Path) -> tuple[str, str]:
    """Return the state of a config's parameters beside transformers' by name and shape, and what differs."""
    try:
        comparison = compare_with_transformers(folder)
    except InputError as error:
        return "refused", str(error)
    return ("different", comparison.first_difference) if comparison.first_difference else ("equal", "")


def check_names(folders: Sequence[Path], workers: ProcessPoolExecutor) -> bool:
    states, wrong = Counter[str](), []
    for folder, (state, difference) in zip(folders, workers.map(compare_names, folders, chunksize=4), strict=True):
        states[state] += 1
        if state != "equal":
            wrong.append(f"{folder.name}: {difference}")
    return report("names", states, wrong)


def try_command(command: str, folder: Path) -> CommandOutcome:
    """Run a command on a config.json, as a user would, in this process."""
    words = [str(folder) if word == "CONFIG" else word for word in COMMANDS[command]]
    out, errors, start = io.StringIO(), io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            status: int | None = run_command(words)
        except SystemExit as stop:  # argparse
            status = int(stop.code or 0)
        except Exception:  # what this looks for
            return CommandOutcome(folder.name, command, None, traceback.format_exc(), time.process_time() - start)
    return CommandOutcome(folder.name, command, status, errors.getvalue(), time.process_time() - start)


def shorten_reason(message: str, family: str) -> str:
    """Return the kind of a refusal: its first line without the family's name and without numbers."""
    line = message.strip().splitlines()[0] if message.strip() else "nothing said"
    return re.sub(r"\d[\d,.]*", "N", line.replace(family, "MODEL"))[:150]


def check_commands(folders: Sequence[Path], workers: ProcessPoolExecutor) -> bool:
    passed = True
    for command in COMMANDS:
        states, wrong, reasons = Counter[str](), [], defaultdict[str, list[str]](list)
        outcomes = [*workers.map(partial(try_command, command), folders, chunksize=2)]
        for outcome in outcomes:
            names = {FINE: "fine", WRONG_INPUT: "refused", NOTHING_FITS: "that do not fit"}
            states[
                names.get(outcome.status, "with a traceback") if outcome.status is not None else "with a traceback"
            ] += 1
            if outcome.status == WRONG_INPUT:
                reasons[shorten_reason(outcome.message, outcome.family)].append(outcome.family)
            elif outcome.status not in names:
                wrong.append(f"{outcome.family}: {outcome.message.strip().splitlines()[-1]}")
        slowest = sorted(outcomes, key=lambda outcome: -outcome.cpu_s)[:3]
        passed &= report(command, states, wrong)
        print("  slowest: " + ", ".join(f"{outcome.family} {outcome.cpu_s:.1f} s" for outcome in slowest))
        for reason, families in sorted(reasons.items(), key=lambda item: -len(item[1])):
            print(f"  {len(families)} refused: {reason} ({', '.join(families[:4])}{', ...' * (len(families) > 4)})")
    return passed


def main() -> int:
    """Print the figures of each part; the exit status says whether anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = ("files", "list", "changes", "names", "commands")
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--configs", type=Path)
    parser.add_argument("--changes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--families", nargs="+", default=())
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.processes) as workers, tempfile.TemporaryDirectory() as folder:
        parts: Mapping[str, Callable[[Sequence[Path]], bool]] = {
            "files": lambda _: check_files(arguments.configs),
            "list": lambda _: check_list(arguments.families, workers),
            "changes": lambda _: check_changes(arguments.changes, arguments.seed, arguments.families, workers),
            "names": lambda folders: check_names(folders, workers),
            "commands": lambda folders: check_commands(folders, workers),
        }
        needs_files = {"names", "commands"} & {*arguments.parts}
        folders = write_configs(Path(folder), arguments.families) if needs_files else []
        passed = [parts[part](folders) for part in names if part in arguments.parts]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
