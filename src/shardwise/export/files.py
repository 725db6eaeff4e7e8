"""The files of a launch: the target's own, a batch script for SLURM, and a page that says what they are."""

from __future__ import annotations

from shardwise.export.field import Options
from shardwise.export.launch import Launch
from shardwise.export.launchers import slurm
from shardwise.export.target import Files, Target

README, BATCH = "README.md", "launch.slurm"


def files_of(target: Target, options: Options, launch: Launch) -> Files:
    """Texts by name. The target's own come first."""
    own = dict(target.write(options, launch))
    if target.slurm and BATCH not in own:
        own[BATCH] = slurm(launch.machines, f"{launch.model.name}-{target.name}", target.command(launch))
    return {**own, README: _page(target, list(own), launch)}


def _page(target: Target, names: list[str], launch: Launch) -> str:
    job, machines = launch.job, launch.machines
    notes = "\n".join(f"- {note}" for note in target.notes(launch))
    return f"""# {launch.model.name} with {target.title}

Written for {target.title} {target.version} ({target.source}).

- model: {launch.model.name}
- job: {job.global_batch_tokens:,} tokens per batch, sequences of {job.seq_len:,}, precision {job.precision}
- layout: {launch.layout}
- machines: {machines.num_nodes} nodes of {machines.devices_per_node} devices

Start it{f" on each node, or with `sbatch {BATCH}`" if BATCH in names else ""}:

    {target.command(launch)}

Files of {target.title}: {", ".join(name for name in names if name != BATCH)}.

{notes}
"""
