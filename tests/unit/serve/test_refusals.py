"""Refusals of `serve` and `export`: what was found, what is required and the fix, with exit code 2."""

from __future__ import annotations

import pytest

from shardwise.present.command_line import main

LOAD = ["--isl", "1000", "--osl", "100"]
AT_ONCE = [*LOAD, "--concurrency", "4"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["estimate", "qwen3-32b", "h100:8", *AT_ONCE, "--layout", "prefill: tp=4 replicas=4; decode: tp=8"],
         "layout: prefill: tp=4 replicas=4; decode: tp=8 takes 24 devices; at most the 8 of h100:8"),
        (["estimate", "qwen3-32b", "h100:8", *AT_ONCE, "--layout", "prefill: tp=4; decode: tp=3"],
         "layout: decode: tp is 3; a divisor of the 64 query heads is required"),
        (["estimate", "qwen3-32b", "h100:8", *AT_ONCE, "--layout", " "], "KEY=VALUE words are required, or two pools"),
        (["estimate", "qwen3-32b", "h100:8", *LOAD, "--concurrency", "1e99"], "at most 1,000,000,000 is required"),
        (["estimate", "gpt-2", "h100:8", "--isl", "2000", "--osl", "100", "--concurrency", "4", "--layout", "tp=1"],
         "requests of 2,100 tokens (in and out), but its learned table of positions has 1,024 rows"),
        (["plan", "deepseek-v3", "h100:8", *LOAD], "more devices, or weights of fewer bits (--weights int4), are required"),
        (["plan", "llama-3-405b", "h100:1", *LOAD, "--weights", "int4"], "under any layout; more devices are required"),
        (["plan", "llama-3-8b", "h100:1", *LOAD, "--ttft", "2", "--tpot", "40"],
         "--tpot: found '40'; a time above 0 with its unit is required, such as 2s or 40ms"),
        (["estimate", "qwen3-32b", "h100:8", *AT_ONCE, "--draft-tokens", "2"],
         "--draft-tokens is 2; no modules of multi-token prediction, which draft tokens, are known of qwen3-32b, so 0 is"),
        (["plan", "llama-3-8b", "h100:8", *LOAD, "--draft-tokens", "1"], "known of llama-3-8b, so 0 is required, or a config"),
        (["estimate", "deepseek-v3", "h200:8", *AT_ONCE, "--acceptance", "0.8"],
         "--acceptance is 0.8, and no tokens are drafted; --draft-tokens of at least 1 is required"),
        (["read", "vllm serve Qwen/Qwen3-32B -tp 4 --spec-method mtp --spec-tokens 2", "h100:4"],
         "batch_limits.mtp_tokens is 2; no modules of multi-token prediction"),
    ],
)  # fmt: skip
def test_errors_of_arguments_state_the_fix(capsys, arguments, problem):
    assert main(["serve", *arguments]) in (2, 3)
    error = capsys.readouterr().err
    assert problem in " ".join(error.split())
    assert "Traceback" not in error


def test_a_missing_file_is_not_reported_as_a_training_plan(capsys, tmp_path):
    assert main(["export", str(tmp_path / "plan.json"), "--to", "vllm"]) == 2
    error = capsys.readouterr().err
    assert "plan.json: No such file" in error
    assert "plan of a training" not in error
