"""`shardwise kv-cache` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.present.command_line import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["kv-cache", *arguments])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_a_cache_and_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "llama-3-70b", "--context", "8Ki", "--batch", "32", "--on", "h100:8")
    assert code == 0
    for part in (
        "80 layers of 8 heads of 128, 8 query heads on each: a cache 8 times smaller",
        "a token              328 kB",
        "32 sequences        85.9 GB",
        "room for 181 sequences of 8,192 tokens",
    ):
        assert part in out


def test_report_names_a_latent_cache(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = run(capsys, "deepseek-v3", "--context", "8Ki")
    assert "61 layers of a latent of 512 and 64 rotary elements, the same for all 128 heads" in out
    assert "a token             70.3 kB" in out


def test_report_names_windows_shorter_than_the_context(capsys: pytest.CaptureFixture[str]) -> None:
    _, long = run(capsys, "gemma-2-9b", "--context", "8Ki")
    _, short = run(capsys, "gemma-2-9b", "--context", "4Ki")
    assert "21 of 42 layers keep the last 4,096, 2.82 GB if they kept all" in long
    assert "keep the last" not in short


def test_weights_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "llama-3-405b", "--context", "1", "--on", "h100:8")
    assert code == 0
    assert "the weights DO NOT FIT" in out


def test_payload_has_cache_sizes_and_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("llama-2-7b", "--context", "1", "--dtype", "int8", "--set", "model.num_layers=64", "--json")
    report = json.loads(run(capsys, *arguments)[1])
    assert report["schema"] == "shardwise.kv-cache/3"
    assert report["bytes_per_token"] == report["sequence_bytes"] == 2**19
    assert report["cluster"] is None
    report = json.loads(run(capsys, *arguments, "--on", "h100:1", "--set", "chip.memory_bytes=10GB")[1])
    assert (report["cluster"]["name"], report["cluster"]["memory_bytes"]) == ("h100:1", 10e9)


def test_the_books_leave_no_memory_to_the_runtime(capsys: pytest.CaptureFixture[str]) -> None:
    """16 GiB on each of 16 devices, less the weights, are all for caches: 2·L·K·H bytes of a token in int8."""
    arguments = ("llama-2-13b", "--context", "8Ki", "--dtype", "int8", "--weights", "int8", "--on", "tpu-v5e:4x4")
    with_runtime, books = (json.loads(run(capsys, *arguments, *more, "--json")[1]) for more in ((), ("--no-runtime",)))
    assert with_runtime["cluster"]["runtime_bytes"] == 16 * 2**28
    assert books["cluster"]["runtime_bytes"] == 0
    cache, weights = 2 * 40 * 40 * 128 * 8192, 13_015_864_320
    assert books["cluster"]["num_seqs"] == (16 * 16 * 2**30 - weights) // cache
    assert with_runtime["cluster"]["num_seqs"] < books["cluster"]["num_seqs"]
    _, out = run(capsys, *arguments, "--no-runtime")
    assert "runtime" not in out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["llama-9", "--context", "8"], "'llama-9'"),
        (["llama-3-8b", "--context", "none"], "--context: found 'none'"),
        (["llama-3-8b", "--context", "1e300"], "at most 1e+18 is required"),
        (["llama-3-8b", "--context", "8", "--batch", "0"], "--batch: found '0'"),
        (["llama-3-8b", "--context", "8", "--dtype", "bf17"], "'bf17'"),
        (["llama-3-8b", "--context", "8", "--on", "h100"], "h100:512"),
        (
            ["llama-3-8b", "--context", "8", "--set", "chip.memory_bytes=1GB"],
            "a chip is that of --on, which is missing",
        ),
        (["llama-3-8b", "--context", "8", "--no-runtime"], "the runtime is that of --on, which is missing"),
        (["llama-3-8b", "--context", "8", "--set", "job.tokens=1"], "model.NAME=VALUE or chip.NAME=VALUE is required"),
    ],
)
def test_wrong_input_is_refused(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, *arguments)
    assert code == 2
    assert out.startswith("error: ")
    assert part in out


def test_states_of_recurrences_are_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "model_type": "mamba2", "hidden_size": 256, "num_hidden_layers": 32, "num_heads": 8, "head_dim": 64, "n_groups": 1,
        "state_size": 16, "conv_kernel": 4, "chunk_size": 64, "vocab_size": 1024,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, out = run(capsys, str(tmp_path), "--context", "1Ki")
    # 32 layers of 8 states of 16 x 64 in fp32, and 3 rows of 8 x 64 + 2 x 16 channels in bf16
    assert "recurrent states    1.15 MB   of 32 layers, for a sequence of any length" in out
    assert "a sequence          1.15 MB" in out
