"""A cluster file with a calibration: written and read back, given in part, and refused where it is wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.hardware.calibration_constants import CONSTANTS, Calibration
from shardwise.hardware.cluster import replace_chip
from shardwise.hardware.cluster_files import format_cluster_toml, format_toml_value
from shardwise.hardware.cluster_loading import load_cluster, load_measured_cluster
from shardwise.hardware.network.pods import Pods
from shardwise.hardware.network.switches import Switched
from shardwise.hardware.published_constants import constant_values, published_calibration, with_calibration
from shardwise.hardware.stacks import get_stack
from shardwise.values.errors import InputError

ROOT = Path(__file__).parents[3]
CLUSTER_TOML, SLICE_TOML, *_ = re.findall(
    r"```toml\n(.*?)```", (ROOT / "docs" / "extending.md").read_text("utf-8"), re.DOTALL
)
TITAN = get_stack("torchtitan")


def some_calibration(chip: str) -> Calibration:
    """A calibration that differs from the shipped one in every value, with values that decimals do not represent exactly."""
    shipped = published_calibration(chip, TITAN)
    constants = {
        name: float(constant.from_unbounded(constant.to_unbounded(shipped[name]) + (number + 1) / 37))
        for number, (name, constant) in enumerate(CONSTANTS.items())
    }
    return replace(
        shipped, constants=constants, clock=1 / 1.3, fused_attention=False, has_capacity=True,
        spread={"dense": (0.91234567, 1.1), "moe": (0.7, 1.0)}, source='of "us", C:\\runs\n2026',
    )  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["h100:8", "h100:512", "gb200:144", "mi300x:8", "tpu-v5p:4x4x8", "tpu-v5e:16x16*4", "tpu-v4:4x4x8_twisted", "tpu-v3:4x4",
     "local:4", "own.toml", "slice.toml"],
)  # fmt: skip
def test_a_written_cluster_file_is_read_back_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text(CLUSTER_TOML, encoding="utf-8")
    Path("slice.toml").write_text(SLICE_TOML, encoding="utf-8")
    original = load_measured_cluster(text)
    calibration = some_calibration(original.nominal.chip.base or "")
    Path("again.toml").write_text(
        format_cluster_toml(original.nominal, calibration, {"exposed": "± 0.1"}), encoding="utf-8"
    )
    read_back = load_measured_cluster("again.toml")
    assert (read_back.nominal, read_back.calibration) == (original.nominal, calibration)
    assert load_cluster("again.toml") == with_calibration(original.nominal, calibration)
    assert "# ± 0.1" in Path("again.toml").read_text(encoding="utf-8")


def test_only_differences_from_the_catalogue_are_written(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(CLUSTER_TOML, encoding="utf-8")
    measured = load_measured_cluster(str(file))
    text = format_cluster_toml(measured.nominal, some_calibration("h100"))
    assert 'base = "h100"' in text
    assert "power_w = 500.0" in text
    assert "memory_bytes" not in text


def test_missing_values_of_a_table_are_the_shipped_ones(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        f'{CLUSTER_TOML}\n[calibration]\nstack = "torchtitan"\nconstants = {{ exposed = 0.25 }}\n', encoding="utf-8"
    )
    cluster = load_cluster(str(file))
    assert cluster.calibration is not None
    assert cluster.calibration.constants == {**constant_values("h100", TITAN), "exposed": 0.25}
    assert cluster.calibration.spread == published_calibration("h100", TITAN).spread
    assert cluster.calibration.source == "own.toml"
    assert cluster.calibration.clock == pytest.approx((500 / 700) ** (1 / 3))  # the file's chip is limited to 500 W
    assert isinstance(cluster.sustained_topology, Switched)
    assert cluster.sustained_topology.tiers[0].fraction == cluster.calibration["link_fraction"]
    assert load_measured_cluster(str(file)).nominal.topology.levels == (8, 4)


@pytest.mark.parametrize(
    ("table", "problems"),
    [
        ("calibration = 3", ["own.toml: calibration: found 3; a table with a stack and constants is required"]),
        ("[calibration]", ["own.toml: calibration: stack: missing; one of llm-foundry-torch1"]),
        (
            '[calibration]\nstack = "mine"\nclock = 3\nspread = { dense = [1.1, 2], odd = [1, 1] }\n'
            "constants = { exposed = 9, foo = 1 }\nfused_attention = 1\nhue = 2\nloss = \"none\"",
            [
                "own.toml: calibration: found 'hue'; the keys are stack, constants, loss, clock",
                "own.toml: calibration.constants: found 'foo'; the keys are matmul_fraction",
                "own.toml: calibration.constants: exposed: found 9; exposed share of communication that no kernel waits for, "
                "of 0 to 1.05, is required",
                "own.toml: calibration.spread: found 'odd'; the keys are dense, moe",
                "own.toml: calibration.spread: dense: found [1.1, 2]; two factors around 1",
                "own.toml: calibration: clock: found 3; a part of the usual clock, of 0.1 to 1.5, is required",
                "own.toml: calibration: fused_attention: found 1; true or false is required",
                "own.toml: calibration: loss: found 'none'; one of unfused, unfused_parallel, fused",
                "own.toml: calibration: stack: found 'mine'; one of llm-foundry-torch1",
            ],
        ),
    ],
)  # fmt: skip
def test_problems_of_a_calibration_are_reported(tmp_path: Path, table: str, problems: list[str]) -> None:
    file = tmp_path / "own.toml"
    top, _, tables = CLUSTER_TOML.partition("[chip]")
    file.write_text(
        f"{table}\n{CLUSTER_TOML}" if table.startswith("cal") else f"{top}[chip]{tables}\n{table}\n", encoding="utf-8"
    )
    with pytest.raises(InputError) as caught:
        load_cluster(str(file))
    assert len(caught.value.problems) == len(problems)
    for problem, required in zip(caught.value.problems, problems, strict=True):
        assert problem.startswith(required)


def test_another_chip_keeps_the_network_fraction_between_pods() -> None:
    measured = load_measured_cluster("tpu-v5e:16x16*4")
    cluster = with_calibration(measured.nominal, some_calibration("tpu-v5e"))
    replaced = replace_chip(cluster, replace(cluster.chip, dcn_bytes_per_s_per_host=2e10, host_shape=(8,)))
    assert isinstance(replaced.sustained_topology, Pods)
    assert cluster.calibration is not None
    assert replaced.sustained_topology.bytes_per_s == pytest.approx(2e10 / 8 * cluster.calibration["network_fraction"])


def test_texts_are_escaped() -> None:
    assert format_toml_value('a "b"\\\x7f\n') == '"a \\"b\\"\\\\\\u007f\\n"'
    assert format_toml_value({"a b": [1, True, 2.5e-07]}) == '{ "a b" = [1, true, 2.5e-07] }'
