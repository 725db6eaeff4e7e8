"""Config functions of torchtitan 0.3.0's registries: chosen for a run, written where flags are not enough, and read by syntax.

A function builds a `Trainer.Config` from calls with keywords, or takes that of another function, and sets attributes of it.
Only such statements are understood, by `ast`; nothing is run. Any other statement becomes an option named by its own text, so
that it is reported as not understood.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from shardwise.interop.frameworks.torchtitan.models import default_attention
from shardwise.interop.text_formats.option_tables import Options, read_option_file
from shardwise.values import InputError

MODELS_PACKAGE = "torchtitan.models."
RUN_MODULE = "run_config"  # file of the run's own config function
LIST_OPTIONS = ("parallelism.module_fqns_per_model_part",)  # nested lists, which tyro does not read back unchanged
OTHER_DATA = ("sft", "debug")  # functions whose data is not text from the web
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
# Arguments that repeat a default.
DEFAULT_ARGUMENTS = {"model.moe_comm_backend": "standard", "Float8LinearConverter.recipe_name": "rowwise"}


class RegisteredConfig(NamedTuple):
    """A function of a registry, and the options that it sets."""

    module: str
    name: str
    options: Options


def nearest_config(options: Options) -> RegisteredConfig:
    """Return the function of the model's module that needs the fewest changes to give these options."""
    module = options["model.name"]
    functions = registered_configs()[module]
    registered = [RegisteredConfig(module, name, config_options) for name, config_options in functions.items()]
    pretraining = [config for config in registered if not any(word in config.name for word in OTHER_DATA)] or registered
    return min(pretraining, key=lambda config: _config_distance(options, config))


def _config_distance(options: Options, base: RegisteredConfig) -> tuple[Any, ...]:
    """Return the distance of a function from some options, as a tuple to compare."""
    adds_converters = "model.converters" in base.options and "model.converters" not in options
    # Converters that the plan lacks would change the precision, so they weigh most; then statements, as flags are simpler.
    num_statements = len(list(_changing_statements(options, base)))
    return adds_converters, num_statements, base.options.get("model.flavor") != options["model.flavor"]


def _model_options(options: Options) -> dict[str, Any]:
    """Return the arguments for a model registry, without its defaults."""
    attention = default_attention(options.get("model.name"), options.get("model.flavor"))
    defaults = {**DEFAULT_ARGUMENTS, "model.attn_backend": attention}
    return {
        name: value for name, value in options.items()
        if (name.startswith("model.") or "Converter." in name) and not name.endswith("model_compile_enabled")
        and value != defaults.get(name)
    }  # fmt: skip


def _changing_statements(options: Options, base: RegisteredConfig) -> Iterator[tuple[str, str]]:
    """Yield (module to import model_registry from, or "", statement) for each change that flags cannot make."""
    module = options["model.name"]
    base_model = {"model.flavor": base.options.get("model.flavor"), **_model_options(base.options)}
    changes_model = _model_options(options) != base_model
    if changes_model:
        arguments = ", ".join(_registry_arguments(options))
        yield f"{MODELS_PACKAGE}{module}", f"config.model_spec = model_registry({arguments})"
    loss = options["loss"]
    changes_flavor = options["model.flavor"] != base.options.get("model.flavor")
    if loss != base.options.get("loss") or (changes_model and changes_flavor):
        yield "", f"config.loss = {LOSS_CALLS[loss].format(vocabulary=VOCABULARY_ARGUMENT)}"
    for name in LIST_OPTIONS:
        if name in options:
            yield "", f"config.{name} = {options[name]!r}"


def _registry_arguments(options: Options) -> Iterator[str]:
    """Yield the arguments of model_registry."""
    yield repr(options["model.flavor"])
    for name in ("attn_backend", "num_mtp_layers"):
        if f"model.{name}" in options:
            yield f"{name}={options[f'model.{name}']!r}"
    if "model.converters" in options:
        yield f"converters=[{', '.join(_converter_call(options, name) for name in options['model.converters'])}]"


def _converter_call(options: Options, name: str) -> str:
    arguments = [f"{key.partition('.')[2]}={value!r}" for key, value in options.items() if key.startswith(f"{name}.")]
    return f"{name}.Config({', '.join([*arguments, 'model_compile_enabled=True'])})"


def config_file_text(options: Options, base: RegisteredConfig) -> str:
    """Return the text of a file with its own config function, or "" if flags are enough."""
    statements = list(_changing_statements(options, base))
    if not statements:
        return ""
    imports = [f"from {home} import model_registry" for home, _ in statements if home]
    texts = [text for _, text in statements]
    used = [name for name in HOME_MODULES if any(name in text for text in texts)]
    imports += [f"from {HOME_MODULES[name]} import {name}" for name in used]
    return function_text(base.name, base.module, options, imports, texts)


def changed_flags(options: Options, base: RegisteredConfig) -> dict[str, Any]:
    """Return the flags to set: the options that the function does not already set."""
    set_elsewhere = (*LIST_OPTIONS, "loss", "optimizer")
    return {
        name: value for name, value in options.items()
        if name not in set_elsewhere and not name.startswith("model.") and "Converter." not in name
        and base.options.get(name) != value
    }  # fmt: skip


@cache
def registered_configs() -> Mapping[str, Mapping[str, Options]]:
    """Return the functions of the release's registries by module and name, with the options that each sets, as in the wheel."""
    configs: Mapping[str, Mapping[str, Options]] = json.loads(read_option_file("torchtitan_configs.json"))
    return configs


def registered_options(module: str, name: str) -> Options:
    """Return the options of a function of the release. Raises `InputError` for one that it lacks."""
    functions = registered_configs().get(module, {})
    if name not in functions:
        available = ", ".join(functions) or ", ".join(registered_configs())
        raise InputError(
            f"config: found {module} {name}, whose file is not among those given; it, or one of {available}, is required"
        )
    return functions[name]


def registry_package(name: str) -> str:
    """Return the model's package of the release whose registry has a function of this name; "" if none has."""
    return next((package for package, functions in registered_configs().items() if name in functions), "")


def function_text(base: str, module: str, options: Options, imports: Sequence[str], statements: Sequence[str]) -> str:
    """Return a file with one function, `run`: the config of a registered one, and statements that change it."""
    lines = "\n".join(f"    {line}" for line in statements)
    names = "\n".join(sorted({*imports, f"from {MODELS_PACKAGE}{module}.config_registry import {base}",
                              "from torchtitan.trainer import Trainer"}))  # fmt: skip
    return (
        f'"""Settings of {options["model.name"]} {options["model.flavor"]} that have no flag."""\n\n{names}\n\n\n'
        f"def run() -> Trainer.Config:\n    config = {base}()\n{lines}\n    return config\n"
    )


CONFIG_CLASS = "Trainer.Config"
FIRST_ARGUMENTS = {"model_registry": "flavor"}  # name of the first positional argument
MAX_CALLS = 200  # nested calls of a file's functions: far above any registry


class ConfigCall(NamedTuple):
    """A call that is not made: dotted name and arguments by name."""

    name: str
    keywords: Mapping[str, Any]


class ConfigModule(NamedTuple):
    """A file of config functions: its functions, and the modules that its imported names come from."""

    functions: Mapping[str, ast.FunctionDef]
    imports: Mapping[str, str]
    package: str


def parse_config_module(text: str, source: str, package: str = "") -> ConfigModule:
    """Return the functions and imports of a Python file; relative imports are of the model `package`. Raises `InputError`."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{source}: not valid Python: {error}") from None
    imports = {
        alias.asname or alias.name: (node.module or "") if not node.level else f"{MODELS_PACKAGE}{package}"
        for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }  # fmt: skip
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    return ConfigModule(functions, imports, package)


def evaluate_config(source: ConfigModule, name: str) -> dict[str, Any]:
    """Return the options that a function sets. Raises `InputError` if it is missing or returns no config."""
    if name not in source.functions:
        raise InputError(f"config: no function {name!r} among {', '.join(source.functions) or 'none'}")
    try:
        options = _ConfigInterpreter(source, [MAX_CALLS]).run(source.functions[name], {})
    except RecursionError:
        raise InputError(f"config: {name} is nested too deeply") from None
    if options is None:
        raise InputError(f"config: {name} returns no {CONFIG_CLASS} that can be read without running it")
    return options


class _ConfigInterpreter:
    """Interprets the statements of one function, in order.

    `calls_left` (one number, shared by nested interpreters) limits how many calls of functions of the file are followed.
    """

    def __init__(self, source: ConfigModule, calls_left: list[int]) -> None:
        self.source, self.calls_left = source, calls_left
        self.names: dict[str, Any] = {}
        self.unread: dict[str, Any] = {}

    def run(self, function: ast.FunctionDef, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the options of the config that the function returns, or None if it returns something else."""
        self.calls_left[0] -= 1
        if self.calls_left[0] < 0:
            raise InputError(
                f"config: {function.name} takes more than {MAX_CALLS} calls of functions; fewer are required"
            )
        parameters = function.args.args
        defaults = [self._evaluate(default) for default in function.args.defaults]
        optional = [parameter.arg for parameter in parameters[len(parameters) - len(defaults) :]]
        self.names = {**dict(zip(optional, defaults, strict=True)), **arguments}
        for statement in function.body:
            if isinstance(statement, ast.Return):
                config = self._evaluate(statement.value) if statement.value is not None else None
                config = self._build_config(config)
                return {**config, **self.unread} if isinstance(config, dict) else None
            self._run_statement(statement)
        return None

    def _run_statement(self, statement: ast.stmt) -> None:
        """Run an assignment to a name or to an attribute of a config; skip constants, assertions and imports."""
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
        """Return a literal, the value of a local name, a call that is not made, or the text of anything else."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self._evaluate(child) for child in node.elts]
        if isinstance(node, ast.Name) and node.id in self.names:
            return self.names[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            number = node.operand.value
            return -number if isinstance(number, (int, float)) else ast.unparse(node)
        return self._evaluate_call(node) if isinstance(node, ast.Call) else ast.unparse(node)

    def _evaluate_call(self, node: ast.Call) -> Any:
        """Return the config that another function makes, or the call by its name."""
        name = ast.unparse(node.func)
        arguments = {keyword.arg: self._evaluate(keyword.value) for keyword in node.keywords if keyword.arg}
        if name in self.source.functions:
            config = _ConfigInterpreter(self.source, self.calls_left).run(self.source.functions[name], arguments)
            return ConfigCall(name, arguments) if config is None else config
        module = self.source.imports.get(name, "")
        if name == "model_registry":
            arguments["name"] = module.removeprefix(MODELS_PACKAGE).split(".")[0] or self.source.package
        elif module.endswith(".config_registry"):
            return dict(registered_options(module.removeprefix(MODELS_PACKAGE).split(".")[0], name))
        if node.args:
            arguments = {FIRST_ARGUMENTS.get(name, "arguments"): self._evaluate(node.args[0]), **arguments}
        return ConfigCall(name, arguments)

    def _build_config(self, call: Any) -> Any:
        """Return the options of a config that one call makes, of whatever class; anything else unchanged.

        A config that holds a trainer's (of reinforcement learning) is something else.
        """
        if not isinstance(call, ConfigCall) or "model_spec" not in call.keywords or "trainer" in call.keywords:
            return call
        config: dict[str, Any] = {}
        for name, value in call.keywords.items():
            self._set_option(config, name, value)
        return config

    def _set_option(self, config: dict[str, Any], name: str, value: Any) -> None:
        """Set an option, or replace all options of a section."""
        if isinstance(value, ConfigCall) or name in ("activation_checkpoint", "optimizer"):
            for old in [old for old in config if old.startswith(f"{name}.") or old == name]:
                del config[old]
        if name == "model_spec":
            config.update(_model_section(config, value))
        elif name in ("activation_checkpoint", "loss", "optimizer"):
            config.update(_class_section(name, value))
        elif isinstance(value, ConfigCall):
            config.update({f"{name}.{key}": setting for key, setting in value.keywords.items()})
        else:
            config[name] = value


def _model_section(config: dict[str, Any], value: Any) -> Mapping[str, Any]:
    """Return the arguments of a model registry; converters by name, with their options under these."""
    if not isinstance(value, ConfigCall):
        return {"model_spec": str(value)}
    for old in [old for old in config if old.startswith("model.") or "Converter." in old]:
        del config[old]
    options = {f"model.{name}": setting for name, setting in value.keywords.items()}
    converters = value.keywords.get("converters")
    if not isinstance(converters, list):
        return options
    options["model.converters"] = names = []
    for converter in converters:
        name = converter.name.partition(".")[0] if isinstance(converter, ConfigCall) else str(converter)
        names.append(name)
        if isinstance(converter, ConfigCall):
            options |= {f"{name}.{key}": setting for key, setting in converter.keywords.items()}
    return options


def _class_section(name: str, value: Any) -> Mapping[str, Any]:
    """Return a section that is one of several classes: its class, and its options."""
    if value is None:
        return {name: "none"}
    if not isinstance(value, ConfigCall):
        return {name: str(value)}
    kind = value.name.partition(".")[0]
    short = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory-budget"}.get(kind, kind)
    if name == "optimizer":
        return {name: short}
    plain = {key: setting for key, setting in value.keywords.items() if not isinstance(setting, ConfigCall)}
    return {name: short, **{f"{name}.{key}": setting for key, setting in plain.items() if key != "global_vocab_size"}}
