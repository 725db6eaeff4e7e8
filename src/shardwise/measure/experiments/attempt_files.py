"""Files of an attempt: what to run, who runs it, and how it ended. They are all that a driver needs to go on after another one.

```
job.json            the command and its limits
claim-N-R           made by the process that runs node N, before it starts; locked as long as it lives. R counts requeues
output-N.txt        what the command of node N printed
result-N-R.json     how it ended; its presence ends the attempt
scratch/            temporary files, removed at the end
```
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from shardwise.values import open_input, read_json_object
from shardwise.values.input_texts import parse_digits

Ending = Literal["exit", "time limit", "no heartbeat", "cancelled", "not started"]
# Variables that number a node of a job, and how often a scheduler has requeued it. Sources: SLURM, srun and sbatch; SkyPilot,
# distributed jobs; Kubernetes, indexed jobs.
NODE_VARIABLES = ("SLURM_NODEID", "SKYPILOT_NODE_RANK", "JOB_COMPLETION_INDEX")
RESTART_VARIABLE = "SLURM_RESTART_COUNT"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptJob:
    """Command of an attempt on each of its nodes, and its limits.

    `attempt` names it among all attempts. Without a sign of life for `hang_after_s` it is ended: output, or a change of a file of
    `heartbeats`, which are patterns below the attempt's folder. `grace_s` is the time between a request to end and the kill.
    The command runs in `working_folder`, or else in the attempt's.
    """

    attempt: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    time_limit_s: float
    hang_after_s: float
    heartbeats: Sequence[str] = ()
    grace_s: float = 5.0
    num_nodes: int = 1
    working_folder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanUp:
    """Leftovers of a run when its command had ended, which were removed: processes, files of shared memory.

    `open_ports` still listen after that, and `remaining` processes still run: neither can be removed.
    """

    killed: Sequence[str] = ()
    removed_files: Sequence[str] = ()
    open_ports: Sequence[int] = ()
    remaining: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptResult:
    """End of the command of a node: by itself with `exit_code`, or ended for one of the other reasons.

    `oom_kills` counts processes that the system killed in the meantime because memory ran out, where it says so.
    """

    ending: Ending
    exit_code: int
    seconds: float
    oom_kills: int = 0
    peak_rss_bytes: int = 0
    error: str = ""
    clean_up: CleanUp = field(default_factory=CleanUp)


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    """Folder of an attempt, which all of its nodes share; `node` is the one that files are of, after `restart` requeues."""

    path: Path
    node: int = 0
    restart: int = 0

    @classmethod
    def of_process(cls, path: Path) -> AttemptFolder:
        """Return the folder for the node that this process runs on, by the variables of its scheduler."""
        numbers = [parse_digits(os.environ.get(name, "")) for name in NODE_VARIABLES]
        node = next((number for number in numbers if number is not None), 0)
        return cls(path, node, parse_digits(os.environ.get(RESTART_VARIABLE, "")) or 0)

    @property
    def job_file(self) -> Path:
        """File with what to run."""
        return self.path / "job.json"

    @property
    def claim(self) -> Path:
        """File that the process of this node makes before it starts the command."""
        return self.path / f"claim-{self.node}-{self.restart}"

    @property
    def output(self) -> Path:
        """File with what the command of this node printed."""
        return self.path / f"output-{self.node}.txt"

    @property
    def result_file(self) -> Path:
        """File with how the command of this node ended."""
        return self.path / f"result-{self.node}-{self.restart}.json"

    @property
    def scratch(self) -> Path:
        """Folder of temporary files of this node."""
        return self.path / f"scratch-{self.node}"

    def write_job(self, job: AttemptJob) -> None:
        """Write what to run, through to the disk."""
        self.path.mkdir(parents=True, exist_ok=True)
        _replace_file(self.job_file, json.dumps(asdict(job), indent=2))

    def read_job(self) -> AttemptJob:
        """Return what to run. Raises `InputError`."""
        return AttemptJob(**_known_fields(AttemptJob, read_json_object(self.job_file)))

    def write_result(self, result: AttemptResult) -> None:
        """Write how the command ended. Raises `OSError`."""
        _replace_file(self.result_file, json.dumps(asdict(result)))

    def read_result(self) -> AttemptResult | None:
        """Return how the command ended; None as long as it has not."""
        if not self.result_file.exists():
            return None
        content = read_json_object(self.result_file)
        content["clean_up"] = CleanUp(**_known_fields(CleanUp, content.get("clean_up") or {}))
        return AttemptResult(**_known_fields(AttemptResult, content))

    def make_claim(self) -> int:
        """Make the claim of this node and return its open file, whose lock the system releases when this process ends.

        Raises `FileExistsError` where another process has made it, however that ended: an attempt runs once.
        """
        # The claim is locked before it has its name, so that it is never seen without its lock while its maker lives.
        file, name = tempfile.mkstemp(dir=self.path, prefix=".claim-")
        try:
            os.write(file, f"{os.getpid()}".encode())
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.link(name, self.claim)
        except FileExistsError:
            os.close(file)
            raise
        except OSError:  # a file system without locks or links, such as a bucket that is mounted
            with suppress(OSError):
                os.close(os.open(self.claim, os.O_CREAT | os.O_EXCL, 0o666))
                return file
            os.close(file)
            raise FileExistsError(self.claim) from None
        finally:
            Path(name).unlink(missing_ok=True)
        return file

    @property
    def is_claimed(self) -> bool:
        """True once a process has begun to run this node's command."""
        return self.claim.exists()

    @property
    def watcher(self) -> int | None:
        """Process that runs the command, on the machine of its node; None if it does not live."""
        return parse_digits(read_tail(self.claim)) if self.is_alive else None

    @property
    def is_alive(self) -> bool:
        """True while the process that made the claim lives, on this machine or on one that shares the file system's locks."""
        try:
            file = os.open(self.claim, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(file)
        return False


def _replace_file(path: Path, text: str) -> None:
    new_file = path.with_name(f".{path.name}.new")
    try:
        with new_file.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new_file.replace(path)
    except OSError:
        new_file.unlink(missing_ok=True)
        raise


def _known_fields(kind: Any, content: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in content.items() if name in names}


def read_tail(path: Path, num_bytes: int = 1 << 16) -> str:
    """Return the end of a file as text; "" where there is none."""
    try:
        with open_input(path) as file:
            file.seek(max(path.stat().st_size - num_bytes, 0))
            return file.read(num_bytes).decode("utf-8", errors="replace")
    except OSError:
        return ""
