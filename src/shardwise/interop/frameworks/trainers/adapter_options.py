"""Adapters of launches: target lists of PEFT as targets of `model.adapters`, and arguments of training scripts that have them.

Sources: PEFT 0.21: utils/constants.py (targets by default), tuners/tuners_utils.py (check_target_module_exists: a text is a
regular expression for whole names, a list has ends of names); TRL 1.16, ModelConfig; OpenRLHF and DeepSpeedExamples; NeMo
Automodel 0.7.0, components/_peft/module_matcher.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.launch_scripts import SCRIPT_PREFIX, is_true
from shardwise.interop.launches.target import OptionMapping, OptionReader
from shardwise.interop.text_formats.option_tables import Options
from shardwise.model import Architecture
from shardwise.model.adapters import ALL_LINEAR, EXPERT_MODULES, LORA_GROUPS, LORA_MODULES, LORA_TARGETS
from shardwise.values import InputError, describe_unknown

# Other names of modules, by which families and frameworks call them.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("qkv",), "query_key_value": ("qkv",), "c_attn": ("qkv",), "Wqkv": ("qkv",), "linear_qkv": ("qkv",),
    "linear_q": ("q_proj",), "linear_k": ("k_proj",), "linear_v": ("v_proj",), "linear_proj": ("attention_out",),
    "out_proj": ("attention_out",), "dense": ("attention_out",), "gate_up_proj": ("gate_proj", "up_proj"),
    "linear_fc1": ("gate_proj", "up_proj"), "linear_fc1_gate": ("gate_proj",), "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",), "fc1": ("up_proj",), "fc2": ("down_proj",), "dense_h_to_4h": ("up_proj",),
    "dense_4h_to_h": ("down_proj",), "w1": ("experts.gate_up_proj",), "w3": ("experts.gate_up_proj",),
    "w2": ("experts.down_proj",), "gate": ("router",), "all": (ALL_LINEAR,), "all_linear": (ALL_LINEAR,),
    "linear_q_down_proj": ("q_a_proj",), "linear_q_up_proj": ("q_b_proj",), "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",), "linear_q_proj": ("q_proj",),
}  # fmt: skip
# Tables of tokens, whose adapters or copies are trained beside those of matrices.
VOCABULARY_MODULES = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "output_layer", "word_embeddings")
DEFAULT_TARGETS = ("q_proj", "v_proj")  # of PEFT, for Llama and what is like it; others have theirs
ATTENTION_MODULES = (*LORA_GROUPS["qkv"], *LORA_GROUPS["attention_out"])
MLP_PATHS = ("mlp", "mlp.experts.0", "mlp.shared_expert", "mlp.shared_experts")
# A regular expression of a target: words, dots, groups, alternatives and repeated characters. A repeated group may take
# exponential time and is refused.
_EXPRESSION = re.compile(r"[\w.\\|()\[\]?:*+^$-]{1,300}")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
MAX_REPETITIONS = 6


def read_targets(names: Any, label: str, reader: OptionReader) -> tuple[str, ...]:
    """Return the targets of a list of names, a word, or a regular expression. Raises `InputError` for names that are not known.

    Adapters of tables of tokens are left out, with a note.
    """
    if isinstance(names, str) and not re.fullmatch(r"[\w.,* -]+", names):
        return expand_expression(names, label)
    paths = re.split(r"[\s,]+", names.strip(" ,")) if isinstance(names, str) else [str(name) for name in names]
    modules = [word.rpartition(".")[2] if word not in LORA_TARGETS else word for word in paths if word]
    skipped = [module for module in modules if module in VOCABULARY_MODULES]
    if skipped:
        reader.notes.append(f"{label}: adapters of {', '.join(skipped)} are left out of the price")
    targets = [target for module in modules if module not in skipped for target in ALIASES.get(module, (module,))]
    unknown = [target for target in targets if target not in LORA_TARGETS]
    if unknown or not targets:
        raise InputError(
            f"{label}: {describe_unknown(unknown[0] if unknown else 'nothing', [*LORA_TARGETS, *ALIASES])}"
        )
    return tuple(dict.fromkeys(targets))


def expand_expression(expression: str, label: str) -> tuple[str, ...]:
    """Return the modules of a decoder layer whose whole names a regular expression matches. Raises `InputError` if none does."""
    repetitions = len(re.findall(r"[*+]", expression))
    if not _EXPRESSION.fullmatch(expression) or _REPEATED_GROUP.search(expression) or repetitions > MAX_REPETITIONS:
        raise InputError(
            f"{label}: found {expression[:80]!r}; names of modules, or a regular expression of them, are required"
        )
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise InputError(f"{label}: found {expression[:80]!r}, which is no regular expression: {error}") from None
    matching = matching_modules(lambda name: pattern.fullmatch(name) is not None)
    if not matching:
        raise InputError(
            f"{label}: found {expression[:80]!r}, which matches no matrix of a decoder layer; all-linear has them all"
        )
    return matching


def expand_patterns(patterns: Any, label: str) -> tuple[str, ...]:
    """Return the modules of a decoder layer whose names, or their ends, match one of some patterns with `*`."""
    texts = [str(pattern) for pattern in (patterns if isinstance(patterns, list) else [patterns])]
    wrong = [word for word in texts if not re.fullmatch(r"[\w.*-]{1,200}", word) or word.count("*") > MAX_REPETITIONS]
    if wrong:
        raise InputError(f"{label}: found {wrong[0][:80]!r}; names of modules, with * for any text, are required")
    return matching_modules(
        lambda name: any(fnmatchcase(name, word) or name.rpartition(".")[2] == word for word in texts)
    )


def matching_modules(matches: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the modules of a decoder layer of which one name matches."""
    return tuple(module for module in LORA_MODULES if any(map(matches, _names(module))))


def _names(module: str) -> Iterator[str]:
    """Yield the names that a module may have in a model of transformers, alone or as the text part of another. Experts are
    one module."""
    if module in EXPERT_MODULES:
        yield "model.layers.0.mlp.experts"
    for prefix in ("model.layers.0", "model.language_model.layers.0", "language_model.model.layers.0"):
        paths = ("self_attn",) if module in ATTENTION_MODULES else MLP_PATHS
        yield from (f"{prefix}.{path}.{'gate' if module == 'router' else module}" for path in paths)


def adapter_fields(rank: int | None, targets: Iterable[str]) -> Mapping[str, Any]:
    """Return the fields of adapters; none without a rank."""
    return {"model.lora_rank": rank, "model.lora_targets": tuple(targets)} if rank else {}


def default_targets(model: Architecture | None) -> tuple[str, ...]:
    """Return PEFT's targets where a launch names none: queries and values, or all of attention's first product."""
    is_latent = model is not None and bool(model.kv_lora_rank)
    return ("qkv",) if is_latent else DEFAULT_TARGETS


# Names of the rank and the targets in training scripts, with the words that turn adapters on (empty: the rank does).
SCRIPT_RANKS: Mapping[str, str] = {"lora_r": "use_peft", "lora_rank": "", "lora_dim": ""}
SCRIPT_TARGETS = ("lora_target_modules", "target_modules", "lora_target", "lora_module_name")
SCRIPT_SWITCHES = ("use_peft", "use_lora", "lora", "qlora", "q_lora")
DEFAULT_SCRIPT_RANK = 16  # Source: TRL 1.16, ModelConfig.lora_r


def _read_script_adapters(reader: OptionReader) -> Mapping[str, Any]:
    """Return the adapters of a training script's arguments; TRL's `lora_r` counts with `use_peft` alone."""
    switches = {name: is_true(reader.get(SCRIPT_PREFIX + name, False)) for name in SCRIPT_SWITCHES}
    ranks = [
        reader.get(SCRIPT_PREFIX + name)
        for name, switch in SCRIPT_RANKS.items()
        if not switch or switches[switch] or SCRIPT_PREFIX + "use_peft" not in reader
    ]
    rank = next((int(rank) for rank in ranks if str(rank).isdecimal() and int(str(rank)) > 0), None)
    if rank is None and not any(switches.values()):
        return {}
    label, names = next(
        ((f"--{name}", reader.get(SCRIPT_PREFIX + name)) for name in SCRIPT_TARGETS if SCRIPT_PREFIX + name in reader),
        ("", None),
    )
    targets = read_targets(names, label, reader) if names else default_targets(reader.model)
    reader.acknowledge(*(SCRIPT_PREFIX + name for name in ("lora_alpha", "lora_dropout", "use_rslora")))
    return adapter_fields(rank or DEFAULT_SCRIPT_RANK, targets)


def _script_adapter_options(launch: Launch) -> Options:
    """Return TRL's arguments of a model's adapters."""
    model = launch.model
    names = {"use_peft": True, "lora_r": model.lora_rank, "lora_target_modules": sorted(model.structure.lora_targets)}
    return {SCRIPT_PREFIX + name: value for name, value in names.items()} if model.lora_rank else {}


ADAPTER_MAPPING = OptionMapping(_script_adapter_options, _read_script_adapters)
QUANTIZATIONS: Mapping[str, tuple[str, bool]] = {
    "qlora_nf4": ("load_in_4bit", True), "qlora_nf4_single": ("load_in_4bit", False), "qlora_int8": ("load_in_8bit", False),
}  # fmt: skip


def quantization_options(precision: str, prefix: str, double: str) -> Options:
    """Return the options of a quantized base under a prefix; `double` is the name of double quantization."""
    if precision not in QUANTIZATIONS:
        return {}
    name, is_double = QUANTIZATIONS[precision]
    return {prefix + name: True, **({prefix + double: True} if is_double else {})}


def quantized_precision(*, four_bits: bool, eight_bits: bool, double: bool) -> str | None:
    """Return the recipe of a base that bitsandbytes quantizes; None if it does not."""
    if four_bits:
        return "qlora_nf4" if double else "qlora_nf4_single"
    return "qlora_int8" if eight_bits else None


def script_quantization(reader: OptionReader) -> str | None:
    """Return the recipe of a base that a training script quantizes; TRL's double quantization is off by default."""
    on = {
        name: is_true(reader.get(SCRIPT_PREFIX + name, False))
        for name in ("load_in_4bit", "load_in_8bit", "qlora", "q_lora")
    }
    double = is_true(reader.get(f"{SCRIPT_PREFIX}use_bnb_nested_quant", False)) or on["qlora"] or on["q_lora"]
    return quantized_precision(
        four_bits=on["load_in_4bit"] or on["qlora"] or on["q_lora"], eight_bits=on["load_in_8bit"], double=double
    )
