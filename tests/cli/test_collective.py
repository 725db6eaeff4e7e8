"""`shardwise collective` as a user meets it: reports, the payload, drawings, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from answers import answer

from shardwise.present.verbs.sharded_products import parse_axes
from shardwise.values.errors import InputError

V5E = ["all-gather", "2048x8192", "--axes", "4", "--on", "tpu-v5e"]


def run(*arguments: str) -> str:
    return answer("collective", *arguments)


def payload(*arguments: str) -> dict[str, Any]:
    parsed = json.loads(run(*arguments, "--json"))
    assert isinstance(parsed, dict)
    return parsed


def test_report_of_a_torus_compares_with_and_without_wraparound() -> None:
    """S2, quiz 2: 559 microseconds on the line that it is, 373 if it were a ring."""
    shown = run(*V5E)
    applies = [line for line in shown.splitlines() if "<- applies" in line]
    assert len(applies) == 1
    for part in ("without wraparound", "559 µs", "3 hops"):
        assert part in applies[0]
    for part in (
        "373 µs",
        "2 hops",
        "wraps only at 16",
        "4 is a line",
        "bandwidth-bound",
        "below 180 kB",
        "25.2 MB received",
    ):
        assert part in shown


def test_a_small_array_is_latency_bound() -> None:
    shown = run("all-gather", "256x256", "--axes", "4", "--on", "tpu-v5e")
    assert "3 µs, latency-bound" in shown


def test_the_payload_has_the_reports_fields() -> None:
    report = payload(*V5E)
    assert report["schema"] == "shardwise.collective/1"
    assert report.keys() == {
        "schema", "on", "wrap_rule", "kind", "bytes", "network", "axes", "wraps", "num_devices", "hops", "time_s",
        "latency_s", "bandwidth_s", "bound", "crossover_bytes", "bytes_received_per_device", "algbw", "busbw", "algorithm",
        "alternatives",
    }  # fmt: skip
    assert report["time_s"] == pytest.approx(559.24e-6, rel=1e-4)
    assert report["bytes_received_per_device"] == pytest.approx(0.75 * 2 * 2048 * 8192)
    assert {alternative["name"] for alternative in report["alternatives"]} == {"ring", "ring, one way"}


def test_switches_compare_algorithms() -> None:
    shown = run("all-reduce", "1GB", "--axes", "512", "--on", "h100")
    for part in ("8 x 64 devices", "hierarchical", "tree", "ring", "in-switch needs switches that reduce", "busbw"):
        assert part in shown
    assert "in-switch" not in run("all-to-all", "1GB", "--axes", "8", "--on", "h100")


@pytest.mark.parametrize(
    ("on", "axes", "placed", "wraps"),
    [
        ("tpu-v5p", "4", [4], [True]),
        ("tpu-v5p", "4,6", [4, 6], [False, False]),
        ("tpu-v5e:8x16", "16", [1, 16], [False, True]),
        ("tpu-v5e:8x16", "4", [4, 1], [False, False]),
        ("tpu-v5e:16x16", "4,16", [4, 16], [False, True]),
        ("TPU-v5p:4x4x8", "8,4", [4, 1, 8], [True, False, True]),
        ("h100", "16", [8, 2], []),
        ("h100:64", "1,8", [1, 8], []),
        ("h100:64", "4", [4, 1], []),
    ],
)
def test_axes_are_placed_on_the_topology(on: str, axes: str, placed: list[int], wraps: list[bool]) -> None:
    report = payload("all-gather", "34MB", "--axes", axes, "--on", on)
    assert report["axes"] == placed
    assert [wrapped for wrapped, size in zip(report["wraps"], placed, strict=False) if size > 1] == [
        wrapped for wrapped, size in zip(wraps, placed, strict=False) if size > 1
    ]


@pytest.mark.parametrize(
    ("text", "dtype", "num_bytes"),
    [
        ("34MB", "bf16", 34e6), ("64MiB", "bf16", 2.0**26), ("256B", "bf16", 256.0), ("4096", "bf16", 4096.0),
        ("2048x8192", "bf16", 2.0**25), ("2048x8192", "fp32", 2.0**26), ("16x16x16", "int4", 2048.0),
    ],
)  # fmt: skip
def test_sizes_of_arrays_are_parsed(text: str, dtype: str, num_bytes: float) -> None:
    assert payload("all-gather", text, "--axes", "4", "--on", "tpu-v5e", "--dtype", dtype)["bytes"] == num_bytes


@pytest.mark.parametrize("operation", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all"])
def test_drawings_are_written(operation: str, tmp_path: Path) -> None:
    target = tmp_path / "steps.svg"
    run(operation, "34MB", "--axes", "4,2", "--on", "tpu-v5e", "--draw", str(target))
    ElementTree.parse(target)
    assert "34 MB over a line of 4 and a line of 2" in target.read_text(encoding="utf-8")


def test_behind_switches_a_ring_is_drawn(tmp_path: Path) -> None:
    target = tmp_path / "steps.svg"
    run("all-reduce", "34MB", "--axes", "8", "--on", "h100", "--draw", str(target))
    assert "ring of 8 (one way)" in target.read_text(encoding="utf-8")


WRONG = [
    (["gather", "34MB", "--axes", "4", "--on", "tpu-v5e"], ["'gather'", "all-gather"]),
    (["all-gather", "lots", "--axes", "4", "--on", "tpu-v5e"], ["SIZE", "'lots'"]),
    (["all-gather", "0MB", "--axes", "4", "--on", "tpu-v5e"], ["at least 1 byte"]),
    (["all-gather", "0x4", "--axes", "4", "--on", "tpu-v5e"], ["SIZE", "'0'"]),
    (["all-gather", "2048x" + "9" * 5000, "--axes", "4", "--on", "tpu-v5e"], ["SIZE", "finite number is required"]),
    (["all-gather", "4x4", "--axes", "4", "--on", "tpu-v5e", "--dtype", "bf17"], ["'bf17'", "bf16"]),
    (["all-gather", "1MB", "--axes", "4:4", "--on", "tpu-v5e"], ["'4:4'", "separated by commas"]),
    (["all-gather", "1MB", "--axes", "0", "--on", "tpu-v5e"], ["'0'", "such as 4"]),
    (["all-gather", "1MB", "--axes", "1", "--on", "tpu-v5e"], ["group of 1 device"]),
    (["all-gather", "1MB", "--axes", "4", "--on", "tpu-v9"], ["'tpu-v9'", "tpu-v5p"]),
    (["all-gather", "1MB", "--axes", "4,4,4", "--on", "tpu-v5e"], ["4,4,4", "no pod of tpu-v5e"]),
    (["all-gather", "1MB", "--axes", "32", "--on", "tpu-v5e"], ["32", "no pod"]),
    (["all-gather", "1MB", "--axes", "16", "--on", "tpu-v5e:4x4"], ["16", "4x4", "--axes 4,4"]),
    (["all-gather", "1MB", "--axes", "4", "--on", "tpu-v5e:4"], ["torus of 2 axes"]),
    (["all-gather", "1MB", "--axes", "12", "--on", "h100"], ["nodes of 8", "8 and 16"]),
    (["all-gather", "1MB", "--axes", "1,4", "--on", "h100"], ["1,4", "tiers"]),
    (["all-gather", "1MB", "--axes", "64", "--on", "h100", "--draw", "x.svg"], ["64 devices", "at most 16"]),
    (["all-to-all", "1MB", "--axes", "8", "--on", "h100", "--draw", "x.svg"], ["on a torus"]),
    (["broadcast", "1MB", "--axes", "8", "--on", "tpu-v5p", "--draw", "x.svg"], ["broadcast", "are drawn"]),
    (["all-gather", "1MB", "--axes", "4", "--on", "tpu-v5e", "--draw", "/nowhere/at/all/x.svg"], ["cannot write"]),
]


@pytest.mark.parametrize(
    ("arguments", "parts"), WRONG, ids=lambda value: " ".join(value[:6]) if len(value) > 4 else None
)
def test_wrong_input_is_refused(
    arguments: list[str], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        run(*arguments)
    assert caught.value.exit_code == 2
    for part in parts:
        assert part in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_help_loads_no_numpy() -> None:
    code = (
        "import sys; from shardwise.present.command_line import verb_parsers; verb_parsers()['collective'].format_help();"
        "sys.exit('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_cluster_file_takes_the_place_of_a_slice(tmp_path: Path) -> None:
    """The same answer as for the slice that the file describes; capital letters in its path stay."""
    path = tmp_path / "My-Slice.TOML"
    path.write_text('chip = "tpu-v5p"\ntorus = { shape = [4, 4, 8] }\n', encoding="utf-8")
    from_file, from_slice = (
        payload("all-gather", "1GB", "--axes", "4,8", "--on", on) for on in (str(path), "tpu-v5p:4x4x8")
    )
    assert from_file | {"on": ""} == from_slice | {"on": ""}


def test_a_group_across_pods_takes_the_network_between_them() -> None:
    text = run("all-reduce", "1GB", "--axes", "16,16,4", "--on", "tpu-v5e:16x16*4")
    assert "over 16 x 16 x 4 devices on tpu-v5e:16x16*4" in text
    assert "between pods (3.12 GB/s for each chip: its part of its host's egress)" in text
    assert "one level after the other" in text
    assert "<- priced" in text
    inside = run("all-reduce", "1GB", "--axes", "16,16", "--on", "tpu-v5e:16x16*4")
    assert inside.replace("16x16*4", "16x16") == run("all-reduce", "1GB", "--axes", "16,16", "--on", "tpu-v5e:16x16")
    with pytest.raises(InputError, match=r"--axes: found 8 pods on tpu-v5e:16x16\*4, which has 4; at most so many"):
        run("all-reduce", "1GB", "--axes", "16,16,8", "--on", "tpu-v5e:16x16*4")
    with pytest.raises(InputError, match="--draw: found a group over several pods"):
        run("all-reduce", "1GB", "--axes", "2,2,2", "--on", "tpu-v5e:2x2*2", "--draw", "x.svg")


def test_axes_are_separated_by_commas_or_x() -> None:
    assert parse_axes("4x4") == parse_axes("4,4") == (4, 4)
