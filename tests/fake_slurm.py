"""sbatch, srun, sacct, squeue and scancel of a cluster that is this machine, with SLURM's rules on arrays, times and requeues.

`install(folder)` writes the programs. A job array runs its tasks side by side up to its cap; each ends at its time limit, in
minutes that are `minute_s` long, with SIGTERM and then SIGKILL. A task whose number is in `preempt` is stopped at its first run,
and runs again with `SLURM_RESTART_COUNT` if the job may be requeued. Sources: SLURM documentation, sbatch, sacct, job_array.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

OPTIONS = {
    "array", "account", "comment", "constraint", "cpus-per-task", "error", "exclude", "gpus-per-node", "gres", "job-name", "mem",
    "nodes", "ntasks-per-node", "open-mode", "output", "partition", "qos", "requeue", "signal", "time", "wckey", "exclusive",
    "ntasks",
}  # fmt: skip
MAX_ARRAY_SIZE = 1001  # slurm.conf, MaxArraySize: the largest index is one less
INTERRUPT_S = (
    8.0  # after which a task is preempted, or its node fails: it must have begun by then on a busy machine too
)
GRACE_S = 2.0  # slurm.conf, KillWait
HOME = Path(os.environ.get("FAKE_SLURM", "/nonexistent"))
SETTINGS = {"minute_s": 60.0, "max_minutes": 1440, "preempt": [], "partitions": ["gpu"], "fail_nodes": []}


def install(folder: Path, **settings: object) -> dict[str, str]:
    """Write the programs below a folder, and return the environment in which they are used."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name in ("sbatch", "srun", "sacct", "squeue", "scancel", "scontrol"):
        program = programs / name
        program.write_text(
            f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {name} "$@"\n', encoding="utf-8"
        )
        program.chmod(0o755)
    (folder / "jobs").mkdir()
    (folder / "settings.json").write_text(json.dumps({**SETTINGS, **settings}), encoding="utf-8")
    return {"FAKE_SLURM": str(folder), "PATH": f"{programs}:{os.environ['PATH']}"}


def refuse(text: str) -> None:
    """End as sbatch does when it refuses a job."""
    sys.exit(f"sbatch: error: {text}")


def read_options(script: str) -> dict[str, str]:
    """Return the options of a batch script: those before its first command, as sbatch reads them."""
    options: dict[str, str] = {}
    for line in script.splitlines()[1:]:
        if line.startswith("#SBATCH"):
            match = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(.*))?", line.strip())
            if match is None or match[1] not in OPTIONS:
                refuse(f"unrecognized option in {line!r}")
            else:
                options[match[1]] = (match[2] or "").strip("'\"")
        elif line.strip() and not line.startswith("#"):
            break
    return options


def parse_minutes(text: str) -> float:
    """Return minutes of M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        refuse(f"Invalid --time specification {text}")
    days, first, second, third = (None if part is None else int(part) for part in match.groups())  # type: ignore[union-attr]
    assert first is not None
    if days is not None:
        return days * 1440 + first * 60 + (second or 0) + (third or 0) / 60
    if third is not None:
        return first * 60 + (second or 0) + third / 60
    return first + (second or 0) / 60


def parse_array(text: str) -> tuple[list[int], int]:
    """Return the indices of an array and its cap."""
    ranges, _, cap = text.partition("%")
    indices: list[int] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            refuse(f"Invalid job array specification {text}")
        else:
            indices += range(int(match[1]), int(match[2] or match[1]) + 1)
    if max(indices) >= MAX_ARRAY_SIZE:
        refuse("Invalid job array specification: beyond MaxArraySize")
    if cap and not (cap.isdecimal() and int(cap) > 0):
        refuse(f"Invalid job array specification {text}")
    return indices, int(cap or len(indices))


def sbatch(path: str) -> None:
    """Check a batch script, start what runs it, and print the job's number."""
    settings = json.loads((HOME / "settings.json").read_text(encoding="utf-8"))
    script = Path(path).read_text(encoding="utf-8")
    if not script.startswith("#!"):
        refuse("This does not look like a batch script")
    options = read_options(script)
    minutes = parse_minutes(options.get("time", "60"))
    if minutes > settings["max_minutes"]:
        refuse("Requested time limit is invalid (missing or exceeds some limit)")
    if options.get("partition", settings["partitions"][0]) not in settings["partitions"]:
        refuse("invalid partition specified")
    if not options.get("nodes", "1").isdecimal() or int(options.get("nodes", "1")) < 1:
        refuse("invalid number of nodes")
    indices, cap = parse_array(options["array"]) if "array" in options else ([], 1)
    number = 1000 + len(list((HOME / "jobs").iterdir()))
    job = {"number": number, "indices": indices, "cap": cap, "minutes": minutes, "script": script, "options": options}
    (HOME / "jobs" / f"{number}.json").write_text(json.dumps(job), encoding="utf-8")
    for index in indices or [None]:
        set_state(number, index, "PENDING")
    subprocess.Popen(
        [sys.executable, __file__, "schedule", str(number)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    print(f"Submitted batch job {number}")


def task_id(number: int, index: int | None) -> str:
    return f"{number}" if index is None else f"{number}_{index}"


def set_state(number: int, index: int | None, state: str) -> None:
    path = HOME / f"state-{task_id(number, index)}"
    path.with_suffix(".new").write_text(state, encoding="utf-8")
    path.with_suffix(".new").replace(path)


def schedule(number: int) -> None:
    """Run the tasks of a job, at most its cap side by side."""
    job = json.loads((HOME / "jobs" / f"{number}.json").read_text(encoding="utf-8"))
    settings = json.loads((HOME / "settings.json").read_text(encoding="utf-8"))
    waiting = [(index, 0) for index in job["indices"] or [None]]
    running: dict[int | None, tuple[subprocess.Popen[bytes], float, int]] = {}
    most_running = 0
    while waiting or running:
        while waiting and len(running) < job["cap"]:
            index, restarts = waiting.pop(0)
            running[index] = (start_task(job, index, restarts), time.monotonic(), restarts)
            set_state(number, index, "RUNNING")
        if len(running) > most_running:
            most_running = len(running)
            (HOME / f"most-{number}").write_text(str(most_running), encoding="utf-8")
        for index, (process, started, restarts) in list(running.items()):
            elapsed_s, preempted = time.monotonic() - started, index in settings["preempt"] and not restarts
            code = process.poll()
            if code is None and (HOME / f"cancel-{task_id(number, index)}").exists():
                end_task(process)
                set_state(number, index, "CANCELLED by 0")
            elif code is None and index in settings["fail_nodes"] and elapsed_s > INTERRUPT_S:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                set_state(number, index, "NODE_FAIL")
            elif code is None and preempted and elapsed_s > INTERRUPT_S:
                end_task(process)
                if "requeue" in job["options"]:
                    set_state(number, index, "PENDING")
                    waiting.append((index, restarts + 1))
                else:
                    set_state(number, index, "PREEMPTED")
            elif code is None and elapsed_s > job["minutes"] * settings["minute_s"]:
                end_task(process)
                set_state(number, index, "TIMEOUT")
            elif code is not None:
                set_state(number, index, "COMPLETED" if code == 0 else "FAILED")
            else:
                continue
            del running[index]
        time.sleep(0.05)


def start_task(job: dict, index: int | None, restarts: int) -> subprocess.Popen[bytes]:  # type: ignore[type-arg]
    """Start the script of a task with SLURM's variables."""
    number, nodes = job["number"], int(job["options"].get("nodes", "1"))
    variables = {
        "SLURM_JOB_ID": number + (index or 0),
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": nodes,
        "SLURM_NODEID": 0,
    }
    variables["SLURM_JOB_NODELIST"] = "node0"
    if index is not None:
        variables |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": index}
    if restarts:
        variables["SLURM_RESTART_COUNT"] = restarts
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    path = HOME / f"script-{task_id(number, index)}-{restarts}"
    path.write_text(job["script"], encoding="utf-8")
    return subprocess.Popen(["bash", str(path)], env=environment, start_new_session=True)


def end_task(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def srun(words: list[str]) -> int:
    """Run a command once for each node of the job."""
    while words and words[0].startswith("--"):
        option = words.pop(0)
        if option in ("--output", "--error"):
            words.pop(0)
    processes = [
        subprocess.Popen(
            words, env={**os.environ, "SLURM_NODEID": str(node), "SLURM_PROCID": str(node), "SLURM_LOCALID": "0"}
        )
        for node in range(int(os.environ["SLURM_JOB_NUM_NODES"]))
    ]
    return max(process.wait() for process in processes)


def sacct(words: list[str]) -> None:
    """Print the states of jobs, as --parsable2 does."""
    requested = {words[place + 1] for place, word in enumerate(words) if word == "-j"}
    print("JobID|State|NodeList")
    for path in sorted(HOME.glob("state-*")):
        name = path.name.removeprefix("state-")
        if not requested or name.partition("_")[0] in requested or name in requested:
            print(f"{name}|{path.read_text(encoding='utf-8')}|node0")


def main(program: str, words: list[str]) -> int:
    if program == "sbatch":
        sbatch(words[-1])
    elif program == "schedule":
        schedule(int(words[0]))
    elif program == "srun":
        return srun(words)
    elif program in ("sacct", "squeue"):
        sacct(words)
    elif program == "scancel":
        (HOME / f"cancel-{words[0]}").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
