"""Read a deployment of one launch, or of launches of a prefill and a decode pool with the router in front of them.

Each command of a pool is an instance, those of further nodes aside. vLLM's NixlConnector may have the role of either pool; then
the router says by its ports which instances prefill.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.interop.serving.engine import Engine
from shardwise.interop.serving.engine_commands import (
    EngineCommand,
    distinct_commands,
    is_engine_script,
    require_single_command,
)
from shardwise.interop.serving.engines import ENGINES
from shardwise.interop.serving.read_serving import YAML_ENDINGS, ReadServing, find_commands, read_command
from shardwise.interop.text_formats.shell_script import ShellVariables, list_commands
from shardwise.model import Architecture
from shardwise.serve import PooledLayout
from shardwise.serve.pooled_layout import POOLS
from shardwise.values import InputError
from shardwise.values.input_texts import parse_integer

# Flags of routers and proxies by the pool whose instances they name. Sources: vLLM, toy_proxy_server.py of its tests of
# NixlConnector; vllm-router 0.1.17 and sglang-router 0.3.2, RouterArgs.
ROUTER_FLAGS: Mapping[str, str] = {
    "--prefiller-ports": "prefill", "--prefiller-port": "prefill", "--decoder-ports": "decode", "--decoder-port": "decode",
    "--prefill": "prefill", "--decode": "decode",
}  # fmt: skip
_URL_PORT = re.compile(r"(?:https?://[^\s/]+:)?(\d{1,5})/?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPools:
    """Contents of the launches of two pools: what one instance of each says, with the replicas of all of them in its layout."""

    prefill: ReadServing
    decode: ReadServing

    @property
    def pools(self) -> Mapping[str, ReadServing]:
        """Pools by name."""
        return {name: getattr(self, name) for name in POOLS}

    @property
    def layout(self) -> PooledLayout:
        """Layout of both pools."""
        return PooledLayout(prefill=self.prefill.launch.layout, decode=self.decode.launch.layout)

    @property
    def engine(self) -> Engine:
        """Engine of both pools."""
        return self.prefill.engine


def read_deployment(
    files: Mapping[str, str], *, engine: str | None = None, architecture: Architecture | None = None,
    checkpoint_default: str | None = None,
) -> ReadServing | ReadPools:  # fmt: skip
    """Return what a launch says, or the launches of two pools. Arguments are those of `read_serving`.

    Raises `InputError` with all that cannot be read, and for several commands that are not the instances of two pools.

    >>> text = '''
    ... sglang serve Qwen/Qwen3-32B --tp 2 --disaggregation-mode prefill --port 30000
    ... sglang serve Qwen/Qwen3-32B --tp 2 --disaggregation-mode prefill --port 30001
    ... sglang serve Qwen/Qwen3-32B --tp 4 --disaggregation-mode decode --port 30002
    ... '''
    >>> str(read_deployment({"pools.sh": text}).layout)
    'prefill: tp=2 replicas=2; decode: tp=4'
    """
    commands, configs = find_commands(files, engine)
    ports = _find_router_ports(files)

    def read(command: EngineCommand) -> ReadServing:
        port = _port(command)
        reading = read_command(
            command, configs, architecture=architecture, checkpoint_default=checkpoint_default, pool=ports.get(port)
        )
        if reading.launch.pool is None or port not in ports:
            return reading
        return replace(
            reading, origins={**reading.origins, "pool": f"{reading.origins['pool']}, port {port} of the router"}
        )

    if len(distinct_commands(commands)) < 2:
        return read(require_single_command(commands, ", ".join(files)))
    readings = [read(command) for command in commands]
    if any(reading.launch.pool is None for reading in readings):
        if any(reading.launch.pool for reading in readings) or "kv-transfer-config" in readings[0].options:
            raise InputError(
                f"{', '.join(files)}: the instance on port {_unpooled_port(readings)} may be of either pool; kv_role kv_producer "
                "or kv_consumer in --kv-transfer-config, or the router's command with the port of each instance, is required"
            )
        require_single_command(commands, ", ".join(files))
    return _join_pools(readings, ", ".join(files))


def _unpooled_port(readings: Sequence[ReadServing]) -> Any:
    """Return the port of the first instance that no pool is known of."""
    reading = next(reading for reading in readings if reading.launch.pool is None)
    return reading.options.get("port", reading.engine.port)


def _port(command: EngineCommand) -> Any:
    """Return the port that a command listens on."""
    engine = ENGINES[command.engine]
    return engine.reader.read(command.tokens).options.get("port", engine.port)


def _find_router_ports(files: Mapping[str, str]) -> Mapping[Any, str]:
    """Return the pool of each port that routers in scripts name; a port of both pools is none's."""
    pools: dict[int, set[str]] = {}
    for name, text in files.items():
        if not name.endswith((*YAML_ENDINGS, ".md")):
            for tokens in list_commands(text, ShellVariables(name), is_engine_script):
                for pool, port in _router_ports(tokens):
                    pools.setdefault(port, set()).add(pool)
    return {port: names.pop() for port, names in pools.items() if len(names) == 1}


def _router_ports(tokens: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the pools and ports of instances that the words of a command name."""
    pool = None
    for word in tokens:
        flag, _, value = word.partition("=")
        if word.startswith("--"):
            pool = ROUTER_FLAGS.get(flag)
        text = value if word.startswith("--") else word
        if pool is not None and (match := _URL_PORT.fullmatch(text)):
            yield pool, parse_integer(match[1])


def _join_pools(readings: Sequence[ReadServing], source: str) -> ReadPools:
    """Return the pools of instances. Raises `InputError` for a pool that is missing, or whose instances differ."""
    engines = dict.fromkeys(reading.engine.title for reading in readings)
    if len(engines) > 1:
        raise InputError(f"{source}: found pools of {' and '.join(engines)}; one engine is required")
    pools = {}
    for name in POOLS:
        instances = [reading for reading in readings if reading.launch.pool == name and _is_first_node(reading)]
        if not instances:
            raise InputError(f"{source}: found no command of the {name} pool; commands of both pools are required")
        pools[name] = _join_instances(instances, name, source)
    return ReadPools(prefill=pools["prefill"], decode=pools["decode"])


def _is_first_node(reading: ReadServing) -> bool:
    """Return whether a command is that of the first node of its instance."""
    rank = reading.options.get("node-rank", 0)
    return not isinstance(rank, int) or rank == 0


def _join_instances(instances: Sequence[ReadServing], name: str, source: str) -> ReadServing:
    """Return what one instance of a pool says, with the replicas of all."""
    first = instances[0]
    replicas = first.launch.layout.replicas
    for reading in instances[1:]:
        layout = reading.launch.layout.with_replicas(replicas)
        instance = replace(reading.launch, layout=layout, flags=first.launch.flags)
        for field, left, right in first.launch.differences(instance):
            raise InputError(
                f"{source}: instances of the {name} pool differ: {field} is {left} and {right}; equal instances are required"
            )
    replicas = sum(reading.launch.layout.replicas for reading in instances)
    return replace(first, launch=replace(first.launch, layout=first.launch.layout.with_replicas(replicas)))
