"""`shardwise export` and `shardwise read` as a user meets them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from number_paths import require_payload_numbers

import shardwise as sw
from shardwise.present.command_line import main

PLAN = ("llama-3-8b", "h100:16", "--batch-tokens", "1Mi", "--seq-len", "8192", "--stack", "megatron")

SIZES = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --seq-length 4096 --micro-batch-size 1 "
    "--global-batch-size 64 --bf16"
)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    file = str(tmp_path / "plan.json")
    code, out, _ = run(capsys, "plan", *PLAN, "--out", file)
    assert code == 0
    assert f"next: shardwise explain {file}, shardwise export {file} --to megatron --out run/\n" in out
    return file


def test_a_plan_is_written_and_read_back(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    code, out, err = run(capsys, "export", plan, "--to", "megatron", "--out", str(folder))
    assert (code, err) == (0, "")
    assert sorted(file.name for file in folder.iterdir()) == ["README.md", "launch.sh", "launch.slurm"]
    assert "start it on each node: bash launch.sh" in out
    again = tmp_path / "again.json"
    code, out, _ = run(capsys, "read", str(folder / "launch.sh"), "--cluster", "h100:16", "--json", "--out", str(again))
    report = json.loads(out)
    assert (code, report["schema"], report["target"], report["unknown"]) == (0, "shardwise.read/3", "megatron", [])
    assert report["model"]["name"] == "llama-3-8b"
    planned, read = (json.loads(Path(file).read_text(encoding="utf-8")) for file in (plan, again))
    for name in ("model", "cluster", "job", "layout", "estimate"):
        assert read[name] == planned[name], name
    assert report["estimate"] == planned["estimate"]


@pytest.mark.parametrize(("target", "model_flags"), [("megatron", ()), ("deepspeed", ("--model", "llama-3-8b"))])
def test_a_launch_of_more_processes_than_devices_is_noted(
    target: str, model_flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two nodes of eight, read for both of them and for one: as a note, or beside what then is wrong."""
    job = ("--batch-tokens", "1Mi", "--seq-len", "8192", "--stack", target, "--export", str(tmp_path))
    assert run(capsys, "plan", "llama-3-8b", "h100:16", *job)[0] == 0
    files = [str(file) for file in tmp_path.iterdir() if file.name not in ("README.md", "launch.slurm")]
    warning = "launch.sh starts 2 × 8 = 16 processes; this is priced on 8 devices"
    assert warning not in "".join(run(capsys, "read", *files, "--cluster", "h100:16", *model_flags)[1:])
    assert warning in "".join(run(capsys, "read", *files, "--cluster", "h100:8", *model_flags)[1:])


def test_export_payload_has_files_and_notes(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "export", plan, "--to", "megatron", "--json")
    report = json.loads(out)
    assert code == 0
    assert set(report) == {"schema", "target", "version", "files", "command", "not_expressible", "warnings"}
    assert report["files"] == ["launch.sh", "launch.slurm", "README.md"]


def test_read_lists_faster_options_of_a_slow_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "plan", *PLAN, "--export", str(tmp_path), "--pin", "recompute=full", "--pin", "tp=8")
    code, out, _ = run(capsys, "read", str(tmp_path / "launch.sh"), "--cluster", "h100:16")
    assert code == 0
    assert "without recompute-granularity" in out
    code, out, _ = run(capsys, "read", str(tmp_path / "launch.sh"), "--cluster", "h100:16", "--json")
    report = json.loads(out)
    steps = [change["step_time_s"] for change in report["better"]]
    assert steps[1:] == sorted(steps[1:])
    assert max(steps) < report["estimate"]["step_time_s"]
    assert report["better"][0]["memory_bytes"] <= report["estimate"]["memory_capacity_bytes"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no command has an option"),
        ("echo hello", "no command has an option"),
        ("python train.py --not-known 3 --neither", "found no launch that is known"),
        (
            "torchrun pretrain_gpt.py --num-layers many --hidden-size 4096",
            "num-layers: found 'many'; a value of type int",
        ),
        ("torchrun pretrain_gpt.py --num-layers 32 --swiglu --bf16", "seq-length: missing"),
        (
            f"torchrun pretrain_gpt.py {SIZES} --tensor-model-parallel-size 3",
            "take 3 devices together, which do not divide 16",
        ),
        (f"torchrun pretrain_gpt.py {SIZES} --tensor-model-parallel-size 0", "take 0 devices together"),
        (f"torchrun pretrain_gpt.py {SIZES} --fp8-recipe best", "one of tensorwise, delayed, mxfp8, blockwise, custom"),
        (f"torchrun pretrain_gpt.py {SIZES} --moe-layer-freq __import__('os') --num-experts 8", "what can be read"),
        ("\x00\x01", "no command has an option"),
        ("'" * 1000, "no command has an option"),
        ("$(rm -rf /) --num-layers `reboot`", "num-layers: found '`reboot`'"),
    ],
)
def test_texts_without_a_launch_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    file = tmp_path / "launch.sh"
    file.write_text(text, encoding="utf-8")
    code, out, err = run(capsys, "read", str(file), "--cluster", "h100:16")
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_unreadable_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "read", str(tmp_path / "none.sh"), "--cluster", "h100:8")[2].startswith(
        "error: read: cannot read"
    )
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00")
    assert "is not text" in run(capsys, "read", str(tmp_path / "binary.sh"), "--cluster", "h100:8")[2]


def test_targets_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "targets")
    assert code == 0
    assert "Megatron-LM" in out
    code, out, _ = run(capsys, "show", "targets", "megatron", "--json")
    (entry,) = json.loads(out)["entries"]
    assert entry["values"]["stack"]["value"] == "megatron"


def test_a_pipeline_whose_options_are_in_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Arrays that grow, options of several words in one element, a vocabulary that only the tokenizer knows, fp16."""
    file = tmp_path / "train.sh"
    file.write_text(
        """#!/bin/bash
        GPUS=8; NODES=${NODES:-2}
        MODEL=(
            --num-layers 32 --hidden-size 4096   # Llama-3-8B
            --num-attention-heads 32 --group-query-attention --num-query-groups 8 --ffn-hidden-size 14336
        )
        MODEL+=(--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
                --untie-embeddings-and-output-weights)
        DTYPE=("--fp16")
        RUN=(--seq-length 8192 --micro-batch-size 1 --global-batch-size 32 --lr ${LR} --some-new-option 3)
        if [[ $NODES -gt 1 ]]; then
            RUN+=("--log-interval 1")
        fi
        torchrun --nproc-per-node $GPUS --nnodes $NODES pretrain_gpt.py "${MODEL[@]}" ${DTYPE[@]} ${RUN[@]} \\
            --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer
        """,
        encoding="utf-8",
    )
    code, out, err = run(capsys, "read", str(file), "--cluster", "h100:16", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["model"]["name"], report["model"]["vocab_size"]) == ("llama-3-8b", 128256)
    assert report["layout"]["text"] == (
        "fsdp=2 tp=2 pp=4 zero_stage=1 sequence_parallel=true layers_per_stage=8,8,8,8 micro_batch_seqs=1 recompute=none"
    )
    assert report["unknown"] == ["some-new-option"]
    assert {"lr", "log-interval"} <= set(report["unread"])
    assert [note.partition(",")[0] for note in report["notes"]] == ["the launch says no vocabulary"]
    assert any("num-virtual-stages-per-pipeline-rank" in change["change"] for change in report["better"])


def test_numbers_of_the_reports_are_those_of_the_payload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "plan", *PLAN, "--export", str(tmp_path), "--pin", "recompute=full", "--pin", "tp=8")
    launch = sw.read_launch(tmp_path / "launch.sh", "h100:16")
    assert require_payload_numbers(launch) >= 2 + 2 + 2 * len(launch.better)


def test_python_callers_write_a_launch_and_name_what_it_lacks(tmp_path: Path) -> None:
    plan = sw.plan("llama-3-8b", "h100:16", global_batch_tokens="1Mi", seq_len="8Ki", stack="megatron")
    sw.dump_plan(plan, tmp_path / "plan.json")
    launch = sw.export_plan(tmp_path / "plan.json", "megatron", tmp_path / "run")
    assert launch == replace(sw.export_plan(plan, "megatron"), folder=str(tmp_path / "run"))
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == sorted(launch.files)
    with pytest.raises(sw.InputError, match=r"^seq_len: found 'long'"):
        sw.read_launch(tmp_path / "run" / "launch.sh", "h100:16", seq_len="long")
    with pytest.raises(sw.InputError, match=r"^out: cannot write"):
        sw.export_plan(plan, "megatron", tmp_path / "plan.json")
