"""Read what a serving engine is started with: from a command line, a script, a manifest, or its file of options.

Nothing is run. Every option of the engine changes nothing, is read into a field, or is said to change the model, memory or time
without being priced; an option that the release does not have is refused with the nearest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.interop.serving.checkpoints import identify_checkpoint
from shardwise.interop.serving.engine import Engine, EngineOptions, raise_read_problems
from shardwise.interop.serving.engine_commands import (
    EngineCommand,
    find_manifest_commands,
    find_script_commands,
    is_manifest,
    manifest_files,
    require_single_command,
)
from shardwise.interop.serving.engine_flags import ParsedWords
from shardwise.interop.serving.engines import ENGINES
from shardwise.interop.serving.environment import environment_effects
from shardwise.interop.serving.serving_launch import ServingLaunch
from shardwise.interop.text_formats.config_trees import flatten
from shardwise.interop.text_formats.option_tables import Options
from shardwise.model import Architecture
from shardwise.values import FileMessages, InputError, raise_problems, read_text
from shardwise.values.errors import join_words
from shardwise.values.input_texts import parse_yaml

MAX_FILE_BYTES = 4_000_000  # far above any launch
YAML_ENDINGS = (".yaml", ".yml")
FOLDER_FILES = (".sh", *YAML_ENDINGS)  # of a folder that is read
COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadServing:
    """Contents of an engine's launch.

    `options` are all of it by the engine's names, `origins` the options that each field of the launch is read from, `not_priced`
    what an option or a variable changes ("model", "memory" or "time") that a price leaves out, and `unread` options that change
    nothing. `replicas` of a manifest are among those of the layout; `num_nodes` are those of one instance, where a manifest or an
    option says so.
    """

    engine: Engine
    launch: ServingLaunch
    options: Options
    origins: Mapping[str, str]
    not_priced: Mapping[str, str]
    unread: tuple[str, ...]
    source: str
    replicas: int | None = None
    num_nodes: int | None = None
    devices_per_node: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def model_is_known(self) -> bool:
        """True if the model is one of the catalogue and no option makes it another one."""
        return self.launch.architecture is not None and "model" not in self.not_priced.values()

    @property
    def memory_is_known(self) -> bool:
        """True if no option changes the memory that a price leaves out."""
        return self.model_is_known and "memory" not in self.not_priced.values()


def read_serving_files(paths: Sequence[str]) -> dict[str, str]:
    """Return the texts of files by name. Raises `InputError` for one that cannot be read."""
    return {Path(path).name: read_text(Path(path), FileMessages("serve read: "), MAX_FILE_BYTES) for path in paths}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFolder:
    """Texts of a folder's scripts and YAML files by name, and why others of them are `left_out`: they are no part of a launch."""

    texts: Mapping[str, str]
    left_out: tuple[str, ...] = ()


def read_serving_folder(folder: Path) -> LaunchFolder:
    """Return the texts of a folder's scripts and YAML files, without those that cannot be read (results, logs, binaries).

    Raises `InputError` for a folder without any that can.
    """
    texts: dict[str, str] = {}
    left_out: list[str] = []
    for path in sorted(path for path in folder.iterdir() if path.suffix in FOLDER_FILES):
        try:
            text = read_text(path, FileMessages(""), MAX_FILE_BYTES)
            if path.suffix in YAML_ENDINGS and is_manifest(text):
                find_manifest_commands(text, path.name)
            texts[path.name] = text
        except InputError as error:
            left_out += [f"left out of the folder: {problem}" for problem in error.problems]
    if not texts:
        file_text = "no file that can be read" if left_out else "no file"
        required = f"{join_words(FOLDER_FILES, 'or')}; a folder with a launch is required"
        raise InputError(f"{folder}: found {file_text} of {required}", *left_out)
    return LaunchFolder(texts=texts, left_out=tuple(left_out))


def read_serving(
    files: Mapping[str, str], *, engine: str | None = None, architecture: Architecture | None = None,
    checkpoint_default: str | None = None,
) -> ReadServing:  # fmt: skip
    """Return what a launch says; `files` are its texts by name, `COMMAND_LINE` for a command line.

    `engine` names the engine of a file of options, where no command says it, and `checkpoint_default` what it loads then;
    `architecture` is the model of a checkpoint that the catalogue does not have. Raises `InputError` with all that cannot be
    read.

    >>> launch = read_serving({COMMAND_LINE: "vllm serve Qwen/Qwen3-32B -tp 4 --max-num-seqs 256"}).launch
    >>> str(launch.layout), launch.batch_limits.max_num_seqs, launch.architecture.name
    ('tp=4', 256, 'qwen3-32b')
    """
    commands, configs = find_commands(files, engine)
    command = require_single_command(commands, ", ".join(files))
    return read_command(command, configs, architecture=architecture, checkpoint_default=checkpoint_default)


def read_command(
    command: EngineCommand, configs: Mapping[str, str], *, architecture: Architecture | None = None,
    checkpoint_default: str | None = None, pool: str | None = None,
) -> ReadServing:  # fmt: skip
    """Return what one command says with the files of options that it names; `pool`: which one a router has it for, if it does."""
    target = ENGINES[command.engine]
    parsed = target.reader.read(command.tokens)
    options = _with_config_file(target, parsed, configs)
    name = _checkpoint_name(target, parsed, options, checkpoint_default)
    raise_problems(parsed.problems)
    options = options if pool is None else dict(target.with_pool(options, pool))
    return _interpret(target, options, name, command, architecture)


def find_commands(files: Mapping[str, str], engine: str | None) -> tuple[Sequence[EngineCommand], Mapping[str, str]]:
    """Return the commands that start an engine, and the files of options that they may name.

    Raises `InputError` for files without any, and for a command of another engine than is named.
    """
    commands: list[EngineCommand] = []
    configs: dict[str, str] = {}
    for name, text in files.items():
        if name.endswith(YAML_ENDINGS):
            if is_manifest(text):
                commands += find_manifest_commands(text, name)
                configs |= manifest_files(text, name)
            else:
                configs[name] = text
        elif not name.endswith(".md"):
            commands += find_script_commands(text, name)
    manifests = [command for command in commands if command.replicas is not None]
    if manifests:  # a script beside a manifest starts the same
        commands = manifests
    if not commands and configs:
        return [_config_command(configs, engine)], configs
    unexpected = next((command.engine for command in commands if engine is not None and command.engine != engine), None)
    if unexpected is not None:
        raise InputError(f"--from: found {engine!r}; the command is one of {unexpected}: leave --from out")
    return commands, configs


def _config_command(configs: Mapping[str, str], engine: str | None) -> EngineCommand:
    """Return a command that takes a file of options alone: the file and the engine that have most names in common."""
    num_options = {
        (name, candidate): sum(ENGINES[candidate].config_name(option) is not None for option in options)
        for name, options in _config_options(configs).items()
        for candidate in ([engine] if engine else ENGINES)
    }
    name, best = max(num_options, key=lambda pair: num_options[pair])
    if not num_options[name, best]:
        titles = ", ".join(ENGINES[candidate].title for candidate in ([engine] if engine else ENGINES))
        raise InputError(
            f"{', '.join(configs)}: none of the keys is an option of {titles}; a file of options of an engine, or the command "
            "that starts it, is required"
        )
    return EngineCommand(engine=best, tokens=(ENGINES[best].config_flag, name), source=name)


def _config_options(configs: Mapping[str, str]) -> Mapping[str, Sequence[str]]:
    """Return the keys of each file of options; of several files, those that are not YAML have none."""
    options: dict[str, Sequence[str]] = {}
    for name, text in configs.items():
        try:
            tree = parse_yaml(text, name)
        except InputError:
            if len(configs) == 1:
                raise
            tree = None
        options[name] = list(flatten(tree)) if isinstance(tree, dict) else []
    return options


def _with_config_file(target: Engine, parsed: ParsedWords, configs: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of the words and of the file of options that they name. The command line counts before the file, but
    for TensorRT-LLM, whose file counts before the line."""
    flag = target.reader.flags[target.config_flag]
    path = parsed.options.get(flag)
    if path is None:
        return parsed.options
    name = str(path).rsplit("/", 1)[-1]
    if name not in configs:
        parsed.problems.append(
            f"{target.config_flag}: found {str(path)!r}, which is not read; give the file beside the command"
        )
        return parsed.options
    tree = parse_yaml(configs[name], name)
    if not isinstance(tree, dict):
        parsed.problems.append(f"{name}: found {type(tree).__name__}; options by name are required")
        return parsed.options
    file_options = target.read_config({str(key): value for key, value in tree.items()}, name, parsed)
    return {**parsed.options, **file_options} if target.file_counts_first else {**file_options, **parsed.options}


def _checkpoint_name(target: Engine, parsed: ParsedWords, options: dict[str, Any], default: str | None) -> str:
    """Return the checkpoint that is loaded; every engine takes one word of it, or an option."""
    tokens = parsed.positionals
    named = next((options[name] for name in target.model_flags if options.get(name)), None)
    if len(tokens) > 1:
        parsed.problems.append(f"found the words {', '.join(map(repr, tokens[1:4]))} that belong to no option")
    name = tokens[0] if tokens else named or default
    if name is None:
        parsed.problems.append("no checkpoint is named; a model is required: give --model")
        return ""
    for flag in target.model_flags:
        options.pop(flag, None)
    return str(name)


def _interpret(
    target: Engine, options: dict[str, Any], name: str, command: EngineCommand, architecture: Architecture | None
) -> ReadServing:
    """Return the launch that options make, with what is not priced of them."""
    model = architecture or identify_checkpoint(name).architecture
    reader = EngineOptions(options, model, _has_experts(model, options))
    launch = target.from_options(reader, name)
    raise_read_problems(reader)
    rest = {option: value for option, value in options.items() if option not in reader.read_names | target.added}
    effects = {option: effect for option, value in rest.items() if (effect := target.effect_of(option, value))}
    variables, variable_notes = environment_effects(target, command.environment)
    replicas = launch.layout.replicas * (command.replicas or 1)
    notes = [*reader.notes, *variable_notes, *_model_notes(model, name)]
    return ReadServing(
        engine=target, launch=replace(launch, layout=launch.layout.with_replicas(replicas), flags=rest), options=options,
        origins=target.origins(options, name), not_priced={**reader.unpriced, **effects, **variables},
        unread=tuple(option for option in rest if option not in effects), source=command.source,
        replicas=command.replicas, num_nodes=options.get("nnodes") or command.num_nodes, devices_per_node=command.devices,
        notes=tuple(notes),
    )  # fmt: skip


def _has_experts(model: Architecture | None, options: Options) -> bool:
    """Return whether the model has experts; of one that is not known, an option of expert parallelism says so."""
    if model is not None:
        return any(layer.num_experts for layer in model.layer_architectures.values())
    names = ("enable-expert-parallel", "ep-size", "moe_expert_parallel_size")
    return any(options.get(name) not in (None, False, 1) for name in names)


def _model_notes(model: Architecture | None, name: str) -> Iterator[str]:
    if model is None:
        yield f"the catalogue has no model {name[:80]!r}; --model names one or gives its config.json"
