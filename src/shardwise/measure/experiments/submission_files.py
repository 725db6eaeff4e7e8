"""Files to submit by hand: a SLURM array, SkyPilot managed jobs, JobSets for Kueue, and a script of NeMo-Run.

Each job runs `job_process` on every node of an attempt, in a folder that all machines share; the next driver on the same ledger
collects what they have written. Sources: SLURM documentation, sbatch; SkyPilot documentation, managed jobs; JobSet, API
jobset.x-k8s.io/v1alpha2; Kueue documentation, run a JobSet; NeMo-Run, SlurmExecutor.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.interop.launches.launch_scripts import PORT
from shardwise.measure.experiments.backends import JOB_MODULE, RUNNING, WAITING, Submission, SubmittedJob
from shardwise.measure.experiments.submitit_backend import ArrayShape, arrays_of, split_arrays

SUBMITTED = "submitted by hand"
NOT_IN_NAMES = re.compile(r"[^a-z0-9-]+")
DEFAULT_CAP, SECONDS_PER_MINUTE = 16, 60
SLURM_HEAD_NODE = """HEAD_NODE="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)"
JOB_ID="$SLURM_JOB_ID"
export HEAD_NODE JOB_ID"""


@dataclass(frozen=True, slots=True)
class SubmissionFile:
    """A file to submit, and the command that submits it."""

    name: str
    text: str
    command: str


@dataclass(slots=True)
class FilesBackend:
    """Writes the files of a `form` into `folder`, and submits nothing. Attempts are then collected by their files."""

    form: str
    folder: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    capacity: int | None = None
    outlive_stop: bool = True
    hands_over: bool = True
    tick_s: float = 0.0
    commands: list[str] = field(default_factory=list)

    def size_of(self, num_nodes: int, num_devices: int) -> int:
        """Return the nodes of a job."""
        return num_nodes

    def submit(self, submissions: Sequence[Submission]) -> Sequence[str]:
        """Write the files of attempts, an array for each shape, and keep the commands that submit them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        first = len(list(self.folder.glob("attempts-*.txt")))
        for number, (shape, members) in enumerate(split_arrays(arrays_of(submissions)), first):
            folders = [str(member.folder.path.resolve()) for member in members]
            self.folder.joinpath(f"attempts-{number}.txt").write_text("\n".join(folders) + "\n", encoding="utf-8")
            for file in FORMS[self.form](
                number, shape, folders, {**self.settings, "folder": str(self.folder.resolve())}
            ):
                self.folder.joinpath(file.name).write_text(file.text, encoding="utf-8")
                if file.command:
                    self.commands.append(f"cd {shlex.quote(str(self.folder))} && {file.command}")
        return [SUBMITTED] * len(submissions)

    def poll(self, jobs: Sequence[SubmittedJob]) -> Sequence[str]:
        """Return what the files of each attempt say: whether the locks of another machine are seen is not known."""
        return [RUNNING if job.folder.is_claimed else WAITING for job in jobs]

    def cancel(self, jobs: Sequence[SubmittedJob]) -> None:
        """Do nothing: jobs are the user's."""

    def release(self, job: SubmittedJob) -> None:
        """Do nothing."""


def sbatch_files(
    number: int, shape: ArrayShape, folders: Sequence[str], settings: Mapping[str, str]
) -> list[SubmissionFile]:
    """Return the batch script of an array, a task for each attempt; at most `array_cap` run at a time."""
    cap = settings.get("array_cap", f"{DEFAULT_CAP}")
    options = {
        "job-name": "shardwise", "nodes": f"{shape.num_nodes}", "ntasks-per-node": "1", "time": f"{shape.minutes}",
        "array": f"0-{len(folders) - 1}%{cap}", "output": "%A_%a.out", "open-mode": "append",
        **({"gpus-per-node": f"{shape.devices_per_node}"} if settings.get("gpus") != "0" else {}),
        **{name: settings[name] for name in ("partition", "account", "qos", "constraint") if name in settings},
    }  # fmt: skip
    lines = "\n".join(f"#SBATCH --{name}={value}" for name, value in options.items())
    text = f"""#!/bin/bash
{lines}
#SBATCH --requeue
set -euo pipefail
cd {shlex.quote(settings["folder"])}
attempt="$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" attempts-{number}.txt)"
{SLURM_HEAD_NODE}
srun {settings.get("python", "python3")} -m {JOB_MODULE} "$attempt"
"""
    name = f"array-{number}.sbatch"
    return [SubmissionFile(name, text, f"sbatch {name}")]


def skypilot_files(
    number: int, shape: ArrayShape, folders: Sequence[str], settings: Mapping[str, str]
) -> list[SubmissionFile]:
    """Return a task of SkyPilot, and a script that launches it as a managed job for each attempt."""
    accelerator = settings.get("accelerator", "H100")
    task = f"""name: shardwise-{number}
num_nodes: {shape.num_nodes}
resources:
  accelerators: {accelerator}:{shape.devices_per_node}
envs:
  ATTEMPT: ""
file_mounts:
  {settings["folder"]}:
    source: {settings.get("bucket", "s3://your-bucket/experiments")}
    mode: MOUNT
setup: |
  python3 -m pip install --quiet 'shardwise[train]'
run: |
  export HEAD_NODE="$(echo "$SKYPILOT_NODE_IPS" | head -n1)" JOB_ID="$SKYPILOT_TASK_ID"
  timeout {shape.minutes}m python3 -m {JOB_MODULE} "$ATTEMPT"
"""
    launches = "\n".join(
        f"sky jobs launch --yes --detach-run --name {_job_name(folder)} --env ATTEMPT={shlex.quote(folder)} task-{number}.yaml"
        for folder in folders
    )
    script = f"#!/bin/bash\nset -euo pipefail\n{launches}\n"
    return [
        SubmissionFile(f"task-{number}.yaml", task, ""),
        SubmissionFile(f"launch-{number}.sh", script, f"bash launch-{number}.sh"),
    ]


def jobset_files(
    number: int, shape: ArrayShape, folders: Sequence[str], settings: Mapping[str, str]
) -> list[SubmissionFile]:
    """Return a JobSet for each attempt, which Kueue starts when its queue has room."""
    name = f"jobsets-{number}.yaml"
    documents = "---\n".join(_jobset(folder, shape, settings) for folder in folders)
    return [SubmissionFile(name, documents, f"kubectl create -f {name}")]


def _jobset(folder: str, shape: ArrayShape, settings: Mapping[str, str]) -> str:
    job = _job_name(folder)
    return f"""apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {job}
  labels:
    kueue.x-k8s.io/queue-name: {settings.get("queue", "user-queue")}
spec:
  suspend: true
  failurePolicy:
    maxRestarts: 0
  replicatedJobs:
  - name: nodes
    replicas: 1
    template:
      spec:
        parallelism: {shape.num_nodes}
        completions: {shape.num_nodes}
        completionMode: Indexed
        backoffLimit: 0
        activeDeadlineSeconds: {shape.minutes * SECONDS_PER_MINUTE}
        template:
          spec:
            restartPolicy: Never
            containers:
            - name: run
              image: {settings.get("image", "your-registry/shardwise")}
              command: {json.dumps(["python3", "-m", JOB_MODULE, folder])}
              ports:
              - containerPort: {PORT}
              env:
              - name: HEAD_NODE
                value: {job}-nodes-0-0.{job}
              - name: JOB_ID
                value: {job}
              resources:
                limits:
                  nvidia.com/gpu: "{shape.devices_per_node}"
              volumeMounts:
              - name: experiments
                mountPath: {settings["folder"]}
            volumes:
            - name: experiments
              persistentVolumeClaim:
                claimName: {settings.get("claim", "experiments")}
"""


def nemo_run_files(
    number: int, shape: ArrayShape, folders: Sequence[str], settings: Mapping[str, str]
) -> list[SubmissionFile]:
    """Return a Python script that submits every attempt as a task of a NeMo-Run experiment on SLURM."""
    hours, minutes = divmod(shape.minutes, SECONDS_PER_MINUTE)
    text = f'''"""Submit the attempts of attempts-{number}.txt with NeMo-Run."""

from pathlib import Path

import nemo_run as run

FOLDER = Path({settings["folder"]!r})
executor = run.SlurmExecutor(
    account={settings.get("account", "your-account")!r}, partition={settings.get("partition", "gpu")!r},
    nodes={shape.num_nodes}, ntasks_per_node=1, gpus_per_node={shape.devices_per_node}, time="{hours:02d}:{minutes:02d}:00",
    tunnel=run.LocalTunnel(job_dir=str(FOLDER / "nemo-run")),
)
with run.Experiment("shardwise-{number}") as experiment:
    for attempt in (FOLDER / "attempts-{number}.txt").read_text().splitlines():
        script = f\'\'\'{SLURM_HEAD_NODE}
python3 -m {JOB_MODULE} "{{attempt}}"\'\'\'
        experiment.add(run.Script(inline=script), executor=executor, name=Path(attempt).parent.name)
    experiment.run(detach=True)
'''
    name = f"submit-{number}.py"
    return [SubmissionFile(name, text, f"python3 {name}")]


def _job_name(folder: str) -> str:
    """Return a name that Kubernetes and SkyPilot take: letters, digits and dashes, a letter first."""
    fingerprint, attempt = Path(folder).parts[-2:]
    return NOT_IN_NAMES.sub("-", f"run-{fingerprint}-{attempt}".lower())


FORMS = {"sbatch": sbatch_files, "skypilot": skypilot_files, "jobset": jobset_files, "nemo-run": nemo_run_files}
# Settings of each form.
FORM_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "sbatch": ("partition", "account", "qos", "constraint", "array_cap", "gpus", "python"),
    "skypilot": ("accelerator", "bucket"),
    "jobset": ("queue", "image", "claim"),
    "nemo-run": ("account", "partition"),
}
