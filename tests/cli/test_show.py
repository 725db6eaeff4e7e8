"""`shardwise show`: tables for people, a payload for machines, a source beside every value."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from answers import answer
from number_paths import require_payload_numbers

from shardwise.hardware.calibration_constants import CONSTANTS
from shardwise.hardware.chips import chip_names, load_chip
from shardwise.hardware.cluster import cluster_examples
from shardwise.hardware.published_constants import load_published_fit, published_calibration
from shardwise.hardware.stacks import get_stack, stack_names
from shardwise.model.load import model_names
from shardwise.model.optimizers.definition import OPTIMIZERS
from shardwise.present.verbs.catalogue import show
from shardwise.values.errors import InputError
from shardwise.values.precision import PRECISIONS

KINDS = ("models", "chips", "clusters", "precisions", "stacks", "optimizers")


def run_show(*arguments: str) -> str:
    return answer("show", *arguments)


def payload(*arguments: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(run_show(*arguments, "--json"))
    return parsed


@pytest.mark.parametrize(
    ("kind", "names"),
    [("models", model_names()), ("chips", chip_names()), ("precisions", PRECISIONS), ("stacks", stack_names()),
     ("optimizers", OPTIMIZERS)],
)  # fmt: skip
def test_a_table_has_a_line_for_each_entry(kind: str, names: tuple[str, ...]) -> None:
    text = run_show(kind)
    for name in names:
        assert sum(line.split()[0] == name for line in text.splitlines() if line) == 1
    assert max(map(len, text.splitlines())) <= 200


@pytest.mark.parametrize(
    ("kind", "text", "names"),
    [
        ("models", "Qwen3", model_names()),
        ("chips", "v5", chip_names()),
        ("precisions", "fp8", PRECISIONS),
        ("stacks", "nemo", stack_names()),
        ("clusters", "v5", cluster_examples()),
    ],
)
def test_a_part_of_a_name_shows_all_that_have_it(kind: str, text: str, names: tuple[str, ...]) -> None:
    expected = [name for name in names if text.lower() in name]
    assert 1 < len(expected) <= len(names)
    assert [entry["name"] for entry in payload(kind, text)["entries"]] == expected
    lines = run_show(kind, text).splitlines()
    assert [line.split()[0] for line in lines if line.split() and line.split()[0] in names] == expected


def test_a_name_that_is_a_part_of_another_is_that_entry() -> None:
    assert {"eager", "eager_2023"} <= set(stack_names())
    assert [entry["name"] for entry in payload("stacks", "eager")["entries"]] == ["eager"]
    assert run_show("stacks", "eager").startswith("eager: a stack of the kind eager")


@pytest.mark.parametrize("kind", KINDS)
def test_payload_of_a_kind_has_every_entry(kind: str) -> None:
    report = payload(kind)
    assert (report["schema"], report["kind"]) == ("shardwise.show/1", kind)
    for entry in report["entries"]:
        assert payload(kind, entry["name"])["entries"] == [entry]
        for value in entry["values"].values():
            assert set(value) == {"value", "source"}


@pytest.mark.parametrize("name", chip_names())
def test_every_value_of_a_chip_has_a_source_or_none(name: str) -> None:
    (entry,) = payload("chips", name)["entries"]
    for key, value in entry["values"].items():
        if key != "vendor":
            assert bool(value["source"]) == (value["value"] is not None), key
    chip = load_chip(name)
    assert entry["values"]["memory_bytes"] == {"value": chip.memory_bytes, "source": chip.sources["memory_bytes"]}


def test_report_of_a_chip() -> None:
    lines = {line.split()[0]: line for line in run_show("chips", "h200").splitlines()}
    assert lines["memory_bytes"].split("  ", 3)[1:] != []
    assert "141 GB" in lines["memory_bytes"]
    assert "stas00/ml-engineering" in lines["memory_bytes"]
    assert "4.8 TB/s" in lines["memory_bytes_per_s"]
    assert "989 TFLOP/s" in lines["peak_flops_per_s.bf16"]
    assert "700 W" in lines["power_w"]
    assert lines["vmem_bytes"].endswith("no source")
    assert "0.87 µs" in lines["nvlink.hop_latency_s"]


def test_a_stack_alone_has_its_four_constants_and_with_a_chip_all_twelve() -> None:
    (stack_entry,), (entry_on_chip,) = (
        payload("stacks", "nemo-25")["entries"],
        payload("stacks", "nemo-25", "--chip", "h800")["entries"],
    )
    calibration = published_calibration("h800", get_stack("nemo-25"))
    runs = get_stack("nemo-25").abilities
    assert [key for key in stack_entry["values"] if "." in key] == [
        *(f"runs.{name}" for name, _ in runs.items()),
        *(f"stack.{name}" for name, constant in CONSTANTS.items() if constant.owner == "stack"),
    ]
    assert stack_entry["values"]["runs.axes"] == {"value": list(runs.axes), "source": runs.source}
    for name, constant in CONSTANTS.items():
        value = entry_on_chip["values"][f"{constant.owner}.{name}"]
        assert value["value"] == calibration[name]
        assert value["source"].startswith(constant.meaning)
        assert load_published_fit()["source"] in value["source"]
    assert entry_on_chip["values"]["chip.link_fraction"]["source"].endswith("h800 as h100")


def test_report_of_a_stack_has_constants_with_deviations() -> None:
    """One standard deviation to each side of where the constant was fitted, on the line without bounds."""
    text = run_show("stacks", "nemo-25", "--chip", "h100")
    lines = {line.split()[0]: line for line in text.splitlines()}
    exposed = lines["stack.exposed"].split()
    value, low, high = float(exposed[1]), float(exposed[2]), float(exposed[4])
    assert low < value < high
    deviation = load_published_fit()["stacks"]["nemo-25"]["deviations"]["exposed"]
    constant = CONSTANTS["exposed"]
    assert constant.to_unbounded(high) - constant.to_unbounded(value) == pytest.approx(deviation, rel=0.02)
    assert constant.to_unbounded(value) - constant.to_unbounded(low) == pytest.approx(deviation, rel=0.02)
    assert constant.meaning in lines["stack.exposed"]
    assert "916 published runs" in text
    assert "attention writes its scores" in run_show("stacks", "megatron-2022")


def test_constants_that_no_run_measured_are_marked() -> None:
    assert "expected of its kind" in next(line for line in run_show("stacks").splitlines() if line.startswith("fused"))
    (entry,) = payload("stacks", "fused", "--chip", "mi300x")["entries"]
    assert entry["values"]["stack.exposed"]["source"].endswith("usual of its kind, fused")
    assert entry["values"]["chip.matmul_fraction"]["source"].endswith("no run of mi300x: what is expected of any chip")
    for wrong in (
        ("stacks", "nemoo"),
        ("stacks", "nemo", "--chip", "h100"),
        ("stacks", "nemo-25", "--chip", "h1"),
        ("chips", "--chip", "h100"),
    ):
        with pytest.raises(InputError):
            run_show(*wrong)


def test_report_of_a_model() -> None:
    """What differs from a plain block is shown, with the sizes; the rest is not."""
    lines = {line.split()[0]: line.split()[1:] for line in run_show("models", "gpt-oss-20b").splitlines()}
    assert lines["num_active_params"][0] == "4,187,440,704"
    assert lines["bias"][:4] == ["qkv,", "attention_out,", "router,", "experts"]
    assert lines["sinks"][0] == "yes"
    assert lines["nominal_num_params"][0] == "21B"
    assert not {"norm_bias", "kv_lora_rank", "tied_embeddings"} & set(lines)
    (entry,) = payload("models", "gpt-oss-20b")["entries"]
    assert entry["values"]["tied_embeddings"]["value"] is False


def test_report_of_clusters(tmp_path: Path) -> None:
    text = run_show("clusters")
    for form in ("CHIP:COUNT", "CHIP:SHAPE", "local:N", "FILE.toml"):
        assert form in text
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line}
    assert rows["tpu-v5e:16x16"] == "256 ring of 16 x ring of 16, links of 45 GB/s"
    assert rows["tpu-v5e:16x16*2"] == (
        "512 2 pods of ring of 16 x ring of 16, links of 45 GB/s, 3.125 GB/s for each chip between pods"
    )
    assert rows["tpu-v4:4x4x8_twisted"] == "128 twisted torus 4x4x8, links of 45 GB/s"
    assert rows["gb200:72"] == "72 nvlink 72 (900 GB/s)"
    assert rows["mi355x:8"] == "8 xgmi mesh of 8 (535.5 GB/s)"
    slice_of_v5e = run_show("clusters", "tpu-v5e:8x16")
    assert "no, yes" in slice_of_v5e
    path = tmp_path / "mine.toml"
    path.write_text('chip = "h100"\ntiers = [{ name = "rail", size = 4, bytes_per_s = "25 GB/s" }]\n', encoding="utf-8")
    (entry,) = payload("clusters", str(path))["entries"]
    assert entry["values"]["rail.bytes_per_s"] == {"value": 25e9, "source": str(path)}
    assert entry["values"]["rail.fraction"] == {"value": None, "source": ""}
    assert entry["values"]["num_devices"]["value"] == 4


def test_every_value_of_pods_and_of_a_twisted_torus(tmp_path: Path) -> None:
    (entry,) = payload("clusters", "tpu-v4:4x4x8_twisted*2")["entries"]
    values = entry["values"]
    assert values["num_devices"]["value"] == 256
    assert values["torus.twisted"]["value"] is True
    assert "ISCA 2023" in values["torus.twisted"]["source"]
    assert (values["torus.mean_hops"]["value"], values["torus.diameter"]["value"]) == (3.4375, 6)
    assert (values["pods.num_pods"]["value"], values["pods.bytes_per_s"]["value"]) == (2, 6.25e9)
    assert values["pods.bytes_per_s"]["source"].startswith("an equal part for each chip of a host of 2 x 2 x 1: Austin")
    path = tmp_path / "mine.toml"
    path.write_text('chip = "tpu-v5e"\npods = 3\ntorus = { shape = [16, 16] }\n', encoding="utf-8")
    (entry_of_file,) = payload("clusters", str(path))["entries"]
    assert entry_of_file["values"]["pods.num_pods"] == {"value": 3, "source": str(path)}
    assert "torus.twisted" not in entry_of_file["values"]


def test_values_without_a_measurement_have_no_source() -> None:
    (entry,) = payload("clusters", "mi355x:8")["entries"]
    assert entry["values"]["xgmi.bytes_per_s"]["value"] == 535.5e9
    for key in ("xgmi.fraction", "xgmi.hop_latency_s", "xgmi.base_latency_s", "runtime_bytes", "memory_fraction"):
        assert entry["values"][key] == {"value": None, "source": ""}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("chips", "h1000"), "chip: found 'h1000' (did you mean 'h100'?); the catalogue has "),
        (("models", "nope"), "model: found 'nope'; one of the catalogue's "),
        (("clusters", "h1000"), "cluster: found 'h1000'; CHIP:COUNT"),
        (("clusters", "nowhere.toml"), "cluster: cannot read nowhere.toml"),
        (("optimizers", "adam-w"), "optimizer: found 'adam-w' (did you mean 'adamw'?); "),
        (("optimizers", "--precision", "bf17"), "precision: found 'bf17' (did you mean 'bf16'?); one of "),
        (("chips", "--precision", "bf16"), "--precision: found with chips; it goes with optimizers"),
        (("precisions", "bf17"), "precision: found 'bf17' (did you mean 'bf16'?); one of "),
    ],
)
@pytest.mark.parametrize("json_flag", [(), ("--json",)])
def test_an_unknown_name_is_refused_with_the_nearest(
    arguments: tuple[str, ...], json_flag: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        run_show(*arguments, *json_flag)
    assert str(caught.value).startswith(message)


def test_declaring_the_verb_loads_nothing() -> None:
    code = (
        "import sys; from shardwise.present.command_line import build_parser; build_parser().parse_args(['show', 'models']); "
        "print([m for m in ('numpy', 'torch', 'jax', 'pydantic', 'shardwise.hardware.chips', 'shardwise.model.load') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_multi_token_prediction_is_counted_apart() -> None:
    lines = {
        line.split()[0]: line.split()
        for line in run_show("models", "deepseek-v3").splitlines()
        if line.startswith("  ")
    }
    assert lines["num_params"][1] == "671,026,404,352"
    assert lines["num_predict_params"][1] == "11,610,067,968"
    assert "num_predict_params" not in run_show("models", "llama-3-8b")


@pytest.mark.parametrize(
    ("precision", "matrix_bytes", "other_bytes"),
    [("bf16", 4 + 4, 4 + 8), ("bf16_bf16_moments", 4 + 2, 4 + 4), ("bf16_no_master", 4, 8), ("fp8_lm_o3", 2 + 1, 2 + 3),
     ("fp16_fp32_update", 4 + 4 + 4, 4 + 8 + 4)],
)  # fmt: skip
def test_an_optimizer_has_its_bytes_under_a_recipe(precision: str, matrix_bytes: int, other_bytes: int) -> None:
    """Of Muon one momentum, of what AdamW updates two; the sources of the recipes say how wide they are."""
    (entry,) = payload("optimizers", "muon", "--precision", precision)["entries"]
    values = {key: described["value"] for key, described in entry["values"].items()}
    assert (values["state_bytes_per_parameter"], values["others.state_bytes_per_parameter"]) == (
        matrix_bytes,
        other_bytes,
    )
    assert ("master" in values["state"]) == (precision != "bf16_no_master")
    text = run_show("optimizers", "muon", "--precision", precision)
    assert f"state of matrices of blocks, whole: {matrix_bytes} bytes of a parameter" in text
    assert f"state of all else, by adamw: {other_bytes} bytes of a parameter" in text


def test_an_optimizer_has_every_field_with_its_limits() -> None:
    (entry,) = payload("optimizers", "sgd")["entries"]
    values = {key: described["value"] for key, described in entry["values"].items()}
    assert (values["state"], values["others"], values["whole_matrices"]) == (["master", "momentum_buffer"], None, False)
    nesterov = [values[f"fields.nesterov.{key}"] for key in ("default", "minimum", "below", "whole", "of_matrices")]
    assert nesterov == [0.0, 0.0, 2.0, True, False]
    lines = {line.split()[0]: line for line in run_show("optimizers", "sgd").splitlines()}
    assert "0.9  at least 0, below 1 " in lines["momentum"]
    assert lines["nesterov"].split()[1:3] == ["0", "whole,"]
    assert lines["weight_decay"].endswith("; 0 for norms and biases")


@pytest.mark.parametrize(
    "words",
    [
        *((kind,) for kind in KINDS), ("targets",), ("rules",), ("models", "qwen3-8b"), ("chips", "h100"),
        ("stacks", "nemo-25", "h100"), ("optimizers", "muon"), ("optimizers", "adafactor", None, "bf16"),
        ("precisions", "fp8_delayed"), ("clusters", "h100:512"),
    ],
)  # fmt: skip
def test_numbers_of_the_report_are_those_of_the_payload(words: tuple[str | None, ...]) -> None:
    numbers = require_payload_numbers(show(*words))  # type: ignore[arg-type]
    assert numbers > 1 or words[0] in ("rules", "precisions")


def test_a_hugging_face_id_shows_the_model() -> None:
    assert run_show("models", "Qwen/Qwen3-8B") == run_show("models", "qwen3-8b")
    assert payload("models", "qwen/qwen3-8B") == payload("models", "qwen3-8b")


def test_a_chip_goes_with_one_stack() -> None:
    for words in (("stacks", "--chip", "h100"), ("stacks", "nemo", "--chip", "h100"), ("chips", "--chip", "h100")):
        with pytest.raises(InputError, match=r"^--chip: found without a stack; it goes with one"):
            run_show(*words)
    assert len(payload("stacks", "nemo", "--chip", "h100")["entries"]) > 1
