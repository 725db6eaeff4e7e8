"""`Engine`: a serving engine at a release, its options, how they map to a launch, and what it cannot run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardwise.interop.serving.engine_flags import FlagReader, FlagSyntax, ParsedWords
from shardwise.interop.serving.serving_launch import ServingLaunch
from shardwise.interop.text_formats.config_trees import flatten
from shardwise.interop.text_formats.option_tables import FrameworkOption, Options, option_problem, option_table
from shardwise.model import Architecture
from shardwise.serve import BatchLimits, get_serving_engine
from shardwise.values import InputError, did_you_mean, raise_problems

MAX_COUNT = 10**9  # devices, tokens or requests: far above any launch


class EngineOptions:
    """Reads the options of a launch by name, and records which were read, what is wrong and what is not priced.

    `architecture` is the checkpoint's model, if known: some options mean another thing for models with experts.
    """

    def __init__(self, options: Options, architecture: Architecture | None, has_experts: bool) -> None:
        self.options, self.architecture, self.has_experts = options, architecture, has_experts
        self.read_names: set[str] = set()
        self.problems: list[str] = []
        self.unpriced: dict[str, str] = {}  # options whose values are not priced, by what they change
        self.notes: list[str] = []

    def get(self, name: str, default: Any = None) -> Any:
        """Return an option's value, or the default where it is missing or "none"."""
        self.read_names.add(name)
        value = self.options.get(name)
        return default if value is None or (isinstance(value, str) and value.lower() == "none") else value

    def get_count(self, name: str, default: int | None = None) -> int | None:
        """Return an option that counts things; another value than a whole number from 1 is a problem."""
        value = self.get(name, default)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_COUNT):
            return value
        self.problems.append(f"{name}: found {str(value)[:60]!r}; a whole number from 1 to {MAX_COUNT:,} is required")
        return default

    def get_degree(self, name: str) -> int:
        """Return a degree of parallelism, 1 where it is missing."""
        return self.get_count(name, 1) or 1

    def get_fraction(self, name: str) -> float | None:
        """Return a share of memory; another value than more than 0 and at most 1 is a problem."""
        value = self.get(name)
        if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1):
            return None if value is None else float(value)
        self.problems.append(f"{name}: found {str(value)[:60]!r}; more than 0 and at most 1 is required")
        return None

    def flag_unpriced(self, name: str, effect: str) -> None:
        """Record an option that was read and whose value is not priced."""
        self.unpriced[name] = effect


class InstanceAddress(NamedTuple):
    """Address of an instance of a pool, and its number among those that may share a node."""

    url: str
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSyntax:
    """How an engine runs prefill and decode on instances of their own.

    `rules` yield what it cannot run of a pair of launches (prefill, decode). `router` are the words of the program that sends
    requests to the instances, `package` what installs it, and `router_words` returns its words for the instances of both pools.
    `settings` are the lines of the script of a pool before its command, by the pool and whether there are several nodes, and
    `instance_words` what they add to the command; both for the instance in the variable INSTANCE. `pod_variables` are variables
    of a pod, each by the field of Kubernetes that has its value.
    """

    rules: Callable[[ServingLaunch, ServingLaunch], Iterator[str]]
    router: tuple[str, ...]
    package: str
    source: str
    router_words: Callable[[Sequence[InstanceAddress], Sequence[InstanceAddress]], Sequence[str]]
    instance_words: Callable[[str], Sequence[str]]
    settings: Callable[[str, bool], str]
    pod_variables: Mapping[str, str]


# A rule that a launch breaks is a sentence: what was found, what the engine requires, and the nearest that it takes.
Rule = Callable[[ServingLaunch], Iterator[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A serving engine at a release.

    `version` and `source` say which release its options, in the table `options_file`, are of. `program` are the words that start
    it, with the checkpoint behind them, and `config_flag` the flag of its file of options. `to_options` returns the options of a
    launch, `from_options` a launch from options. `rules` yield what it cannot run. `added` are options of a launch that follow
    from how it is started, not from a plan. `starts_copies` returns whether one start can hold all replicas.
    `pools` says how prefill and decode part (None: not known here), and `with_pool` returns options in which a launch that may be
    either pool is the one that a router says.

    On several nodes, `node_options` are the words that the script on each node adds, `node_script` sets its variables,
    `node_prefix` stands before the command, and `group_words` are those of the leader and the workers of a LeaderWorkerSet.
    """

    name: str
    title: str
    version: str
    source: str
    options_file: str
    program: tuple[str, ...]
    image: str
    port: int
    to_options: Callable[[ServingLaunch], Options]
    from_options: Callable[[EngineOptions, str], ServingLaunch]
    rules: Sequence[Rule]
    syntax: FlagSyntax
    config_flag: str
    starts_copies: Callable[[ServingLaunch], bool]
    node_options: Callable[[int], Sequence[str]]
    node_script: Callable[[int, int], str]
    node_prefix: Callable[[int, int], str]
    group_words: Callable[[int], tuple[Sequence[str], Sequence[str]]]
    has_manifest: Callable[[int], bool]
    vendors: tuple[str, ...]
    server_options: Options
    added: frozenset[str]
    field_options: Mapping[str, tuple[str, ...]]  # options that each field of a launch is read from
    environment: str = ""  # beginning of the names of its variables
    model_flags: tuple[str, ...] = ()  # options that name the checkpoint
    pools: PoolSyntax | None = None
    with_pool: Callable[[Options, str], Options] = lambda options, pool: options
    file_counts_first: bool = False  # a value of the file of options counts before the command line's

    @property
    def memory_fraction(self) -> float:
        """The release's default of its share of memory."""
        return get_serving_engine(self.name).default_fraction(self.version)

    def limits_with_fraction(self, limits: BatchLimits) -> BatchLimits:
        """Return limits with the share of memory that the release takes where none is said."""
        return replace(limits, memory_fraction=limits.memory_fraction or self.memory_fraction)

    @property
    def options(self) -> Mapping[str, FrameworkOption]:
        """Every option of the release by name."""
        return option_table(self.options_file)

    @property
    def reader(self) -> FlagReader:
        """Reader of its command lines."""
        return FlagReader(f"{self.title} {self.version}", self.options, self.syntax)

    def violations(self, launch: ServingLaunch) -> list[str]:
        """List what the engine cannot run of a launch."""
        return list(dict.fromkeys(problem for rule in self.rules for problem in rule(launch)))

    def require_options(self, options: Options) -> None:
        """Raise `InputError` for options that the release does not have, and for values of another type."""
        problems = []
        for name, value in options.items():
            option = self.options.get(name)
            if option is None or option.kind == "field":
                problems.append(f"{name}: no option of {self.title} {self.version}{did_you_mean(name, self.options)}")
            elif problem := option_problem(option, value):
                problems.append(problem)
        raise_problems(problems)

    def config_name(self, key: str) -> str | None:
        """Return the option that a key of the file of options sets, in the table's spelling; None if there is none."""
        names = (key, key.replace("_", "-") if self.syntax.joins_dashes else key)
        aliases = (self.reader.flags.get(f"--{name}") for name in names)
        candidates = (*names, *filter(None, aliases))
        return next((name for name in candidates if name in self.options and self.options[name].kind != "field"), None)

    def read_config(self, tree: Mapping[str, Any], source: str, parsed: ParsedWords) -> dict[str, Any]:
        """Return the options of a file of options; what is wrong with them is added to the problems of `parsed`."""
        sections = {name.partition(".")[0] for name in self.options if "." in name}
        options: dict[str, Any] = {}
        for key, value in flatten({key: value for key, value in tree.items() if key in sections}, self.options).items():
            options |= self._config_option(key, value, source, parsed)
        for key, value in tree.items():
            if key not in sections:
                options |= self._config_option(key, value, source, parsed)
        return options

    def _config_option(self, key: str, value: Any, source: str, parsed: ParsedWords) -> dict[str, Any]:
        """Return the option that a key sets; an unknown key, and a value of another type, are problems."""
        name = self.config_name(key)
        if name is None:
            if value is not None:
                parsed.problems.append(
                    f"{source}: {key}: no option of {self.title} {self.version}{did_you_mean(key, self.options)}"
                )
            return {}
        if value is None:
            return {}
        setting = ParsedWords()
        option = self.options[name]
        if option.kind == "bool" or isinstance(value, (dict, list)):
            setting.options[name] = value
            problem = None if option.kind in ("any", "list") else option_problem(option, value)
            setting.problems += [problem] if problem else []
        else:
            self.reader.set_value(setting, option, [str(value)])
        parsed.problems += [f"{source}: {problem.removeprefix('--')}" for problem in setting.problems]
        return setting.options

    def origins(self, options: Options, checkpoint: str) -> Mapping[str, str]:
        """Return what each field of a launch is read from: options with their values, or the release's default."""
        return {
            name: ", ".join(f"--{option} {_value_text(options[option])}" for option in sources if option in options)
            or f"default of {self.title} {self.version}"
            for name, sources in self.field_options.items()
        }

    def effect_of(self, name: str, value: Any) -> str | None:
        """Return what an option changes without being priced: "model", "memory" or "time"; None if nothing."""
        option = self.options.get(name)
        return None if option is None else option.changes(value)


def _value_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def raise_read_problems(reader: EngineOptions) -> None:
    """Raise `InputError` with what was wrong with the options that were read."""
    if reader.problems:
        raise InputError(*dict.fromkeys(reader.problems))
