"""Words that the written files of a deployment start an engine with, found without the package: by running the script with
programs of the engine's names that print their words, and in the manifest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

PRINT_WORDS = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
NODE_VARIABLES = {"$(LWS_WORKER_INDEX)": "0", "$(LWS_LEADER_ADDRESS)": "leader"}


def script_words(folder: Path, programs: tuple[str, ...]) -> list[str]:
    """Run a folder's script with stand-ins for programs, and return the words that the last of them was given."""
    with tempfile.TemporaryDirectory() as place:
        for program in programs:
            path = Path(place, program)
            path.write_text(PRINT_WORDS, encoding="utf-8")
            path.chmod(0o755)
        environment = {**os.environ, "PATH": f"{place}:{os.environ['PATH']}", "NODE_RANK": "0", "HEAD_NODE": "leader"}
        done = subprocess.run(
            ["bash", str(folder / "launch.sh")], capture_output=True, text=True, env=environment, check=True
        )
    return list(json.loads(done.stdout))


def manifest_words(folder: Path) -> tuple[list[str], int, int]:
    """Return the words of the leader's command in a folder's manifest, its replicas and the pods of a group."""
    text = (folder / "kubernetes.yaml").read_text(encoding="utf-8")
    workload: Mapping[str, Any] = next(
        document for document in yaml.safe_load_all(text) if document["kind"] in ("Deployment", "LeaderWorkerSet")
    )
    spec = workload["spec"]
    group = spec.get("leaderWorkerTemplate")
    pod = group["leaderTemplate"] if group else spec["template"]
    words = pod["spec"]["containers"][0]["command"]
    for name, value in NODE_VARIABLES.items():
        words = [word.replace(name, value) for word in words]
    return words, spec["replicas"], group["size"] if group else 1


def judge(root: Path, problems_of: Callable[[Path, Mapping[str, Any]], Iterator[str]]) -> int:
    """Print what is wrong with each folder under `root`, and return 1 if anything is, or if there is none."""
    folders = sorted(path.parent for path in root.rglob("expected.json"))
    taken = 0
    for folder in folders:
        expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
        try:
            problems = list(problems_of(folder, expected))
        except (Exception, SystemExit) as error:
            problems = [f"{type(error).__name__}: {error}"]
        taken += not problems
        for problem in problems:
            print(f"{folder}: {' '.join(problem.split())[:300]}")
    print(f"{taken} of {len(folders)} deployments are taken")
    return int(taken < len(folders) or not folders)


def differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """Yield the values that are not as expected."""
    for name, value in expected.items():
        if found[name] != value:
            yield f"{name} is {found[name]!r}, expected {value!r}"
