"""`rule` and `show rules` as a user meets them."""

from __future__ import annotations

import json

import pytest
from answers import answer
from json_schemas import require_valid

from shardwise.book_formulas.named_rules import rules_by_name
from shardwise.present.command_line import main

ALPHA = ["critical_intensity", "flops_per_s=459TFLOP/s", "bytes_per_s=180GB/s"]
LAYER = [
    "mlp_layer_times", "global_batch_tokens=4Mi", "d_model=8Ki", "d_ff=28Ki", "flops_per_s=459TFLOP/s", "bytes_per_s=180GB/s",
    "fsdp=2240", "tp=4",
]  # fmt: skip


def test_a_value_comes_with_its_unit_formula_and_source() -> None:
    text = answer("rule", *ALPHA)
    assert text == (
        "critical_intensity = 2,550 FLOPs/byte\n"
        "  alpha, in FLOPs per byte of a 2-byte format: what work must do with a byte it moves to be bound by compute.\n"
        "  given    flops_per_s = 459 TFLOP/s, bytes_per_s = 180 GB/s, bytes_per_element = 2\n"
        "  formula  (C / W) · (bytes per element / 2)\n"
        '  source   Austin et al., How to Scale Your Model, 2025, "All About Rooflines"; Stratos, Compute-Bound Training, 2026, '
        "section 2.1 (I*)"
    )


def test_several_numbers_are_a_table() -> None:
    text = answer("rule", *LAYER)
    assert "\n  math_s            958 µs\n" in text
    assert "\n  compute_bound         no\n" in text
    assert "overlap = sum" in text


def test_a_rule_without_values_lists_its_parameters() -> None:
    text = answer("rule", "mixed_min_tokens_per_chip")
    assert "\n  takes      unit  default\n  alpha      -     required\n" in text
    assert "\n  overlap    -     sum (one of sum, max)\n" in text
    for line in (
        "gives    tokens/chip",
        "formula  4·alpha² / (Mx·My·F)",
        "assumes  the split is",
        "source   Austin",
        "letters  F hidden width (d_ff); Mx axes",
    ):
        assert f"\n  {line}" in text


def test_a_rule_that_takes_nothing_has_its_value_at_once() -> None:
    assert answer("rule", "tokens_per_param_optimal").startswith("tokens_per_param_optimal = 20 tokens/parameter\n")


def test_the_list_has_every_rule_under_its_topic() -> None:
    lines = answer("show", "rules").splitlines()
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    assert names == list(rules_by_name())
    topics = [line for line in lines if line and not line.startswith("  ")]
    assert topics[:-1] == sorted({rule.topic for rule in rules_by_name().values()})
    assert "tp_max_degree" not in answer("show", "rules", "zero")
    assert answer("show", "rules", "tp_max_degree") == answer("rule", "tp_max_degree")


def test_json_has_the_rule_with_and_without_numbers() -> None:
    rule = json.loads(answer("rule", "matmul_critical_batch", "--json"))
    require_valid(rule)
    assert (rule["given"], rule["values"]) == (None, None)
    assert [parameter["default"] for parameter in rule["parameters"]] == [
        None,
        None,
        None,
        None,
        2.0,
    ]  # infinite widths are null
    answered = json.loads(answer("rule", *ALPHA, "--json"))
    require_valid(answered)
    assert answered["values"] == [{"name": "critical_intensity", "value": 2550.0, "unit": "FLOPs/byte"}]
    assert answered["given"]["bytes_per_s"] == 180e9
    model = json.loads(answer("rule", "params_by_part", "architecture=llama-3-8b", "--json"))
    require_valid(model)
    assert model["given"] == {"architecture": "llama-3-8b"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tp_max_degre"], "did you mean 'tp_max_degree'?"),
        (["tp_max_degree", "alpha=3", "dff=4"], "no 'dff' (did you mean 'd_ff'?)"),
        (["tp_max_degree", "alpha", "=3"], "found '=3'; such as tokens=4Ki is required"),
        (["tp_max_degree", "alpha=3", "alpha=4"], "found alpha 2 times; once is required"),
    ],
)
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_wrong_words_end_with_what_is_required(
    words: list[str], message: str, as_json: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rule", *words, *as_json]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
