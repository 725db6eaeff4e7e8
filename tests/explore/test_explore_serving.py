"""The serving view has what `serve plan --json` prints, and moves with its sliders."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.present.command_line import main
from shardwise.present.explorer.answer_workers import dump_payload
from shardwise.present.explorer.explorer import Explorer, with_report
from shardwise.present.explorer.opened_plan import NameResolver

MODEL = "view=serving&model=llama-3.1-8b&cluster=h100:8"


def ask(details: str = "") -> dict[str, Any]:
    payload: dict[str, Any] = json.loads(dump_payload(Explorer(NameResolver()).answer("serving", f"{MODEL}{details}")))
    return payload


def run_serve_plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["serve", "plan", "llama-3.1-8b", "h100:8", *arguments, "--json"]) == 0
    payload: dict[str, Any] = json.loads(capsys.readouterr().out)
    return payload


def test_the_figures_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask("&isl=1000&osl=200&rate=5&tpot=30ms&engine=sglang")
    flags = ("--isl", "1000", "--osl", "200", "--rate", "5/s", "--tpot", "30ms", "--engine", "sglang")
    expected = run_serve_plan(capsys, *flags)
    assert answer["estimate"] == expected["estimate"]
    assert [point["layout"] for point in answer["front"]] == [point["layout"] for point in expected["front"]]
    assert answer["doubled_devices"] == expected["doubled_devices"]
    pools = expected["pools"]
    assert {name: answer["pools"][name] for name in pools} == pools


def test_sliders_edit_the_address_and_the_limit_is_kept() -> None:
    answer = ask("&tpot=20ms")
    sliders = {slider["label"]: slider for slider in answer["sliders"]}
    assert sliders["TPOT at most"]["value"] == "20 ms"
    assert sliders["TPOT at most"]["options"][-1]["edit"] == {"tpot": None}
    assert sliders["requests/s"]["value"] == "as many as fit"
    assert answer["estimate"]["tpot_s"]["value"] <= 0.02
    free = ask()
    assert free["estimate"]["tokens_per_s_per_device"]["value"] > answer["estimate"]["tokens_per_s_per_device"]["value"]


def test_a_load_beyond_the_cluster_is_a_problem_and_no_error() -> None:
    answer = ask("&rate=100000")
    assert "need about" in answer["problems"][0]
    assert with_report("serving", answer)["report"]


@pytest.mark.parametrize("details", ["&isl=0", "&tpot=fast", "&engine=none", "&rate=-1"])
def test_wrong_details_are_problems(details: str) -> None:
    assert ask(details)["problems"]


def test_every_number_of_the_report_is_in_the_payload() -> None:
    answer = with_report("serving", ask("&rate=5"))
    text = json.dumps(answer["report"])
    assert "to the first token" in text
    assert "terms of decode" in text


def test_pools_are_beside_the_layout() -> None:
    answer = with_report("serving", ask("&isl=8192&osl=256&tpot=20ms"))
    text = json.dumps(answer["report"])
    assert "Prefill and decode in pools of their own" in text
    assert answer["pools"]["prefill_text"] in text
    assert "terms of a first token" in text


def test_no_pools_on_one_device() -> None:
    payload = json.loads(dump_payload(Explorer(NameResolver()).answer("serving", MODEL.replace("h100:8", "h100:1"))))
    assert payload["pools"] is None
    assert "none on this cluster meets the limits" in json.dumps(with_report("serving", payload)["report"])
