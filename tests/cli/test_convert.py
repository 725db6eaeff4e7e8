"""`shardwise convert` as a user meets it: its report, its refusals, and the files it leaves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from conversion.random_models import random_weights
from train.writers import save_in_parts

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.interop.weights import load_hf, save_hf
from shardwise.interop.weights.convert import WEIGHT_FORMATS
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.present.command_line import main
from shardwise.run.engine.model_builder import ModelWeights
from shardwise.search.plan import plan_layout
from shardwise.search.plan_file import dump_plan

SEQ_LEN = 16
MODEL = Architecture(
    name="tiny", num_layers=2, d_model=16, d_ff=24, num_heads=2, num_kv_heads=2, head_dim=8, vocab_size=31
)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in ("convert", *arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.fixture
def weights() -> ModelWeights:
    return random_weights(MODEL, 1)


@pytest.fixture
def a_run(weights: ModelWeights, tmp_path: Path) -> Path:
    """A run's folder: its plan and a checkpoint."""
    folder = tmp_path / "runs" / "a"
    job = Job(global_batch_tokens=SEQ_LEN * 4, seq_len=SEQ_LEN, precision="fp32")
    save_in_parts(folder / "checkpoints", weights, {})
    dump_plan(plan_layout(MODEL, load_cluster("local:1"), job, Layout(micro_batch_seqs=4)), folder / "plan.json")
    return folder


def equal(folder: Path, weights: ModelWeights, dtype: torch.dtype = torch.float32) -> bool:
    tensors = load_hf(folder).tensors
    return all(torch.equal(tensors[name], tensor.to(dtype)) for name, tensor in weights.tensors.items())


def test_a_run_goes_through_all_formats(
    a_run: Path, weights: ModelWeights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run needs no further arguments; its sequence length is written for transformers."""
    steps = [
        (a_run, "torchtitan", []),
        (tmp_path / "torchtitan", "megatron", ["--model", a_run / "plan.json"]),
        (tmp_path / "megatron", "megatron-ranks", ["--model", a_run / "plan.json", "--tp", 2, "--pp", 2]),
        (tmp_path / "megatron-ranks", "huggingface", ["--model", a_run / "plan.json"]),
    ]
    for folder, name, more in steps:
        code, out, err = run(capsys, folder, "--to", name, "--out", tmp_path / name, *more)
        assert (code, err) == (0, "")
        title = WEIGHT_FORMATS[name].title
        assert re.fullmatch(
            rf"tiny \(\d.*K parameters\) of .*, in fp32: {title} in .*{name}\nbegin with it: .*\n", out
        ), out
    assert equal(tmp_path / "huggingface", weights)
    assert json.loads((tmp_path / "huggingface" / "config.json").read_text())["max_position_embeddings"] == SEQ_LEN


def test_one_checkpoint_and_another_format_of_numbers(
    a_run: Path, weights: ModelWeights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = next((a_run / "checkpoints").iterdir())
    code, out, _ = run(capsys, checkpoint, "--to", "huggingface", "--out", tmp_path / "hf", "--dtype", "bf16", "--json")
    payload = json.loads(out)
    assert (code, payload["schema"], payload["dtype"]) == (0, "shardwise.convert/1", "bf16")
    assert (payload["source"], payload["has_checksums"]) == ("checkpoint step-00000001", True)
    assert payload["begin"] == f"AutoModelForCausalLM.from_pretrained('{tmp_path / 'hf'}')"
    assert equal(tmp_path / "hf", weights, torch.bfloat16)


def test_report_names_the_command_that_starts_from_the_weights(
    weights: ModelWeights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_hf(weights, tmp_path / "hf", seq_len=SEQ_LEN)
    expected = {
        "torchtitan": "--checkpoint.enable --checkpoint.initial_load_path {out}", "megatron": "pretrain_gpt.py --load {out}",
        "megatron-ranks": "pretrain_gpt.py --load {out} --ckpt-format torch",
    }  # fmt: skip
    for name, text in expected.items():
        _, out, _ = run(capsys, tmp_path / "hf", "--to", name, "--out", tmp_path / name)
        assert out.splitlines()[1] == f"begin with it: {text.format(out=tmp_path / name)}"
        assert out.splitlines()[2].startswith(
            "not verified: safetensors has no checksums"
        )  # the other formats have them


def test_wrong_input_is_refused_in_one_line(
    a_run: Path, weights: ModelWeights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, titan, out = tmp_path / "hf", tmp_path / "titan", tmp_path / "out"
    save_hf(weights, hf, seq_len=SEQ_LEN)
    assert run(capsys, hf, "--to", "torchtitan", "--out", titan)[0] == 0
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "empty" / "plan.json").write_text("{}")
    cases: list[tuple[list[object], str]] = [
        ([hf, "--to", "megatrn"], "--to: found 'megatrn' (did you mean 'megatron'?); one of huggingface, megatron"),
        ([hf, "--to", "torchtitan", "--dtype", "int8"], "--dtype: found 'int8'; one of fp64, fp32, fp16, bf16 is required"),
        ([hf, "--to", "megatron", "--tp", 2], "--tp: megatron is the same for any degrees; leave it out, or --to megatron-ranks"),
        ([hf, "--to", "megatron-ranks", "--tp", 3], "--tp: found 3; a divisor of num_kv_heads = 2 of hf is required"),
        ([hf, "--to", "megatron-ranks", "--ep", 2], "--ep: found 2; hf has no experts, so that 1 is required"),
        ([hf, "--to", "megatron-ranks", "--transformer-impl", "te"], "--transformer-impl: found 'te'; one of transformer_engine"),
        ([hf, "--to", "megatron-ranks", "--pp", "two"], "--pp: found 'two'"),
        ([hf, "--to", "torchtitan", "--model", "llama-3-8b"], f"--model: {hf} says itself which model it has; leave it out"),
        ([titan, "--to", "megatron"], f"--model: {titan} does not say which model its weights are of, which is required"),
        ([titan, "--to", "huggingface", "--model", hf], "--seq-len: a config.json says the longest sequence that a model was"),
        ([titan, "--to", "megatron", "--model", "llama-3-8b"], f"model: {titan} lacks 270 tensors: layers.10.attention."),
        ([tmp_path / "nowhere", "--to", "megatron"], "found none of a model of transformers, a distributed checkpoint of"),
        ([tmp_path / "empty", "--to", "megatron"], "found a run without a checkpoint; one that a run has written is required"),
        ([a_run, "--to", "torchtitan", "--model", "llama-3-8b"], "found the weights of another model than llama-3-8b"),
    ]  # fmt: skip
    for arguments, text in cases:
        code, shown, err = run(capsys, *arguments, "--out", out)
        assert (code, shown) == (2, ""), arguments
        assert err.startswith("error: "), err
        assert text in err, err
        assert not out.exists()


def test_a_checkpoint_without_its_run_needs_a_model(
    a_run: Path, weights: ModelWeights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (a_run / "checkpoints" / "step-00000001").rename(tmp_path / "alone")
    code, _, err = run(capsys, tmp_path / "alone", "--to", "huggingface", "--out", tmp_path / "hf")
    assert code == 2
    assert "lies in no run's folder, so that its plan, or its model, is required" in err
    plan = ["--model", a_run / "plan.json"]
    assert run(capsys, tmp_path / "alone", "--to", "huggingface", "--out", tmp_path / "hf", *plan)[0] == 0
    assert equal(tmp_path / "hf", weights)
