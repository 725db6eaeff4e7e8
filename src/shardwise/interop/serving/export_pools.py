"""Write a deployment of two pools as a folder: a script and a file of options for each pool, the router's script, a Kubernetes
manifest and README.

Each instance of a pool is a start of its own, so that the router knows all of them. What was written is read back, and must be
what was to be written.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.interop.launches.export_launch import ExportedLaunch
from shardwise.interop.launches.launch import cluster_machines
from shardwise.interop.serving.engine import Engine, InstanceAddress, PoolSyntax
from shardwise.interop.serving.engine_flags import format_words
from shardwise.interop.serving.export_serving import (
    MANIFEST_FILE,
    README_FILE,
    checkpoint_warnings,
    config_text,
    describe_difference,
    describe_limits,
    describe_load,
    named_architecture,
    raise_lost,
    require_flags,
    require_vendor,
    sort_differences,
)
from shardwise.interop.serving.kubernetes import (
    DEVICE_RESOURCES,
    MAX_NAME,
    PodGroup,
    RouterPod,
    object_name,
    write_pools_manifest,
)
from shardwise.interop.serving.nearest_launch import nearest_launch
from shardwise.interop.serving.read_pools import ReadPools, read_deployment
from shardwise.interop.serving.serving_launch import ServingLaunch, launch_of_deployment
from shardwise.serve import PooledLayout, ServingDeployment
from shardwise.values import InputError, pluralize

ROUTER_FILE = "router.sh"
FIRST_PORTS: Mapping[str, int] = {
    "prefill": 100,
    "decode": 1100,
}  # of the instances of a pool, beyond the engine's port
VISIBLE_DEVICES: Mapping[str, str] = {"NVIDIA": "CUDA_VISIBLE_DEVICES", "AMD": "HIP_VISIBLE_DEVICES"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlace:
    """Nodes of a pool's instances: each is on `num_nodes` with `devices` of each; `nodes` are the first of each instance, by
    number, and `first_devices` the first device of each there."""

    num_nodes: int
    devices: int
    nodes: tuple[int, ...]
    first_devices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPools:
    """Pools that are written: the engine's syntax, and launch and place of each pool by name."""

    engine: Engine
    syntax: PoolSyntax
    deployment: ServingDeployment
    launches: Mapping[str, ServingLaunch]
    places: Mapping[str, PoolPlace]
    devices_per_node: int

    @property
    def num_nodes(self) -> int:
        """Nodes on which instances begin, up to the last of them."""
        return 1 + max(node for place in self.places.values() for node in place.nodes)


def export_pools(deployment: ServingDeployment, engine: Engine) -> ExportedLaunch:
    """Return a deployment of two pools as the files of an engine.

    Raises `InputError` if the engine cannot run it, with each reason and the nearest deployment that it can.
    """
    if engine.pools is None:
        raise InputError(
            f"{engine.title}: found pools of prefill and decode, which are not written for it; vllm or sglang is required"
        )
    launches = {
        pool: replace(launch_of_deployment(part, pool), engine=engine.name) for pool, part in deployment.pools.items()
    }
    for launch in launches.values():
        require_flags(engine, launch)
    require_vendor(engine, deployment)
    _require_runnable(engine, engine.pools, launches)
    per_node = cluster_machines(deployment.problem.cluster).devices_per_node
    pools = WrittenPools(
        engine=engine, syntax=engine.pools, deployment=deployment, launches=launches, devices_per_node=per_node,
        places=place_pools(launches, per_node, deployment.problem.cluster.num_devices),
    )  # fmt: skip
    files = _write_files(pools)
    notes = _require_restored(pools, files)
    return ExportedLaunch(
        target=engine.name, version=engine.version, files=files,
        command=" & ".join(f"bash {file}" for file in (*map(_script_file, launches), ROUTER_FILE)),
        not_expressible=tuple(notes), warnings=tuple(_warnings(pools)), starts_on="the nodes of the instances",
    )  # fmt: skip


def _script_file(pool: str) -> str:
    return f"{pool}.sh"


def _config_file(pool: str) -> str:
    return f"{pool}.yaml"


def _require_runnable(engine: Engine, syntax: PoolSyntax, launches: Mapping[str, ServingLaunch]) -> None:
    """Raise `InputError` if the engine cannot run a pool or the pair, with the nearest that it can."""
    reasons = [
        re.sub(r"^(layout|batch_limits|formats)", rf"\1: {pool}", problem) for pool, launch in launches.items()
        for problem in engine.violations(launch)
    ]  # fmt: skip
    prefill, decode = launches["prefill"], launches["decode"]
    reasons += syntax.rules(prefill, decode)
    if not reasons:
        return
    nearest_prefill = nearest_launch(engine, prefill) or prefill
    nearest_decode = nearest_launch(engine, decode, lambda candidate: syntax.rules(nearest_prefill, candidate))
    title = f"{engine.title} {engine.version} cannot run this deployment"
    if nearest_decode is None or engine.violations(nearest_prefill):
        fix = "no layout of as many devices that it runs was found; whether one of more or fewer devices runs is not known"
        raise InputError(title, *reasons, fix)
    changes = {"prefill": (prefill, nearest_prefill), "decode": (decode, nearest_decode)}
    listed = [f"{pool}: {text}" for pool, pair in changes.items() if (text := describe_difference(*pair))]
    raise InputError(title, *reasons, f"the nearest that it runs: {'; '.join(listed)}")


def place_pools(launches: Mapping[str, ServingLaunch], per_node: int, num_devices: int) -> Mapping[str, PoolPlace]:
    """Return where the instances of the pools lie, by pool: those of more devices first, none over the end of a node.

    Raises `InputError` for instances that do not fill their nodes evenly, or that take more nodes than there are.

    >>> from shardwise.interop.serving.read_serving import read_serving
    >>> lines = {"prefill": "vllm serve Qwen/Qwen3-32B -tp 2 -dp 2", "decode": "vllm serve Qwen/Qwen3-32B -tp 4"}
    >>> places = place_pools({pool: read_serving({"x": line}).launch for pool, line in lines.items()}, 8, 8)
    >>> places["prefill"].first_devices, places["decode"].first_devices
    ((4, 6), (0,))
    """
    sizes = {pool: launch.layout.devices_per_replica for pool, launch in launches.items()}
    places, cursor = {}, 0  # the first device that is free, counted over all nodes
    for pool in sorted(sizes, key=lambda pool: -sizes[pool]):
        size, starts = sizes[pool], []
        num_nodes = -(-size // per_node)
        if size % num_nodes:
            raise InputError(
                f"layout: {pool}: an instance of {size} devices on nodes of {per_node}; the same number on each of its nodes is "
                "required"
            )
        for _ in range(launches[pool].layout.replicas):
            if cursor % per_node + size > per_node:
                cursor = -(-cursor // per_node) * per_node
            starts.append(cursor)
            cursor += size if num_nodes == 1 else num_nodes * per_node
        places[pool] = PoolPlace(
            num_nodes=num_nodes, devices=size // num_nodes, nodes=tuple(start // per_node for start in starts),
            first_devices=tuple(start % per_node for start in starts),
        )  # fmt: skip
    if cursor > num_devices:
        raise InputError(
            f"layout: instances of {' and '.join(map(str, sizes.values()))} devices take {-(-cursor // per_node)} nodes of "
            f"{per_node}; at most {num_devices // per_node} are required, or sizes that share nodes"
        )
    return {pool: places[pool] for pool in sizes}


def _write_files(pools: WrittenPools) -> dict[str, str]:
    """Return the texts of the folder by name."""
    files = {}
    for pool, launch in pools.launches.items():
        options = pools.engine.to_options(replace(launch, layout=launch.layout.with_replicas(1)))
        files[_script_file(pool)] = _pool_script(pools, pool)
        files[_config_file(pool)] = config_text(pools.engine, options)
    files[ROUTER_FILE] = _router_script(pools)
    files[MANIFEST_FILE] = _manifest(pools)
    return {**files, README_FILE: _readme(pools, list(files))}


def _pool_script(pools: WrittenPools, pool: str) -> str:
    """Return the script that starts one instance of a pool, INSTANCE; on several nodes it is started on each."""
    engine, launch, place = pools.engine, pools.launches[pool], pools.places[pool]
    is_spread = place.num_nodes > 1
    server = {name: value for name, value in engine.server_options.items() if name != "port"}
    tokens = [
        f"{' '.join(engine.program)} {shlex.quote(launch.checkpoint)}", f"{engine.config_flag} {_config_file(pool)}",
        *(" ".join(tokens) for tokens in format_words({**launch.flags, **server}, engine.options)), '--port "$PORT"',
        *pools.syntax.instance_words(pool), *(engine.node_options(place.num_nodes) if is_spread else ()),
    ]  # fmt: skip
    last = len(place.nodes) - 1
    lines = [
        "#!/bin/bash", "set -euo pipefail", 'cd "$(dirname "$0")"',
        f'INSTANCE="${{INSTANCE:-0}}"  # of the {pool} pool' + (f", 0 to {last}" if last else ""),
        f"PORT=$(({engine.port + FIRST_PORTS[pool]} + INSTANCE))",
    ]  # fmt: skip
    text = "\n".join([*lines, *_device_lines(pools, place)]) + "\n"
    text += pools.syntax.settings(pool, pools.num_nodes > 1)
    if is_spread:
        text += engine.node_script(place.num_nodes, place.devices)
    prefix = engine.node_prefix(place.num_nodes, place.devices) if is_spread else ""
    return text + f"exec {prefix}" + " \\\n    ".join(tokens) + "\n"


def _device_lines(pools: WrittenPools, place: PoolPlace) -> list[str]:
    """Return the lines that leave an instance its devices, where it has not all of its node."""
    if place.devices == pools.devices_per_node:
        return []
    variable = VISIBLE_DEVICES[pools.deployment.problem.cluster.chip.vendor]
    return [
        f"FIRST_DEVICES=({' '.join(map(str, place.first_devices))})  # of each instance on its node",
        "FIRST=${FIRST_DEVICES[$INSTANCE]}",
        f"export {variable}=$(seq -s , $FIRST $((FIRST + {place.devices - 1})))",
    ]


def _router_script(pools: WrittenPools) -> str:
    """Return the script that starts the router, with the addresses of all instances."""
    default = "-localhost" if pools.num_nodes == 1 else f"?the addresses of the {pools.num_nodes} nodes, in order"
    nodes = f"NODES=(${{NODES:{default}}})"
    addresses = {
        pool: [
            InstanceAddress(f"http://${{NODES[{node}]}}:{pools.engine.port + FIRST_PORTS[pool] + index}", index)
            for index, node in enumerate(place.nodes)
        ]
        for pool, place in pools.places.items()
    }
    tokens = _router_command(pools, addresses)
    text = " ".join(f'"{word}"' if "$" in word else word for word in tokens).replace(" --", " \\\n    --")
    package = f"# {pools.syntax.source}: pip install {pools.syntax.package}"
    return f"#!/bin/bash\n{package}\nset -euo pipefail\n{nodes}\nexec {text}\n"


def _router_command(pools: WrittenPools, addresses: Mapping[str, Sequence[InstanceAddress]]) -> list[str]:
    """Return the words of the router."""
    tokens = pools.syntax.router_words(addresses["prefill"], addresses["decode"])
    return [*pools.syntax.router, *tokens, "--host", "0.0.0.0", "--port", str(pools.engine.port)]


def _manifest(pools: WrittenPools) -> str:
    """Return the Kubernetes manifest of both pools and the router."""
    engine, chip = pools.engine, pools.deployment.problem.cluster.chip
    groups = {}
    for pool, launch in pools.launches.items():
        place = pools.places[pool]
        base_name = object_name(f"{launch.checkpoint.rsplit('/', 1)[-1]}-{engine.name}")
        options = engine.to_options(replace(launch, layout=launch.layout.with_replicas(1)))
        written = {**options, **launch.flags, **engine.server_options}
        tokens = [word for option in format_words(written, engine.options) for word in shlex.split(" ".join(option))]
        leader, worker = engine.group_words(place.num_nodes)
        base = [*engine.program, launch.checkpoint, *tokens]
        groups[pool] = PodGroup(
            name=f"{base_name[: MAX_NAME - len('-prefill')].rstrip('-')}-{pool}", image=engine.image, port=engine.port,
            leader=[*base, *leader], worker=[*base, *worker], replicas=launch.layout.replicas, num_nodes=place.num_nodes,
            devices=place.devices, resource=DEVICE_RESOURCES[chip.vendor], pod_variables=pools.syntax.pod_variables,
        )  # fmt: skip
    addresses = {
        pool: [InstanceAddress(f"http://{host}:{engine.port}") for host in group.leader_hosts]
        for pool, group in groups.items()
    }
    router = RouterPod(
        name=groups["prefill"].name.removesuffix("-prefill") + "-router", port=engine.port,
        command=_router_command(pools, addresses), package=pools.syntax.package,
    )  # fmt: skip
    return write_pools_manifest(list(groups.values()), router)


def _require_restored(pools: WrittenPools, files: Mapping[str, str]) -> list[str]:
    """Return what no option says; raise `InputError` for what reading the scripts or the manifest would lose."""
    notes: list[str] = []
    lost: list[str] = []
    names = [name(pool) for pool in pools.launches for name in (_script_file, _config_file)]
    for texts in ({name: files[name] for name in (*names, ROUTER_FILE)}, {MANIFEST_FILE: files[MANIFEST_FILE]}):
        reading = read_deployment(texts, architecture=named_architecture(pools.launches["prefill"]))
        assert isinstance(reading, ReadPools), "two pools were written"
        for pool, launch in pools.launches.items():
            restored = reading.pools[pool].launch
            if MANIFEST_FILE not in texts:  # a script starts one instance
                restored = replace(restored, layout=restored.layout.with_replicas(launch.layout.replicas))
            sort_differences(pools.engine, launch, restored, notes, lost)
    raise_lost(pools.engine, lost)
    return list(dict.fromkeys(notes))


def _warnings(pools: WrittenPools) -> Iterator[str]:
    """Yield what the user has to do or to know before the start."""
    yield from checkpoint_warnings(pools.launches["prefill"], pools.deployment)
    for pool, place in pools.places.items():
        num_instances = len(place.nodes)
        if num_instances > 1:
            yield f"start {_script_file(pool)} {num_instances} times, with INSTANCE=0 to {num_instances - 1}"
        if place.num_nodes > 1:
            yield (
                f"start {_script_file(pool)} on each of the {place.num_nodes} nodes of an instance, with HEAD_NODE and NODE_RANK "
                "set"
            )
    yield f"{ROUTER_FILE} needs {pools.syntax.package} ({pools.syntax.source}); it listens on port {pools.engine.port}"


def _readme(pools: WrittenPools, names: Sequence[str]) -> str:
    engine, deployment = pools.engine, pools.deployment
    launches, problem = pools.launches, deployment.problem
    layout = deployment.layout
    assert isinstance(layout, PooledLayout)
    rows = [
        f"| {pool} {index} | {node} | {_describe_devices(place, index)} | {engine.port + FIRST_PORTS[pool] + index} |"
        for pool, place in pools.places.items()
        for index, node in enumerate(place.nodes)
    ]
    limits = "\n".join(f"- {pool}: limits {describe_limits(engine, launch)}" for pool, launch in launches.items())
    notes = "\n".join(f"- {note}" for note in _warnings(pools))
    table = "\n".join(rows)
    return f"""# {launches["prefill"].checkpoint} with {engine.title}: pools of prefill and decode

Written for {engine.title} {engine.version} ({engine.source}).

- model: {problem.architecture.name}, formats: {launches["prefill"].formats}
- layout: {layout}, {layout.num_devices} devices of {problem.cluster.name}
- requests: {describe_load(deployment)}
{limits}

Start the instances, each on its node, and the router, to which requests are sent:

    INSTANCE=0 bash prefill.sh
    INSTANCE=0 bash decode.sh
    bash {ROUTER_FILE}

| instance | node | devices | port |
|---|---|---|---|
{table}

or all of it on Kubernetes with LeaderWorkerSet:

    kubectl apply -f {MANIFEST_FILE}

Files: {", ".join(names)}.

{notes}
"""


def _describe_devices(place: PoolPlace, index: int) -> str:
    """Return the devices of an instance as a text."""
    if place.num_nodes > 1:
        return f"all of {pluralize(place.num_nodes, 'node')} from there"
    first = place.first_devices[index]
    return str(first) if place.devices == 1 else f"{first} to {first + place.devices - 1}"
