"""Words that the written files of a deployment start an engine with, found without the package: by running the script with
programs of the engine's names that print their words, and in the manifest."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

PRINT_WORDS = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
NODE_VARIABLES = {"$(LWS_WORKER_INDEX)": "0", "$(LWS_LEADER_ADDRESS)": "leader"}
SCRIPT_VARIABLES = {
    "NODE_RANK": "0",
    "HEAD_NODE": "leader",
    "NODE_ADDRESS": "here",
    "NODES": " ".join(map(str, range(64))),
}


def script_words(folder: Path, programs: tuple[str, ...], file: str = "launch.sh", instance: int = 0) -> list[str]:
    """Run a folder's script with stand-ins for programs, and return the words that the last of them was given; of pools for one
    instance."""
    with tempfile.TemporaryDirectory() as place:
        for program in programs:
            path = Path(place, program)
            path.write_text(PRINT_WORDS, encoding="utf-8")
            path.chmod(0o755)
        paths = {"PATH": f"{place}:{os.environ['PATH']}", "INSTANCE": str(instance)}
        environment = {**os.environ, **SCRIPT_VARIABLES, **paths}
        done = subprocess.run(["bash", str(folder / file)], capture_output=True, text=True, env=environment, check=True)
    return list(json.loads(done.stdout))


def manifest_words(folder: Path, name_end: str = "") -> tuple[list[str], int, int]:
    """Return the words of the leader's command in a folder's manifest, its replicas and the pods of a group: those of the first
    workload whose name ends so."""
    text = (folder / "kubernetes.yaml").read_text(encoding="utf-8")
    workload: Mapping[str, Any] = next(
        document
        for document in yaml.safe_load_all(text)
        if document["kind"] in ("Deployment", "LeaderWorkerSet") and document["metadata"]["name"].endswith(name_end)
    )
    spec = workload["spec"]
    group = spec.get("leaderWorkerTemplate")
    pod = group["leaderTemplate"] if group else spec["template"]
    words = pod["spec"]["containers"][0]["command"]
    for name, value in NODE_VARIABLES.items():
        words = [word.replace(name, value) for word in words]
    return words, spec["replicas"], group["size"] if group else 1


def router_problems(
    folder: Path, program: str, pools: Mapping[str, Mapping[str, Any]], parse: Callable[[list[str]], Any]
) -> Iterator[str]:
    """Yield what is wrong with the words of the router of two pools, in the script and in the manifest: each instance must be one
    of its pool, by the port of its script or the host of its pod."""
    starts = {pool: expected["starts"] for pool, expected in pools.items()}
    ports = {
        pool: [
            _port_of(script_words(folder, (program, "vllm", "python3"), f"{pool}.sh", index)) for index in range(count)
        ]
        for pool, count in starts.items()
    }
    router = parse(script_words(folder, (program,), "router.sh"))
    prefill = [url for url, _ in router.prefill_urls]
    for pool, urls in (("prefill", prefill), ("decode", router.decode_urls)):
        if [url.rsplit(":", 1)[1] for url in urls] != ports[pool]:
            yield f"router: {pool} instances {urls}, whose scripts listen on {ports[pool]}"
    shell = manifest_words(folder, "-router")[0][-1]
    router = parse(shlex.split(shell.partition(" exec ")[2]))
    names = {pool: _set_name(folder, pool) for pool in pools}
    for pool, urls in (("prefill", [url for url, _ in router.prefill_urls]), ("decode", router.decode_urls)):
        hosts = [url.removeprefix("http://").rsplit(":", 1)[0] for url in urls]
        if hosts != [f"{names[pool]}-{index}.{names[pool]}" for index in range(starts[pool])]:
            yield f"router: {pool} pods {hosts}"


def _port_of(words: list[str]) -> str:
    return words[words.index("--port") + 1]


def _set_name(folder: Path, pool: str) -> str:
    documents = yaml.safe_load_all((folder / "kubernetes.yaml").read_text(encoding="utf-8"))
    names = [str(document["metadata"]["name"]) for document in documents if document["kind"] == "LeaderWorkerSet"]
    return next(name for name in names if name.endswith(f"-{pool}"))


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


def differing(parsed: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """Yield the values that are not as expected."""
    for name, value in expected.items():
        if parsed[name] != value:
            yield f"{name} is {parsed[name]!r}, expected {value!r}"
