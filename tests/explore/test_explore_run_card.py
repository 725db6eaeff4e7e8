"""The card of the whole run has the numbers of `estimate --json`, with intervals from the step's, and says what is unknown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.present.command_line import main
from shardwise.present.explorer.explorer import Explorer
from shardwise.present.explorer.opened_plan import NameResolver

STATE = "model=llama-3-8b&cluster={cluster}&batch_tokens=1Mi&seq_len=8192&layout={layout}"
NUMBERS = ("tokens", "num_steps", "ideal_days", "goodput", "days", "chip_hours", "usd", "energy_mwh", "price_date")


def card(more: str = "", cluster: str = "h100:64", layout: str = "tp=2+pp=4+fsdp=8+zero_stage=1") -> dict[str, Any]:
    payload = Explorer(NameResolver()).answer("overview", STATE.format(cluster=cluster, layout=layout) + more)
    run: dict[str, Any] = payload["training_run"] | {"fields": payload["fields"], "estimate": payload["estimate"]}
    return run


def printed_run(capsys: pytest.CaptureFixture[str], tokens: str) -> dict[str, Any]:
    layout = "tp=2 pp=4 fsdp=8 zero_stage=1"
    words = ["llama-3-8b", "h100:64", "--batch-tokens", "1Mi", "--seq-len", "8192", "--layout", layout]
    assert main(["estimate", *words, "--tokens", tokens, "--json"]) == 0
    run: dict[str, Any] = json.loads(capsys.readouterr().out)["run"]
    return run


def test_numbers_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    run, printed = card("&tokens=15T"), printed_run(capsys, "15T")
    assert {name: run[name] for name in NUMBERS} == {name: printed[name] for name in NUMBERS}
    assert not run["assumes_optimal_tokens"]


def test_a_job_without_tokens_takes_twenty_for_each_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    run = card()
    assert run["assumes_optimal_tokens"]
    assert run["tokens"] == 20 * 8_030_261_248
    printed = printed_run(capsys, str(20 * 8_030_261_248))
    assert {name: run[name] for name in NUMBERS} == {name: printed[name] for name in NUMBERS}
    assert run["fields"]["training_run.tokens"]["kind"].startswith("an assumption")
    assert "Hoffmann" in run["fields"]["training_run.tokens"]["source"]
    assert run["estimate"]["run"] is None


def test_intervals_are_those_of_the_step() -> None:
    run = card("&tokens=1T")
    low, high = run["estimate"]["estimate"]["interval90"]
    for name in ("days", "usd", "energy_mwh"):
        lowest, highest = run["interval90"][name]
        assert lowest < run[name] < highest
        assert highest / lowest == pytest.approx(high / low, rel=1e-3)  # goodput hardly depends on the step


def test_a_bound_has_no_interval() -> None:
    assert set(card("&overlap=sum")["interval90"].values()) == {None}


def test_values_without_a_source_are_unknown_with_the_reason() -> None:
    run = card(cluster="h800:64", layout="fsdp=64")
    unknown = [name for name in ("usd", "energy_mwh") if run[name] is None]
    assert unknown
    for name in unknown:
        assert run["missing"][name].startswith("no sourced")
        assert run["interval90"][name] is None
        assert f"training_run.{name}" not in run["fields"]


def test_formulas_give_the_numbers() -> None:
    run = card("&tokens=1T")
    assert run["days"] == pytest.approx(run["ideal_days"] / run["goodput"])
    assert run["chip_hours"] == pytest.approx(64 * 24 * run["days"])
    assert run["usd"] == pytest.approx(run["chip_hours"] * run["price_usd_per_hour"])
    assert run["energy_mwh"] == pytest.approx(run["chip_hours"] * run["power_w"] * run["pue"] / 1e6)
