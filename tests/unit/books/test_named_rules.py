"""The books' rules by name: their list, their documentation and their values."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

import pytest

import shardwise as sw
from shardwise.book_formulas import rules
from shardwise.book_formulas.named_rules import NamedRule, evaluate_rule, get_rule, rules_by_name
from shardwise.book_formulas.rule_parameters import RuleParameter
from shardwise.book_formulas.rules import batch_rules
from shardwise.model.architecture import Architecture
from shardwise.values.errors import InputError

# Functions whose arguments or results are no numbers: a job, a function, products, shardings, lists of layers, any many seconds.
NOT_BY_NAME = {"book_rules", "critical_size", "padding_efficiency", "product_flops", "stage_layers", "time_bounds"}
# Numbers without a unit: ratios of two of a kind, and answers of yes or no.
PURE = {
    "causal_scores_over_gemm", "doubling_speedup_ratio", "embedding_share", "flops_utilisation", "improvement_fraction",
    "is_compute_bound", "linear_learning_rate", "mixed_math_over_comms", "optimal_learning_rate", "pipeline_busy_fraction",
    "sign_learning_rate", "square_root_learning_rate", "tp_comms_over_math", "tp_is_compute_bound", "zero_comms_over_math",
    "zero_memory_reduction",
}  # fmt: skip
YEAR = re.compile(r"\b(19|20)\d\d\b")


def test_every_function_of_numbers_is_a_rule() -> None:
    functions = {name for name in rules.__all__ if inspect.isfunction(getattr(rules, name))}
    assert set(rules_by_name()) == functions - NOT_BY_NAME


@pytest.mark.parametrize("rule", rules_by_name().values(), ids=rules_by_name())
def test_every_rule_documents_its_result_formula_and_source(rule: NamedRule) -> None:
    assert rule.summary.endswith(".")
    assert rule.formula
    assert YEAR.search(rule.source), "a source needs a work with its year"
    assert not re.search(r"the (book|note|playbook)\b", rule.source), "a source must name the work"
    assert rule.topic


@pytest.mark.parametrize("rule", rules_by_name().values(), ids=rules_by_name())
def test_every_capital_of_a_formula_is_documented_and_no_other(rule: NamedRule) -> None:
    """Letters that the formula itself defines are not listed."""
    capitals = re.sub(r"1F1B|`[^`]*`|\b(?:[A-Z]+s|MFU|FSDP|DP|TP|FLOP)\b|\w*[a-z]{2}\w*", " ", rule.formula)
    used = set(re.findall(r"[A-Z][xy]?", capitals)) - {"I"}
    documented = {item.partition(" ")[0] for item in rule.letters.split("; ")}
    assert used <= documented
    assert {letter for letter in documented if re.fullmatch("[A-Z]", letter)} <= used | {"E", "S"}


def test_letters_name_the_parameters_of_the_rule() -> None:
    """Letters of model width, hidden width and axes name the parameters of this rule."""
    assert rules_by_name()["tp_is_compute_bound"].letters == (
        "F hidden width (d_ff); M axes of the torus (num_axes); alpha C / W (alpha)"
    )


def small_value(parameter: RuleParameter) -> str:
    """A small value of a parameter's kind."""
    named: Mapping[object, str] = {Architecture: "llama-3.2-1b", str: "1f1b"}
    return (
        parameter.choices[0]
        if parameter.choices
        else named.get(parameter.kind, "2 ms" if parameter.unit == "s" else "3e9")
    )


@pytest.mark.parametrize("rule", rules_by_name().values(), ids=rules_by_name())
def test_every_rule_has_a_value_and_every_number_its_unit(rule: NamedRule) -> None:
    small_values = {"zero_stage": "1", "pp": "3", "small_batch": "2e9", "other_steps": "2e9", "other_tokens": "4e9"}
    arguments = {
        parameter.name: small_values.get(parameter.name) or small_value(parameter)
        for parameter in rule.parameters
        if parameter.required
    }
    result = evaluate_rule(rule, arguments)
    assert set(result.arguments) == {parameter.name for parameter in rule.parameters}
    for part in result.parts:
        assert not math.isnan(part.value)
        assert part.text
        if dataclasses.is_dataclass(result.value):
            assert getattr(result.value, part.name) == part.value
        else:
            assert bool(part.unit) != (rule.name in PURE)


@pytest.mark.parametrize(
    ("call", "value", "unit"),
    [
        # Printed in the books: How to Scale Your Model, "Training" and "Training Llama 3"; the playbook, "ZeRO".
        ({"name": "critical_intensity", "flops_per_s": "459 TFLOP/s", "bytes_per_s": "180GB/s"}, 2550, "FLOPs/byte"),
        ({"name": "fsdp_min_tokens_per_chip", "alpha": 2550, "num_axes": "3"}, 850, "tokens/chip"),
        ({"name": "mixed_min_tokens_per_chip", "alpha": "2550", "d_ff": "28Ki"}, 453.6, "tokens/chip"),
        ({"name": "mixed_min_tokens_per_chip", "alpha": "2550", "d_ff": "28Ki", "overlap": "max"}, 113.4, "tokens/chip"),
        ({"name": "training_seconds", "num_params": "70B", "tokens": "15T", "num_chips": 8960, "flops_per_s": "459TFLOP/s",
          "mfu": 0.4}, 44.3 * 86400, "s"),
        ({"name": "max_params_per_device", "memory_bytes": "96GB", "bytes_per_param": 10}, 9.6e9, "parameters"),
        ({"name": "dcn_min_tokens_per_pod", "pod_flops_per_s": 8960 * 459e12, "num_hosts": 2240, "host_bytes_per_s": "25GB/s"},
         73440, "tokens/pod"),
        ({"name": "zero3_extra_all_gathers", "num_layers": 32}, 63, "AllGathers"),
    ],
)  # fmt: skip
def test_rules_give_the_values_that_the_books_print(call: dict[str, object], value: float, unit: str) -> None:
    result = sw.rule(**call)  # type: ignore[arg-type]
    assert result.value == pytest.approx(value, rel=2e-3)
    assert [part.unit for part in result.parts] == [unit]


def test_every_number_of_a_result_has_a_unit() -> None:
    cost = sw.rule("matmul_cost", batch=240, d_in="8Ki", d_out="28Ki")
    units = {part.name: part.unit for part in cost.parts}
    assert (units["flops"], units["read_bytes"], units["intensity"]) == ("FLOPs", "B", "FLOPs/byte")
    times = sw.rule("contracting_split_times", batch=1, d_in=1, d_out=1, flops_per_s=1, bytes_per_s=1)
    assert {part.name: part.unit for part in times.parts} == {"math_s": "s", "comms_s": "s", "compute_bound": ""}
    share = sw.rule("params_by_part", architecture="llama-3-8b")
    assert {part.name: part.unit for part in share.parts}["mlp_share"] == ""
    assert sum(part.value for part in share.parts[:4]) == sw.num_params(sw.load_model("llama-3-8b"))


def test_an_infinite_value_is_printed_as_infinite() -> None:
    result = sw.rule("matmul_critical_batch", flops_per_s=1e15, bytes_per_s=1e12, d_in=100, d_out=100)
    assert result.parts[0].text == "infinite"
    assert repr(result).startswith("RuleValue: matmul_critical_batch = infinite; B = I / ")


def test_listed_rules_have_signatures_and_formulas() -> None:
    rules_listed = {rule.name: rule for rule in sw.rules()}
    assert rules_listed == rules_by_name()
    assert repr(rules_listed["tp_max_degree"]) == "NamedRule: tp_max_degree alpha=... d_ff=... num_axes=1: M·F / alpha"
    with pytest.raises(InputError, match="both are required"):
        sw.rules(model="llama-3-8b")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("name", "arguments", "problems"),
    [
        ("tp_max_degre", {}, ["rule: found 'tp_max_degre' (did you mean 'tp_max_degree'?)"]),
        ("tp_max_degree", {"alfa": 1, "num_axes": 1.5},
         ["no 'alfa' (did you mean 'alpha'?); it takes alpha, d_ff, num_axes", "alpha missing", "d_ff missing",
          "num_axes: found 1.5"]),
        ("math_s", {"flops": "1 GB", "flops_per_s": "5"}, ["which is in B", "which is 5 FLOP/s; a unit is required"]),
        ("tp_max_degree", {"alpha": -1, "d_ff": "many"}, ["found -1; a number of at least 0", "found 'many'"]),
        ("tp_max_degree", {"alpha": 0, "d_ff": 1}, ["for which M·F / alpha has no value"]),
        ("training_flops", {"num_params": 1, "tokens": 1, "recompute": "maybe"},
         ["found 'maybe'; one of false, true is required"]),
        ("mixed_min_tokens_per_chip", {"alpha": 1, "d_ff": 1, "overlap": "mx"}, ["found 'mx' (did you mean 'max'?)"]),
        ("params_by_part", {"architecture": "llama-3-70"}, ["did you mean 'llama-3-70b'?"]),
        ("zero_state_bytes", {"num_params": 1, "zero_stage": 4}, ["one of 0, 1, 2, 3 is required"]),
        ("rescaled_seconds", {"seconds": "1 fortnight", "num_chips": 1, "target_chips": 1}, ["s, min, h, d or w is required"]),
        ("critical_batch_of_loss", {"loss": "1e-200"}, ["has no value"]),
    ],
)  # fmt: skip
def test_all_problems_of_a_call_are_reported_together(
    name: str, arguments: dict[str, object], problems: list[str]
) -> None:
    with pytest.raises(InputError) as raised:
        evaluate_rule(get_rule(name), arguments)
    assert len(raised.value.problems) == len(problems)
    for problem, expected in zip(raised.value.problems, problems, strict=True):
        assert expected in problem


def test_all_rules_and_their_results_are_public() -> None:
    """The package exports exactly what its modules define."""
    modules = [import_module(f"{rules.__name__}.{module.name}") for module in iter_modules(rules.__path__)]
    gathered = {
        name
        for module in modules
        for name, member in vars(module).items()
        if not name.startswith("_") and getattr(member, "__module__", "") == module.__name__ and name not in INTERNAL
    }
    assert gathered | {*batch_rules.__all__} == set(rules.__all__)


# What several modules compute with.
INTERNAL = {"coefficients", "first_rise"}
