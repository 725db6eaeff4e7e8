"""Many tiny runs with injected faults, under a driver that is killed again and again: is the ledger right, and is nothing left?

    python benchmarks/experiment_faults.py --runs 500 --driver-kills 20
    python benchmarks/experiment_faults.py --runs 60 --driver-kills 5 --train

Each run is a shell command of some steps or, with `--train`, a training run of three steps by `shardwise train`. Some are
killed, hang, run out of memory, fill the disk, exceed their time limit, fail, leave a process that listens on a port and maps
shared memory, or fail at their first attempt only. What is checked: the state of every configuration, the number of attempts,
that no attempt ran twice, and that no process, port or file is left.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from shardwise.hardware import load_cluster
from shardwise.layout import Layout
from shardwise.measure.experiments.ledger import read_ledger
from shardwise.measure.experiments.process_cleanup import ATTEMPT_VARIABLE, PROC
from shardwise.model import Job, load_model
from shardwise.search import dump_plan, plan_layout

STEPS = 'for i in 1 2 3; do echo "step time: 0.01$i s"; sleep 0.05; done'
LEFTOVER = (
    'import socket, time; from multiprocessing import shared_memory as m; s = socket.create_server(("localhost", 0)); '
    'f = m.SharedMemory(create=True, size=4096); open("port", "w").write(str(s.getsockname()[1])); time.sleep(600)'
)
# Shell commands by fault, with the state that each must end in, and the number of attempts.
FAULTS = {
    "none": (STEPS, "done", 1),
    "kill": ("echo starts; kill -9 $$", "failed", 2),
    "hang": ("echo starts; sleep 600", "hung", 2),
    "out of memory": ('echo "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"; exit 1', "out of memory", 1),
    "full disk": ("echo state > /dev/full", "failed", 2),
    "time limit": ("while true; do echo still; sleep 0.2; done", "timeout", 2),
    "error": ("echo 'ValueError: no such layout'; exit 3", "failed", 1),
    "silent": ("true", "failed", 1),
    "leftover": (f"{STEPS}; setsid python3 -S -c '{LEFTOVER}' & while [ ! -s port ]; do sleep 0.05; done; {STEPS}", "done", 1),
    "transient": (f"if [ ! -e ../again ]; then touch ../again; kill -9 $$; fi; {STEPS}", "done", 2),
}  # fmt: skip
# The same with `shardwise train` in place of the steps: what is killed or stopped is a trainer, and memory runs out in torch.
TRAIN = "{python} -m shardwise train {folder}/plan.json --data {folder}/data --out run --steps"
TIMES = 's/.*"time_metrics.end_to_end(s)": \\([0-9.e-]*\\).*/step time: \\1 s/p'
TRAINING_STEPS = f"{TRAIN} 3 || exit; sed -n '{TIMES}' run/log.jsonl"
STARTED = f"{TRAIN} 1000000 & while [ ! -s run/log.jsonl ]; do sleep 0.1; done"
TRAINING_FAULTS = {
    "none": TRAINING_STEPS,
    "kill": f"{STARTED}; kill -9 $$",
    "hang": f"{STARTED}; pkill -STOP -P $!; kill -STOP $!; wait",
    "out of memory": "{python} -c 'import torch; torch.empty(1 << 50)'",
    "time limit": f"{STARTED}; while true; do echo still; sleep 1; done",
    "error": f"{TRAIN} none; exit 3",
    "leftover": FAULTS["leftover"][0].replace(STEPS, TRAINING_STEPS, 1).replace(STEPS, "true"),
    "transient": f"if [ ! -e ../again ]; then touch ../again; kill -9 $$; fi; {TRAINING_STEPS}",
}
MODEL = Path(__file__).parents[1] / "examples" / "small-llama" / "config.json"
HANG_AFTER_S, TIME_LIMIT_S = 3.0, 4.0  # of shell commands on an idle machine
TRAINING_PATIENCE = 30.0  # times as long for a trainer, which imports torch first
GRID = """
target = "command"
steps = 3
retries = 1
start = "1s"
hang_after = "{hang_s}s"
time_limit = "{limit_s}s"
[command]
line = 'echo "${VARIABLE}" >> {folder}/started; bash {folder}/faults/{{fault}}.sh'
pattern = 'step time: (?P<step_time_s>[0-9.]+) s'
[command.values]
run = {numbers}
"""


def write_plan(folder: Path) -> None:
    """Write the plan and the data of the training runs."""
    plan = plan_layout(
        load_model(str(MODEL)),
        load_cluster("local:1"),
        Job(global_batch_tokens=64, seq_len=16, precision="fp32"),
        Layout(),
    )
    dump_plan(plan, folder / "plan.json")
    command = ["tokenize", "--python-library", "100kB", "--vocab-size", "300", "--out", str(folder / "data")]
    subprocess.run([sys.executable, "-m", "shardwise", *command], check=True, stdout=subprocess.DEVNULL)


def write_grid(folder: Path, faults: list[str], patience: float, is_training: bool) -> Path:
    """Write a grid of one run for each fault of the list; its command looks up the fault by the run's number.

    Limits are `patience` times those of an idle machine.
    """
    (folder / "faults").mkdir()
    trained = TRAINING_FAULTS if is_training else {}
    for name, (command, _, _) in FAULTS.items():
        text = trained.get(name, command).replace("{python}", sys.executable).replace("{folder}", str(folder))
        (folder / "faults" / f"{name.replace(' ', '-')}.sh").write_text(text + "\n", encoding="utf-8")
    if is_training:
        write_plan(folder)
    numbered = "\n".join(f"{number} {fault.replace(' ', '-')}" for number, fault in enumerate(faults))
    (folder / "faults" / "list").write_text(numbered + "\n", encoding="utf-8")
    text = GRID.replace("{numbers}", str(list(range(len(faults))))).replace("{folder}", str(folder))
    text = (
        text.replace("{hang_s}", f"{HANG_AFTER_S * patience:g}")
        .replace("{limit_s}", f"{TIME_LIMIT_S * patience:g}")
        .replace("VARIABLE", ATTEMPT_VARIABLE)
        .replace(
            f"bash {folder}/faults/{{{{fault}}}}.sh",
            f'bash {folder}/faults/$(grep -m1 "^{{run}} " {folder}/faults/list | cut -d" " -f2).sh',
        )
    )
    path = folder / "grid.toml"
    path.write_text(text, encoding="utf-8")
    return path


def drive(folder: Path, grid: Path, devices: int, kills: int, seed: int) -> int:
    """Run the driver to its end, killed so many times before; return how often it was killed."""
    chance, num_killed = random.Random(seed), 0
    command = [
        sys.executable,
        "-m",
        "shardwise",
        "experiments",
        "run",
        str(grid),
        "--ledger",
        str(folder / "ledger.jsonl"),
    ]
    ledger = folder / "ledger.jsonl"
    while True:
        num_bytes = ledger.stat().st_size if ledger.exists() else 0
        with (folder / "driver.txt").open("ab") as output:
            driver = subprocess.Popen([*command, "--set", f"devices={devices}"], stdout=output, stderr=output)
        if num_killed == kills:
            driver.wait()
            return num_killed
        while driver.poll() is None and not (ledger.exists() and ledger.stat().st_size > num_bytes):
            time.sleep(0.01)  # until it has begun
        try:
            driver.wait(chance.uniform(0.0, 2.0))
        except subprocess.TimeoutExpired:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
            num_killed += 1
        else:
            return num_killed


def problems_of(folder: Path, faults: list[str]) -> list[str]:
    """Return what is wrong with the ledger, and what the runs have left behind."""
    problems: list[str] = []
    rows = list(read_ledger(folder / "ledger.jsonl").rows.values())
    if len(rows) != len(faults):
        problems.append(f"{len(rows)} configurations in the ledger of {len(faults)}")
    for row in rows:
        fault = faults[int(row.configuration.settings["run"])]
        _, state, attempts = FAULTS[fault]
        if (row.state, len(row.attempts)) != (state, attempts):
            problems.append(
                f"run {row.configuration.settings['run']} ({fault}): {row.state} after {len(row.attempts)} attempts "
                f"({row.line.reason}); {state} after {attempts} is right"
            )
    started = Counter((folder / "started").read_text(encoding="utf-8").split())
    problems += [f"attempt {name} ran {count} times" for name, count in started.items() if count > 1]
    names = {f"{row.configuration.fingerprint}-{attempt}" for row in rows for attempt in row.attempts}
    problems += [f"attempt {name} ran and is not in the ledger" for name in started if name not in names]
    problems += [f"process {text} is left" for text in leftover_processes(names)]
    ports = [path.read_text(encoding="utf-8") for path in (folder / "ledger.runs").rglob("port")]
    problems += [f"port {port} is open" for port in ports if is_open(int(port))]
    problems += [f"{path} is left" for path in (folder / "ledger.runs").rglob("scratch-*")]
    for path in (folder / "ledger.runs").rglob("result-*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        clean_up = result["clean_up"]
        if clean_up["open_ports"] or clean_up["remaining"]:
            problems.append(f"{path}: {clean_up}")
    return problems


def leftover_processes(names: set[str]) -> list[str]:
    """Return the processes of attempts that still run."""
    processes = []
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            try:
                variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            attempts = [text.partition("=")[2] for text in variables if text.startswith(f"{ATTEMPT_VARIABLE}=")]
            processes += [f"{entry.name} of {attempt}" for attempt in attempts if attempt in names]
    return processes


def shared_memory() -> set[str]:
    """Return the names of Python's files of shared memory."""
    return {path.name for path in Path("/dev/shm").glob("psm_*")}


def is_open(port: int) -> bool:
    """Return whether something listens on a port of this machine."""
    import socket

    with socket.socket() as client:
        return client.connect_ex(("localhost", port)) == 0


def choose_faults(num_runs: int, seed: int) -> list[str]:
    """Return a fault for each run: half of them none, every fault at least once."""
    chance, names = random.Random(seed), list(FAULTS)
    faults = [
        *names,
        *(chance.choice(names) if chance.random() < 0.5 else "none" for _ in range(num_runs - len(names))),
    ]
    chance.shuffle(faults)
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--driver-kills", type=int, default=20)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", action="store_true", help="training runs in place of shell commands")
    parser.add_argument(
        "--patience", type=float, help="times the limits of an idle machine (default: 1; 30 with --train)"
    )
    parser.add_argument("--folder", help="where the experiment is written (default: a new folder)")
    arguments = parser.parse_args()
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="faults-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    before = shared_memory()
    faults = choose_faults(arguments.runs, arguments.seed)
    started = time.monotonic()
    patience = arguments.patience or (TRAINING_PATIENCE if arguments.train else 1.0)
    grid = write_grid(folder, faults, patience, arguments.train)
    num_killed = drive(folder, grid, arguments.devices, arguments.driver_kills, arguments.seed)
    problems = problems_of(folder, faults)
    problems += [f"/dev/shm/{name} is left" for name in sorted(shared_memory() - before)]
    counts = ", ".join(f"{count} {name}" for name, count in Counter(faults).most_common())
    print(
        f"{len(faults)} runs ({counts}), driver killed {num_killed} times, {time.monotonic() - started:.0f} s, in {folder}"
    )
    print("\n".join(problems) if problems else "every state right, nothing left")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
