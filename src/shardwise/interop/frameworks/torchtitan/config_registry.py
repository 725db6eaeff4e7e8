"""Config functions of torchtitan 0.3.0's registries: chosen for a run, written where flags are not enough, and read by syntax.

A function makes a `Trainer.Config` of calls with keywords, or takes that of another function, and sets attributes of it. Only
such statements are understood, by `ast`; nothing is run. What has another form becomes an option by its own text, so that it is
reported as not understood.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from shardwise.interop.frameworks.torchtitan.models import default_attention
from shardwise.interop.launches.target import Options
from shardwise.values.errors import InputError

MODELS_PACKAGE = "torchtitan.models."
RUN_MODULE = "run_config"  # the file of a function of its own
LIST_OPTIONS = ("parallelism.module_fqns_per_model_part",)  # what tyro does not read back as it was
OTHER_DATA = ("sft", "debug")  # functions with other data than text from the web
LOSS_CALLS = {
    "ChunkedLossWrapper": "ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config({vocabulary}))",
    "CrossEntropyLoss": "CrossEntropyLoss.Config({vocabulary})",
    "MTPLoss": "MTPLoss.Config({vocabulary})",
}
VOCABULARY_ARGUMENT = "global_vocab_size=decoder_vocab_size(config.model_spec)"
HOME_MODULES = {
    "ChunkedLossWrapper": "torchtitan.components.loss", "CrossEntropyLoss": "torchtitan.components.loss",
    "MTPLoss": "torchtitan.models.deepseek_v3.mtp", "decoder_vocab_size": "torchtitan.models.common.config_utils",
    "Float8LinearConverter": "torchtitan.components.quantization",
    "Float8GroupedExpertsConverter": "torchtitan.components.quantization",
}  # fmt: skip
# Arguments that say what is so without them
DEFAULT_ARGUMENTS = {"model.moe_comm_backend": "standard", "Float8LinearConverter.recipe_name": "rowwise"}


class RegisteredConfig(NamedTuple):
    """A function of a registry, and what it sets."""

    module: str
    name: str
    options: Options


def nearest_config(options: Options) -> RegisteredConfig:
    """The function of the model's module from which the fewest steps lead to some options."""
    module = options["model.name"]
    every = [RegisteredConfig(module, name, own) for name, own in registered_configs()[module].items()]
    usual = [one for one in every if not any(word in one.name for word in OTHER_DATA)] or every
    return min(usual, key=lambda one: _config_distance(options, one))


def _config_distance(options: Options, base: RegisteredConfig) -> tuple[Any, ...]:
    """How far: formats that were not requested, statements that it takes, and whether it is of the same flavour."""
    strange = "model.converters" in base.options and "model.converters" not in options
    return (
        strange,
        len(list(_changing_statements(options, base))),
        base.options.get("model.flavor") != options["model.flavor"],
    )


def _model_options(options: Options) -> dict[str, Any]:
    """What a model registry is asked for, without what it would give unasked."""
    usual = {
        **DEFAULT_ARGUMENTS,
        "model.attn_backend": default_attention(options.get("model.name"), options.get("model.flavor")),
    }
    return {
        name: value for name, value in options.items()
        if (name.startswith("model.") or "Converter." in name) and not name.endswith("model_compile_enabled")
        and value != usual.get(name)
    }  # fmt: skip


def _changing_statements(options: Options, base: RegisteredConfig) -> Iterator[tuple[str, str]]:
    """What changes a config to some options where flags cannot: where each name is from, and the statement."""
    module = options["model.name"]
    other = _model_options(options) != {
        "model.flavor": base.options.get("model.flavor"),
        **_model_options(base.options),
    }
    if other:
        yield (
            f"{MODELS_PACKAGE}{module}",
            f"config.model_spec = model_registry({', '.join(_registry_arguments(options))})",
        )
    loss = options["loss"]
    if loss != base.options.get("loss") or (other and options["model.flavor"] != base.options.get("model.flavor")):
        yield "", f"config.loss = {LOSS_CALLS[loss].format(vocabulary=VOCABULARY_ARGUMENT)}"
    for name in LIST_OPTIONS:
        if name in options:
            yield "", f"config.{name} = {options[name]!r}"


def _registry_arguments(options: Options) -> Iterator[str]:
    """Arguments of model_registry."""
    yield repr(options["model.flavor"])
    for name in ("attn_backend", "num_mtp_layers"):
        if f"model.{name}" in options:
            yield f"{name}={options[f'model.{name}']!r}"
    if "model.converters" in options:
        yield f"converters=[{', '.join(_converter_call(options, name) for name in options['model.converters'])}]"


def _converter_call(options: Options, name: str) -> str:
    own = [f"{key.partition('.')[2]}={value!r}" for key, value in options.items() if key.startswith(f"{name}.")]
    return f"{name}.Config({', '.join([*own, 'model_compile_enabled=True'])})"


def config_file_text(options: Options, base: RegisteredConfig) -> str:
    """The file of a function of its own; empty where flags say all."""
    statements = list(_changing_statements(options, base))
    if not statements:
        return ""
    imports = [f"from {home} import model_registry" for home, _ in statements if home]
    imports += [
        f"from {home} import {name}"
        for name, home in HOME_MODULES.items()
        if any(name in text for _, text in statements)
    ]
    return function_text(base.name, base.module, options, imports, [text for _, text in statements])


def changed_flags(options: Options, base: RegisteredConfig) -> dict[str, Any]:
    """The flags of some options: those that the function does not set as they are."""
    told = (*LIST_OPTIONS, "loss", "optimizer")
    return {
        name: value for name, value in options.items()
        if name not in told and not name.startswith("model.") and "Converter." not in name and base.options.get(name) != value
    }  # fmt: skip


@cache
def registered_configs() -> Mapping[str, Mapping[str, Options]]:
    """Functions of the release's registries by module, each with the options that it sets, as read from the wheel."""
    text = (
        resources.files("shardwise.interop.frameworks")
        .joinpath("options", "torchtitan_configs.json")
        .read_text(encoding="utf-8")
    )
    found: Mapping[str, Mapping[str, Options]] = json.loads(text)
    return found


def registered_options(module: str, name: str) -> Options:
    """The options of a function of the release. Raises `InputError` for one that it lacks."""
    functions = registered_configs().get(module, {})
    if name not in functions:
        known = ", ".join(functions) or ", ".join(registered_configs())
        raise InputError(
            f"config: found {module} {name}, whose file is not among those given; it, or one of {known}, is required"
        )
    return functions[name]


def function_text(base: str, module: str, options: Options, imports: Sequence[str], statements: Sequence[str]) -> str:
    """A file with one function, `run`: the config of a registered one, and statements that change it."""
    lines = "\n".join(f"    {line}" for line in statements)
    names = "\n".join(sorted({*imports, f"from {MODELS_PACKAGE}{module}.config_registry import {base}",
                              "from torchtitan.trainer import Trainer"}))  # fmt: skip
    return (
        f'"""Settings of {options["model.name"]} {options["model.flavor"]} that have no flag."""\n\n{names}\n\n\n'
        f"def run() -> Trainer.Config:\n    config = {base}()\n{lines}\n    return config\n"
    )


CONFIG_CLASS = "Trainer.Config"
FIRST_ARGUMENTS = {"model_registry": "flavor"}  # what the first argument of a call is, where it is given by its place
MAX_CALLS = 200  # of functions of a file by one another: far above any registry


class ConfigCall(NamedTuple):
    """A call, not made: dotted name and arguments by name."""

    name: str
    keywords: Mapping[str, Any]


class ConfigModule(NamedTuple):
    """A file of config functions: its functions, and where the names that it imports come from."""

    functions: Mapping[str, ast.FunctionDef]
    imports: Mapping[str, str]
    package: str


def parse_config_module(text: str, what: str, package: str = "") -> ConfigModule:
    """A file of Python. `package` is the model that relative imports are of. Raises `InputError` for what is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{what}: not valid Python: {error}") from None
    imports = {
        alias.asname or alias.name: (node.module or "") if not node.level else f"{MODELS_PACKAGE}{package}"
        for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }  # fmt: skip
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    return ConfigModule(functions, imports, package)


def evaluate_config(source: ConfigModule, name: str) -> dict[str, Any]:
    """The options that a function sets. Raises `InputError` where it is no function of a config."""
    if name not in source.functions:
        raise InputError(f"config: no function {name!r} among {', '.join(source.functions) or 'none'}")
    try:
        found = _ConfigInterpreter(source, [MAX_CALLS]).run(source.functions[name], {})
    except RecursionError:
        raise InputError(f"config: {name} is nested too deeply") from None
    if found is None:
        raise InputError(f"config: {name} returns no {CONFIG_CLASS} that can be read without running it")
    return found


class _ConfigInterpreter:
    """The statements of one function, in order; `calls_left`: how many more calls of functions of the file are followed."""

    def __init__(self, source: ConfigModule, left: list[int]) -> None:
        self.source, self.calls_left = source, left
        self.names: dict[str, Any] = {}
        self.unread: dict[str, Any] = {}

    def run(self, function: ast.FunctionDef, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """The options of the config that is returned; None where none is."""
        self.calls_left[0] -= 1
        if self.calls_left[0] < 0:
            raise InputError(
                f"config: {function.name} takes more than {MAX_CALLS} calls of functions; fewer are required"
            )
        parameters = function.args.args
        defaults = [self._evaluate(one) for one in function.args.defaults]
        self.names = dict(
            zip((one.arg for one in parameters[len(parameters) - len(defaults) :]), defaults, strict=True)
        )
        self.names |= given
        for statement in function.body:
            if isinstance(statement, ast.Return):
                found = self._evaluate(statement.value) if statement.value is not None else None
                found = self._build_config(found)
                return {**found, **self.unread} if isinstance(found, dict) else None
            self._run_statement(statement)
        return None

    def _run_statement(self, statement: ast.stmt) -> None:
        """An assignment to a name or to an attribute of a config; texts and assertions say nothing."""
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], self._evaluate(statement.value)
            if isinstance(target, ast.Name):
                self.names[target.id] = self._build_config(value)
                return
            path = ast.unparse(target).split(".")
            config = self.names.get(path[0])
            if isinstance(target, ast.Attribute) and isinstance(config, dict):
                self._set_option(config, ".".join(path[1:]), value)
                return
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return
        if not isinstance(statement, (ast.Assert, ast.FunctionDef, ast.Import, ast.ImportFrom)):
            self.unread[ast.unparse(statement).splitlines()[0][:80]] = True

    def _evaluate(self, node: ast.expr) -> Any:
        """A literal, a name of the function's, a call that is not made, or the text of anything else."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self._evaluate(one) for one in node.elts]
        if isinstance(node, ast.Name) and node.id in self.names:
            return self.names[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return ast.literal_eval(node)
        return self._evaluate_call(node) if isinstance(node, ast.Call) else ast.unparse(node)

    def _evaluate_call(self, node: ast.Call) -> Any:
        """The config that another function makes, or a call by its name."""
        name = ast.unparse(node.func)
        named = {word.arg: self._evaluate(word.value) for word in node.keywords if word.arg}
        if name in self.source.functions:
            found = _ConfigInterpreter(self.source, self.calls_left).run(self.source.functions[name], named)
            return ConfigCall(name, named) if found is None else found
        module = self.source.imports.get(name, "")
        if name == "model_registry":
            named["name"] = module.removeprefix(MODELS_PACKAGE).split(".")[0] or self.source.package
        elif module.endswith(".config_registry"):
            return dict(registered_options(module.removeprefix(MODELS_PACKAGE).split(".")[0], name))
        if node.args:
            named = {FIRST_ARGUMENTS.get(name, "arguments"): self._evaluate(node.args[0]), **named}
        return ConfigCall(name, named)

    def _build_config(self, call: Any) -> Any:
        """The options of a config that is made by one call, of whatever class; anything else as it is."""
        if not isinstance(call, ConfigCall) or "model_spec" not in call.keywords:
            return call
        found: dict[str, Any] = {}
        for name, value in call.keywords.items():
            self._set_option(found, name, value)
        return found

    def _set_option(self, config: dict[str, Any], name: str, value: Any) -> None:
        """Set an option, or all of a section in place of those that it had."""
        if isinstance(value, ConfigCall) or name in ("activation_checkpoint", "optimizer"):
            for old in [old for old in config if old.startswith(f"{name}.") or old == name]:
                del config[old]
        if name == "model_spec":
            config.update(_model_section(config, value))
        elif name in ("activation_checkpoint", "loss", "optimizer"):
            config.update(_class_section(name, value))
        elif isinstance(value, ConfigCall):
            config.update({f"{name}.{key}": one for key, one in value.keywords.items()})
        else:
            config[name] = value


def _model_section(config: dict[str, Any], value: Any) -> Mapping[str, Any]:
    """What a model registry is asked for; converters by name, with their options under these."""
    if not isinstance(value, ConfigCall):
        return {"model_spec": str(value)}
    for old in [old for old in config if old.startswith("model.") or "Converter." in old]:
        del config[old]
    found = {f"model.{name}": one for name, one in value.keywords.items()}
    converters = value.keywords.get("converters")
    if not isinstance(converters, list):
        return found
    found["model.converters"] = [
        one.name.partition(".")[0] if isinstance(one, ConfigCall) else str(one) for one in converters
    ]
    for one in converters:
        if isinstance(one, ConfigCall):
            found |= {f"{one.name.partition('.')[0]}.{key}": each for key, each in one.keywords.items()}
    return found


def _class_section(name: str, value: Any) -> Mapping[str, Any]:
    """A section that is one of several classes: which it is, and its options."""
    if value is None:
        return {name: "none"}
    if not isinstance(value, ConfigCall):
        return {name: str(value)}
    kind = value.name.partition(".")[0]
    short = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory-budget"}.get(kind, kind)
    plain = {key: one for key, one in value.keywords.items() if not isinstance(one, ConfigCall) and name != "optimizer"}
    return {name: short, **{f"{name}.{key}": one for key, one in plain.items() if key != "global_vocab_size"}}
