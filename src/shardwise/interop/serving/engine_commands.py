"""Commands that start a serving engine: found in shell scripts, `docker run` lines and the containers of Kubernetes manifests.

Nothing is run. Variables that a script sets are filled in; one that comes from elsewhere stays as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.interop.text_formats.shell_script import ShellVariables, list_commands
from shardwise.values import InputError
from shardwise.values.input_texts import parse_integer, parse_yaml

MAX_CONTAINERS = 200  # of a manifest
# Modules that serve, by engine. Sources: vLLM 0.32.0, entrypoints/openai/api_server.py; SGLang 0.5.23, launch_server.py.
MODULES: Mapping[str, str] = {
    "vllm.entrypoints.openai.api_server": "vllm", "vllm.entrypoints.api_server": "vllm", "sglang.launch_server": "sglang",
}  # fmt: skip
# Programs that serve: with the subcommand that they need, or None.
PROGRAMS: Mapping[str, tuple[str, str | None]] = {
    "vllm": ("vllm", "serve"), "sglang": ("sglang", "serve"), "trtllm-serve": ("trtllm", None),
}  # fmt: skip
# Images whose entry point is an engine's server. Source: vLLM's docker/Dockerfile, target vllm-openai.
ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {"vllm-openai": ("vllm", "serve"), "vllm-openai-rocm": ("vllm", "serve")}
WRAPPERS = ("env", "exec", "nohup", "sudo", "time")  # programs that start another one in an environment
SHELLS = ("bash", "sh", "/bin/bash", "/bin/sh", "/usr/bin/bash", "/usr/bin/env")
_VARIABLE_SETTING = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_REDIRECTION = re.compile(r"(?:\d|&)?(?:>>?|<)(&\d|[^&\s]\S*(?<!>))?")
_CONTAINER_VARIABLE = re.compile(r"\$\(([A-Za-z_]\w*)\)")
# Options of `docker run` and `podman run` with a value, beside those with an equals sign. Source: Docker's reference, docker run.
DOCKER_VALUES = frozenset({
    "-e", "--env", "-v", "--volume", "-p", "--publish", "--name", "--gpus", "--shm-size", "--ipc", "--network", "--net", "-w",
    "--workdir", "--user", "-u", "--runtime", "--entrypoint", "--ulimit", "--device", "--restart", "-m", "--memory",
    "--env-file", "--mount", "--hostname", "-h", "--cap-add", "--security-opt", "--group-add", "--add-host", "--label", "-l",
    "--log-driver", "--log-opt", "--pull", "--platform", "--tmpfs", "--cpus", "--cpuset-cpus", "--expose", "--pid", "--uts",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommand:
    """A command that starts an engine: the words behind its program, the environment that it says, and where it stands.

    `replicas` instances are started of it, each on `num_nodes` nodes, where a manifest says so (None: it says nothing);
    `devices` of a node are its containers' limits.
    """

    engine: str
    tokens: tuple[str, ...]
    source: str
    environment: Mapping[str, str] = field(default_factory=dict)
    replicas: int | None = None
    num_nodes: int | None = None
    devices: int | None = None


def is_engine_script(word: str) -> bool:
    """Return whether a word of a command is itself a script that starts an engine."""
    return " " in word and bool(
        re.search(r"(vllm(\s+serve|\.entrypoints)|sglang(\.launch_server|\s+serve)|trtllm-serve)\b", word)
    )


def find_script_commands(text: str, source: str) -> list[EngineCommand]:
    """Return the commands of a shell script, or of a command line, that start an engine. Options go on over line ends."""
    variables = ShellVariables(source)
    commands = []
    for tokens in list_commands(text, variables, is_engine_script):
        command = parse_words(tokens, source)
        if command is not None:
            exported = {name: value for name, value in variables.texts.items() if name.isupper()}
            commands.append(replace(command, environment={**exported, **command.environment}))
    return commands


def parse_words(tokens: Sequence[str], source: str) -> EngineCommand | None:
    """Return the engine's command among the words of a command, or None if it starts no engine."""
    environment: dict[str, str] = {}
    is_prefix = True  # settings before the program are the command's environment
    for index, word in enumerate(tokens):
        match = _VARIABLE_SETTING.match(word)
        is_prefix = is_prefix and (match is not None or word in WRAPPERS)
        if match and is_prefix:
            environment[match[1]] = match[2]
        if word in ("docker", "podman") and "run" in tokens[index + 1 : index + 4]:
            return _parse_docker(tokens[tokens.index("run", index) + 1 :], source, environment)
        program = _program_at(tokens, index)
        if program is not None:
            engine, start = program
            arguments = tuple(_without_redirections(tokens[start:]))
            return EngineCommand(engine=engine, tokens=arguments, source=source, environment=environment)
    return None


def _without_redirections(tokens: Sequence[str]) -> Iterator[str]:
    """Yield words without those that redirect input and output."""
    skips_next = False
    for word in tokens:
        match = _REDIRECTION.fullmatch(word)
        if not match and not skips_next:
            yield word
        skips_next = match is not None and not match[1]


def _program_at(tokens: Sequence[str], index: int) -> tuple[str, int] | None:
    """Return the engine whose program stands at an index, and the index of its first argument."""
    word, following = tokens[index], tokens[index + 1] if index + 1 < len(tokens) else ""
    if word == "-m" and following in MODULES:
        return MODULES[following], index + 2
    program = word.rsplit("/", 1)[-1]
    if program in PROGRAMS and not (index and tokens[index - 1].startswith("-")):
        engine, subcommand = PROGRAMS[program]
        if subcommand is None:
            return engine, index + 1 + (following == "serve")
        if following == subcommand:
            return engine, index + 2
    return None


def _parse_docker(tokens: Sequence[str], source: str, environment: dict[str, str]) -> EngineCommand | None:
    """Return the engine's command of what stands behind `docker run`: options, an image, and its command."""
    index, entry_point = 0, None
    while index < len(tokens) and tokens[index].startswith("-"):
        name, equals, value = tokens[index].partition("=")
        takes_next = not equals and name in DOCKER_VALUES
        value = tokens[index + 1] if takes_next and index + 1 < len(tokens) else value
        if name in ("-e", "--env") and (match := _VARIABLE_SETTING.match(value)):
            environment[match[1]] = match[2]
        if name == "--entrypoint":
            entry_point = value
        index += 2 if takes_next else 1
    if index >= len(tokens):
        return None
    image, arguments = tokens[index], list(tokens[index + 1 :])
    return _container_command(image, [entry_point] if entry_point else [], arguments, source, environment)


def _container_command(
    image: str, command: Sequence[str], arguments: Sequence[str], source: str, environment: Mapping[str, str]
) -> EngineCommand | None:
    """Return the engine's command of a container: its own, or that of the image's entry point."""
    tokens = [*command, *arguments]
    if tokens[:1] and tokens[0] in SHELLS and len(tokens) > 1:
        commands = find_script_commands(tokens[-1], source)
        return replace(commands[-1], environment={**environment, **commands[-1].environment}) if commands else None
    image_name = image.rsplit("/", 1)[-1].partition(":")[0].partition("@")[0]
    if not command and image_name in ENTRY_POINTS and parse_words(tokens, source) is None:
        tokens = [*ENTRY_POINTS[image_name], *tokens]
    parsed = parse_words(tokens, source)
    return None if parsed is None else replace(parsed, environment={**environment, **parsed.environment})


def find_manifest_commands(text: str, source: str) -> list[EngineCommand]:
    """Return the commands of a manifest's containers that start an engine: of a Deployment, a StatefulSet, a Pod or a Job, and of
    the leaders of a LeaderWorkerSet, whose workers join them. Raises `InputError` for a text that is not YAML."""
    commands: list[EngineCommand] = []
    for document in re.split(r"^---[ \t]*$", text, flags=re.MULTILINE):
        tree = parse_yaml(document, source) if document.strip() else None
        if isinstance(tree, dict) and isinstance(tree.get("kind"), str):
            commands += _object_commands(tree, source)
    return commands


def _object_commands(tree: Mapping[str, Any], source: str) -> Iterator[EngineCommand]:
    """Yield the commands of one object of a manifest."""
    for item in tree.get("items") or []:
        if isinstance(item, dict):
            yield from _object_commands(item, source)
    spec = _section(tree, "spec")
    replicas = spec.get("replicas", 1)
    replicas = replicas if isinstance(replicas, int) and not isinstance(replicas, bool) and replicas > 0 else 1
    group = _section(spec, "leaderWorkerTemplate")
    if group:
        size = group.get("size", 1)
        template = _section(group, "leaderTemplate") or _section(group, "workerTemplate")
        num_nodes = size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 1
        group_variables = {"LWS_GROUP_SIZE": str(num_nodes)}  # set by the controller
    else:
        template = _section(spec, "template") or ({"spec": spec} if "containers" in spec else {})
        num_nodes, group_variables = 1, dict[str, str]()
    where = f"{source}: {tree['kind']} {_section(tree, 'metadata').get('name', '')}".rstrip()
    for container in (_section(template, "spec").get("containers") or [])[:MAX_CONTAINERS]:
        if isinstance(container, dict) and (command := _read_container(container, where, group_variables)) is not None:
            yield replace(command, replicas=replicas, num_nodes=num_nodes)


def _read_container(
    container: Mapping[str, Any], source: str, group_variables: Mapping[str, str]
) -> EngineCommand | None:
    """Return the engine's command of a container, with the variables that the manifest sets filled in."""
    environment = dict(group_variables) | {
        str(entry["name"]): str(entry.get("value", ""))
        for entry in container.get("env") or []
        if isinstance(entry, dict) and "name" in entry and "value" in entry
    }

    def texts(key: str) -> list[str]:
        value = container.get(key) or []
        tokens = value if isinstance(value, list) else [value]
        return [
            _CONTAINER_VARIABLE.sub(lambda match: environment.get(match[1], match[0]), _word_text(word))
            for word in tokens
        ]

    command = _container_command(str(container.get("image", "")), texts("command"), texts("args"), source, environment)
    limits = _section(_section(container, "resources"), "limits")
    counts = [
        parse_integer(str(value))
        for name, value in limits.items()
        if "gpu" in str(name) and re.fullmatch(r"\d{1,4}", str(value))
    ]
    return None if command is None else replace(command, devices=counts[0] if counts else None)


def _word_text(word: Any) -> str:
    return str(word).lower() if isinstance(word, bool) else str(word)


def _section(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = tree.get(key)
    return value if isinstance(value, dict) else {}


def manifest_files(text: str, source: str) -> dict[str, str]:
    """Return the files that a manifest's ConfigMaps hold, by name."""
    files: dict[str, str] = {}
    for document in re.split(r"^---[ \t]*$", text, flags=re.MULTILINE):
        tree = parse_yaml(document, source) if document.strip() else None
        if isinstance(tree, dict) and tree.get("kind") == "ConfigMap":
            files |= {str(name): value for name, value in _section(tree, "data").items() if isinstance(value, str)}
    return files


def is_manifest(text: str) -> bool:
    """Return whether a YAML text is a Kubernetes manifest: it has an API version and a kind."""
    return bool(re.search(r"^\s*apiVersion:", text, re.MULTILINE)) and bool(re.search(r"^\s*kind:", text, re.MULTILINE))


def distinct_commands(commands: Sequence[EngineCommand]) -> list[EngineCommand]:
    """Return commands without those that say the same as another one."""
    return list({(command.engine, command.tokens): command for command in commands}.values())


def require_single_command(commands: Sequence[EngineCommand], source: str) -> EngineCommand:
    """Return the only command that starts an engine; equal ones count once. Raises `InputError` for none, or for several."""
    distinct = distinct_commands(commands)
    if not distinct:
        raise InputError(
            f"{source}: no command starts an engine; `vllm serve`, `python -m sglang.launch_server`, `trtllm-serve` or a "
            "manifest with one of them is required"
        )
    if len(distinct) > 1:
        listed = "; ".join(f"{command.engine} {' '.join(command.tokens)[:60]}" for command in distinct[:4])
        raise InputError(
            f"{source}: {len(distinct)} commands start an engine ({listed}); one is required: give it alone"
        )
    return distinct[0]
