"""Write a deployment as a folder of a serving engine: launch script, file of options, Kubernetes manifest and README.

A deployment that the engine cannot run is refused with each reason and the nearest that it can. What was written is read back,
and must be what was to be written.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.interop.launches.export_launch import ExportedLaunch
from shardwise.interop.launches.launch import cluster_machines
from shardwise.interop.serving.checkpoints import identify_checkpoint, is_folder_name
from shardwise.interop.serving.engine import Engine
from shardwise.interop.serving.engine_flags import format_words
from shardwise.interop.serving.kubernetes import DEVICE_RESOURCES, MOUNT_PATH, PodGroup, object_name, write_manifest
from shardwise.interop.serving.nearest_launch import nearest_launch
from shardwise.interop.serving.read_serving import read_serving
from shardwise.interop.serving.serving_launch import ServingLaunch, launch_of_deployment
from shardwise.interop.text_formats.config_trees import format_yaml
from shardwise.model import Architecture
from shardwise.serve import ServingDeployment
from shardwise.values import InputError

SCRIPT_FILE, CONFIG_FILE, MANIFEST_FILE, README_FILE = "launch.sh", "serve.yaml", "kubernetes.yaml", "README.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceNodes:
    """Placement of instances on nodes: `num_starts` times an engine is started, each on `num_nodes` nodes with `devices` of each.

    `replicas` of them are copies that one start holds (data parallelism of the engine).
    """

    num_starts: int
    replicas: int
    num_nodes: int
    devices: int


def export_serving(deployment: ServingDeployment, engine: Engine) -> ExportedLaunch:
    """Return a deployment as the files of an engine.

    Raises `InputError` if the engine cannot run it, with each reason and the nearest deployment that it can.
    """
    launch = replace(launch_of_deployment(deployment), engine=engine.name)
    require_flags(engine, launch)
    require_vendor(engine, deployment)
    _require_runnable(engine, launch)
    nodes = place_instances(engine, launch, deployment)
    options = engine.to_options(replace(launch, layout=launch.layout.with_replicas(nodes.replicas)))
    files = _write_files(engine, launch, options, nodes, deployment)
    notes = _require_restored(engine, launch, files, nodes)
    return ExportedLaunch(
        target=engine.name, version=engine.version, files=files, command=f"bash {SCRIPT_FILE}",
        not_expressible=tuple(notes), warnings=tuple(_warnings(engine, launch, nodes, deployment)),
    )  # fmt: skip


def place_instances(engine: Engine, launch: ServingLaunch, deployment: ServingDeployment) -> InstanceNodes:
    """Return how the instances of a launch lie on the cluster's nodes.

    Copies that lie on one node are one start of the engine where it has data parallelism; larger ones are started apart.
    Raises `InputError` for an instance whose devices do not fill nodes evenly.
    """
    per_node = cluster_machines(deployment.problem.cluster).devices_per_node
    layout = launch.layout
    copies_inside = engine.starts_copies(launch) and layout.num_devices <= per_node
    replicas = layout.replicas if copies_inside else 1
    devices = layout.devices_per_replica * replicas
    num_nodes = -(-devices // per_node)
    if devices % num_nodes:
        raise InputError(
            f"layout: an instance of {devices} devices on nodes of {per_node}; the same number on each of its nodes is required"
        )
    return InstanceNodes(
        num_starts=layout.replicas // replicas, replicas=replicas, num_nodes=num_nodes, devices=devices // num_nodes
    )


def require_flags(engine: Engine, launch: ServingLaunch) -> None:
    """Raise `InputError` for flags that the release does not have, and for those that fields of the deployment set."""
    engine.require_options(launch.flags)
    field_by_option = {option: field for field, options in engine.field_options.items() for option in options}
    field_by_option |= dict.fromkeys((*engine.added, *engine.model_flags), "the way it is started")
    problems = [
        f"flags: {name} is set by {field_by_option[name]}; leave it out of the flags"
        for name in launch.flags
        if name in field_by_option
    ]
    if problems:
        raise InputError(*problems)


def require_vendor(engine: Engine, deployment: ServingDeployment) -> None:
    """Raise `InputError` for chips that launches of the engine are not written for."""
    vendor = deployment.problem.cluster.chip.vendor
    if vendor not in engine.vendors:
        raise InputError(
            f"{engine.title} {engine.version} cannot run this deployment",
            f"cluster: chips of {vendor}; chips of {' or '.join(engine.vendors)} are required for what is written here",
        )


def _require_runnable(engine: Engine, launch: ServingLaunch) -> None:
    """Raise `InputError` if the engine cannot run a launch, with the nearest that it can."""
    reasons = engine.violations(launch)
    if not reasons:
        return
    nearest = nearest_launch(engine, launch)
    fix = (
        f"the nearest that it runs: {describe_difference(launch, nearest)}"
        if nearest
        else "no layout of as many devices that it runs was found; whether one of more or fewer devices runs is not known"
    )
    raise InputError(f"{engine.title} {engine.version} cannot run this deployment", *reasons, fix)


def describe_difference(launch: ServingLaunch, nearest: ServingLaunch) -> str:
    """Return what the nearest launch has that this one has not."""
    parts = []
    if nearest.layout != launch.layout:
        parts.append(f"layout {nearest.layout}")
    if nearest.formats != launch.formats:
        parts.append(f"formats {nearest.formats}")
    parts += [
        f"{name.partition('.')[2]}={new}"
        for name, _, new in launch.differences(nearest)
        if name.startswith("batch_limits.")
    ]
    return ", ".join(parts)


def _write_files(
    engine: Engine,
    launch: ServingLaunch,
    options: Mapping[str, Any],
    nodes: InstanceNodes,
    deployment: ServingDeployment,
) -> dict[str, str]:
    """Return the texts of the folder by name. Flags of the deployment are on the command line where the engine has them there."""
    flags = dict(launch.flags)
    if engine.file_counts_first:
        options, flags = {**options, **flags}, {}
    config = config_text(engine, options)
    files = {SCRIPT_FILE: _script(engine, launch, flags, nodes), CONFIG_FILE: config}
    if engine.has_manifest(nodes.num_nodes):
        files[MANIFEST_FILE] = _manifest(engine, launch, options, flags, nodes, deployment, config)
    return {**files, README_FILE: _readme(engine, launch, nodes, deployment, list(files))}


def config_text(engine: Engine, options: Mapping[str, Any]) -> str:
    """Return the text of an engine's file of options."""
    return f"# Options of {engine.title} {engine.version}.\n" + (format_yaml(options) if options else "{}\n")


def _script(engine: Engine, launch: ServingLaunch, flags: Mapping[str, Any], nodes: InstanceNodes) -> str:
    """Return the script that starts one instance; on several nodes it is started on each."""
    server = [" ".join(tokens) for tokens in format_words({**flags, **engine.server_options}, engine.options)]
    is_spread = nodes.num_nodes > 1
    lines = [
        f"{' '.join(engine.program)} {shlex.quote(launch.checkpoint)}", f"{engine.config_flag} {CONFIG_FILE}", *server,
        *(engine.node_options(nodes.num_nodes) if is_spread else ()),
    ]  # fmt: skip
    settings = engine.node_script(nodes.num_nodes, nodes.devices) if is_spread else ""
    prefix = engine.node_prefix(nodes.num_nodes, nodes.devices) if is_spread else ""
    command = " \\\n    ".join(lines)
    return f'#!/bin/bash\nset -euo pipefail\ncd "$(dirname "$0")"\n{settings}exec {prefix}{command}\n'


def _manifest(
    engine: Engine, launch: ServingLaunch, options: Mapping[str, Any], flags: Mapping[str, Any], nodes: InstanceNodes,
    deployment: ServingDeployment, config: str,
) -> str:  # fmt: skip
    """Return the Kubernetes manifest of all instances: options are words of the command, or in a file that is mounted."""
    chip = deployment.problem.cluster.chip
    mounts_file = engine.file_counts_first
    written = {**({} if mounts_file else options), **flags, **engine.server_options}
    tokens = [word for option in format_words(written, engine.options) for word in shlex.split(" ".join(option))]
    file_words = [engine.config_flag, f"{MOUNT_PATH}/{CONFIG_FILE}"] if mounts_file else []
    base = [*engine.program, launch.checkpoint, *file_words, *tokens]
    leader, worker = engine.group_words(nodes.num_nodes)
    return write_manifest(
        PodGroup(
            name=object_name(f"{launch.checkpoint.rsplit('/', 1)[-1]}-{engine.name}"), image=engine.image, port=engine.port,
            leader=[*base, *leader], worker=[*base, *worker], replicas=nodes.num_starts, num_nodes=nodes.num_nodes,
            devices=nodes.devices, resource=DEVICE_RESOURCES[chip.vendor],
            files={CONFIG_FILE: config} if mounts_file else {},
        )
    )  # fmt: skip


def _require_restored(
    engine: Engine, launch: ServingLaunch, files: Mapping[str, str], nodes: InstanceNodes
) -> list[str]:
    """Return what no option says; raise `InputError` for what reading the script or the manifest would lose."""
    written = {SCRIPT_FILE: launch.layout.with_replicas(nodes.replicas), MANIFEST_FILE: launch.layout}
    notes: list[str] = []
    lost: list[str] = []
    for name, layout in written.items():
        if name not in files:
            continue
        texts = {name: files[name], **({CONFIG_FILE: files[CONFIG_FILE]} if name == SCRIPT_FILE else {})}
        restored = read_serving(texts, architecture=named_architecture(launch)).launch
        sort_differences(engine, replace(launch, layout=layout), restored, notes, lost)
    raise_lost(engine, lost)
    return list(dict.fromkeys(notes))


def named_architecture(launch: ServingLaunch) -> Architecture | None:
    """Return the model of a launch whose checkpoint's name does not say it; None where it does."""
    return None if identify_checkpoint(launch.checkpoint).architecture else launch.architecture


def sort_differences(
    engine: Engine, launch: ServingLaunch, restored: ServingLaunch, notes: list[str], lost: list[str]
) -> None:
    """Add what a launch that was read back has not: to `notes` if no option says it, else to `lost`."""
    says_format = identify_checkpoint(launch.checkpoint).says_format
    for field, planned, read in launch.differences(restored):
        if field.startswith("formats.") and field != "formats.cache" and not says_format:
            notes.append(f"{field} is {planned}: {engine.title} takes the formats from the checkpoint's config.json")
        else:
            lost.append(
                f"{field} is {_text(planned)}, which {engine.title} has no option for; there it is {_text(read)}"
            )
    if launch.batch_limits.acceptance and launch.batch_limits.mtp_tokens:
        notes.append(
            f"batch_limits.acceptance is {launch.batch_limits.acceptance:g}: measured in a run, no option sets it"
        )


def raise_lost(engine: Engine, lost: Sequence[str]) -> None:
    """Raise `InputError` with what the engine has no option for, if anything."""
    if lost:
        raise InputError(f"{engine.title} {engine.version} cannot run this deployment", *dict.fromkeys(lost))


def _text(value: Any) -> str:
    name = getattr(value, "name", None)
    return str(value if name is None else name)


def _warnings(
    engine: Engine, launch: ServingLaunch, nodes: InstanceNodes, deployment: ServingDeployment
) -> Iterator[str]:
    """Yield what the user has to do or to know before the start."""
    yield from checkpoint_warnings(launch, deployment)
    if nodes.num_nodes > 1 and engine.node_options(nodes.num_nodes):
        yield f"start {SCRIPT_FILE} on each of the {nodes.num_nodes} nodes of an instance, with HEAD_NODE and NODE_RANK set"
    if nodes.num_starts > 1:
        manifest = f", and {MANIFEST_FILE} all" if engine.has_manifest(nodes.num_nodes) else ""
        yield f"{nodes.num_starts} instances: {SCRIPT_FILE} starts one of them{manifest}"


def checkpoint_warnings(launch: ServingLaunch, deployment: ServingDeployment) -> Iterator[str]:
    """Yield that a checkpoint has to be made, where none is published, and that requests are longer than it says to take."""
    published = identify_checkpoint(launch.checkpoint).architecture
    num_tokens = max(deployment.problem.workload.total_tokens, launch.max_model_len or 0)
    if published is not None and published.max_context is not None and num_tokens > published.max_context:
        yield (
            f"requests of up to {num_tokens:,} tokens are longer than the context of {published.name}, "
            f"{published.max_context:,}: the engine refuses them unless the checkpoint's config says a longer one"
        )
    if is_folder_name(launch.checkpoint):
        yield (
            f"no published checkpoint of {deployment.problem.architecture.name} in {launch.formats} is known here: put one in "
            f"{launch.checkpoint}, or name it in the deployment"
        )


def _readme(
    engine: Engine, launch: ServingLaunch, nodes: InstanceNodes, deployment: ServingDeployment, names: Sequence[str]
) -> str:
    problem = deployment.problem
    notes = "\n".join(f"- {note}" for note in _warnings(engine, launch, nodes, deployment))
    manifest = (
        f"\nor all of them on Kubernetes:\n\n    kubectl apply -f {MANIFEST_FILE}\n" if MANIFEST_FILE in names else ""
    )
    return f"""# {launch.checkpoint} with {engine.title}

Written for {engine.title} {engine.version} ({engine.source}).

- model: {problem.architecture.name}, formats: {launch.formats}
- layout: {launch.layout}, {launch.layout.num_devices} devices of {problem.cluster.name}
- requests: {describe_load(deployment)}
- limits of an instance's copy of attention: {describe_limits(engine, launch)}

Start an instance:

    bash {SCRIPT_FILE}
{manifest}
Files: {", ".join(names)}.

{notes}
"""


def describe_load(deployment: ServingDeployment) -> str:
    """Return the workload of a deployment as a text."""
    workload = deployment.problem.workload
    load = f"{workload.concurrency:g} at once" if workload.concurrency else f"{workload.rate_per_s:g} per second"
    return f"{workload.isl} tokens in, {workload.osl} out, {load}"


def describe_limits(engine: Engine, launch: ServingLaunch) -> str:
    """Return the limits that a launch sets, as a text."""
    limits = launch.batch_limits
    numbers = {
        "requests at once": limits.max_num_seqs, "tokens of a pass": limits.max_batched_tokens,
        "fraction of memory": limits.memory_fraction, "longest request": launch.max_model_len,
        "drafted tokens": limits.mtp_tokens or None,
    }  # fmt: skip
    listed = ", ".join(f"{name} {value}" for name, value in numbers.items() if value is not None)
    return listed or f"{engine.title}'s defaults"
