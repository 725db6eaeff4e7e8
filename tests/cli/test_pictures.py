"""`shardwise roofline` and `shardwise memory` as a user meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from answers import answer

import shardwise as sw
from shardwise.book_formulas.rooflines import KERNEL_FORMS
from shardwise.present.reports import memory as memory_module
from shardwise.present.verbs import rooflines_and_rules as books
from shardwise.values.errors import InputError, MissingValueError
from shardwise.values.estimate_term_names import MEMORY_TERMS

MATMUL = ["matmul", "B=240,D=8192,F=28672", "tpu-v5e"]
JOB = ["--batch-tokens", "512Ki", "--seq-len", "8192"]
MEMORY = ["llama-3-8b", "h100:8", *JOB]


def run(verb: str, *arguments: str) -> str:
    return answer(verb, *arguments)


def payload(verb: str, *arguments: str) -> dict[str, Any]:
    parsed = json.loads(run(verb, *arguments, "--json"))
    assert isinstance(parsed, dict)
    return parsed


def texts(path: Path) -> set[str]:
    return {element.text or "" for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")}


def test_a_product_just_short_of_the_knee() -> None:
    shown = run("roofline", *MATMUL)
    for part in (
        "matmul [240, 8,192] · [8,192, 28,672] in bf16 on tpu-v5e",
        "memory-bound: intensity 231.3 FLOPs/byte, the chip's 243.2",
        "113 GFLOP at 197 TFLOP/s",
        "compute-bound from B = 252.9",
        "torus axis",
    ):
        assert part in shown


def test_int8_weights_halve_the_critical_batch() -> None:
    assert "compute-bound from B = 126.4" in run("roofline", *MATMUL, "--weights", "int8")
    assert "compute-bound:" in run("roofline", *MATMUL, "--weights", "int8")
    narrow = run("roofline", "matmul", "B=4Ki,D=128,F=128", "h100")
    assert "memory-bound at every B" in narrow


def test_roofline_payload_has_work_bytes_and_times() -> None:
    report = payload("roofline", *MATMUL)
    assert report.keys() == {
        "schema", "kernel", "label", "sizes", "shapes", "chip", "dtype", "weights", "from", "options", "peak_flops_per_s",
        "memory_bytes_per_s", "flops", "read_bytes", "written_bytes", "moved_bytes", "intensity", "critical_intensity",
        "math_s", "memory_s", "time_s", "no_overlap_s", "bound", "attainable_flops_per_s", "stages", "critical_letters",
        "critical_size", "padding", "links", "with",
    }  # fmt: skip
    assert report["schema"] == "shardwise.roofline/2"
    assert report["flops"] == 2 * 240 * 8192 * 28672
    assert report["moved_bytes"] == 2 * (240 * 8192 + 8192 * 28672 + 240 * 28672)
    assert report["critical_intensity"] == pytest.approx(197e12 / 810e9)
    assert report["time_s"] == max(report["math_s"], report["memory_s"])
    assert payload("roofline", "matmul", "B=1,D=8,F=8", "h100")["critical_size"] is None


def test_a_rooflines_picture(tmp_path: Path) -> None:
    target = tmp_path / "roofline.svg"
    run("roofline", *MATMUL, "--plot", str(target))
    assert {"Roofline of tpu-v5e", "bf16, memory: 243.2", "matmul B = 240, D = 8,192, F = 28,672", "A"} <= texts(target)
    assert "bf16 from VMEM, 17.8 TB/s" in texts(target)


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        (
            ["conv", "B=1,D=2", "h100"],
            ["KERNEL: found 'conv'; one of dot, elementwise, matmul", "or a model is required"],
        ),
        (["matmul", "B=1,D=2", "h100"], ["SIZES: F missing; B, D, F are required"]),
        (["matmul", "B=0,D=x,F=2", "h100"], ["SIZES: B: found '0'", "SIZES: D: found 'x'"]),
        (["matmul", "B=1,B=2,D=2,F", "h100"], ["SIZES: found 'B=2'", "SIZES: found 'F'"]),
        (["matmul", "B=1,D=1e200,F=2", "h100"], ["SIZES: D: found '1e200'; a whole number of at most 1e+18"]),
        (["matmul", "B=1,D=2,F=2,Q=1", "h100"], ["SIZES: matmul has no 'Q'"]),
        (["matmul", "B=1,D=2,F=2", "h100", "--from", "disk"], ["'disk'; one of host, hbm, vmem"]),
        (["matmul", "B=1,D=2,F=2", "h100", "--causal"], ["matmul is not attention"]),
        (["matmul", "B=1,D=2,F=2", "h100", "--with", "conv B=1"], ["KERNEL: found 'conv'"]),
        (["matmul", "B=1,D=2,F=2", "h100", "--with", "matmul B=1,D=2,F=2 causal"], ["matmul is not attention"]),
        (["attention", "T=8,N=2,H=4", "h100", "--with", "attention T=8,N=2,H=4 flash"], ["SIZES: found 'flash'"]),
        (["matmul", "B=1,D=2,F=2", "h100", "--set", "model.name=x"], ["chip.NAME=VALUE is required"]),
        (
            ["llama-3-8b", "B=1,D=2", "h100", "--dtype", "fp8"],
            ["a block has no 'D'", "T missing", "--dtype is for a kernel"],
        ),
        (["matmul", "B=1,D=2,F=2", "h999"], ["chip: found 'h999'; the catalogue has"]),
        (["matmul", "B=1,D=2,F=2", "h100", "--dtype", "bf17"], ["dtype: found 'bf17'"]),
    ],
)
def test_wrong_rooflines_are_refused(arguments: list[str], problems: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        run("roofline", *arguments)
    for problem in problems:
        assert problem in str(caught.value)


@pytest.mark.parametrize(("name", "begin"), [("a.svg", b"<svg"), ("a.PNG", b"\x89PNG"), ("a.pdf", b"%PDF")])
def test_a_picture_is_what_its_name_ends_in(tmp_path: Path, name: str, begin: bytes) -> None:
    run("roofline", *MATMUL, "--plot", str(tmp_path / name))
    assert (tmp_path / name).read_bytes().startswith(begin)


def test_without_matplotlib_only_svg_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shardwise.present.charts.matplotlib_export.find_spec", lambda name: None)
    run("roofline", *MATMUL, "--plot", str(tmp_path / "a.svg"))
    with pytest.raises(SystemExit) as caught:
        run("roofline", *MATMUL, "--plot", str(tmp_path / "a.png"))
    assert caught.value.code == 2
    assert "pip install 'shardwise[plot]'" in capsys.readouterr().err


def test_kernels_side_by_side(tmp_path: Path) -> None:
    target = tmp_path / "roofline.svg"
    more_kernels = ["--with", "attention T=1,S=8192,N=64,K=8,H=128", "--with", "dot N=4096"]
    shown = run("roofline", *MATMUL, *more_kernels, "--weights", "int8", "--causal", "--plot", str(target))
    lines = shown.splitlines()
    assert lines[0] == "on tpu-v5e in bf16, from hbm: compute-bound from 243.2 FLOPs/byte"
    assert [line.split()[0] for line in lines[1:]] == ["kernel", "matmul", "attention", "dot"]
    assert [line.split()[-1] for line in lines[2:]] == ["compute", "memory", "memory"]
    assert "causal flash" in lines[3]
    assert {"A", "B", "C", "dot N = 4,096"} <= texts(target)
    report = payload("roofline", *MATMUL, *more_kernels, "--causal")
    assert [kernel["kernel"] for kernel in report["with"]] == ["attention", "dot"]
    assert (report["options"], report["with"][0]["options"]) == ([], ["causal", "flash"])


def test_operands_on_the_host_and_padding() -> None:
    """S0, part 2, question 3, with its bandwidth of 15 GB/s: 61,000 tokens, of matrices far wider than any."""
    shown = run(
        "roofline", "matmul", "B=64,D=1Gi,F=4Gi", "tpu-v6e", "--from", "host", "--set", "chip.pcie_bytes_per_s=15GB/s"
    )
    assert "pcie-bound: intensity 64.0 FLOPs/byte, the chip's from its host 61,200.0" in shown
    assert "compute-bound from B = 61,204.4" in shown
    shown = run("roofline", "matmul", "B=1,D=100,F=128", "tpu-v6e", "--from", "hbm")
    assert "padded to the matrix unit of 256 x 256: 2.4% of its FLOPs are useful" in shown
    assert "padded" not in run("roofline", "matmul", "B=1,D=100,F=128", "h100")


def test_roofline_of_a_models_block(tmp_path: Path) -> None:
    target = tmp_path / "roofline.svg"
    shown = run("roofline", "llama-3-8b", "B=2,T=4096", "h100", "--plot", str(target))
    for part in ("block of llama-3-8b, 2 x 4,096 tokens in bf16 on h100", "attended, lse", "(3 fused)", "of the peak"):
        assert part in shown
    shown = "\n".join(texts(target))
    for kernel in ("forward attended, lse: ", "forward attention_norm.out · wq, and 3 alike: "):
        assert kernel in shown
    report = payload("roofline", "llama-3-8b", "T=4096", "h100")
    assert report.keys() == {
        "schema", "model", "sizes", "chip", "dtype", "peak_flops_per_s", "memory_bytes_per_s", "critical_intensity",
        "operations", "phases",
    }  # fmt: skip
    assert report["schema"] == "shardwise.roofline-block/2"
    assert report["sizes"] == {"B": 1, "T": 4096}
    assert report["phases"]["forward"]["time_s"] == pytest.approx(
        sum(
            max(operation["math_s"], operation["memory_s"])
            for operation in report["operations"]
            if operation["phase"] == "forward"
        )
    )


def test_the_help_lists_the_kernels_with_their_letters() -> None:
    """The help loads no other module, so it repeats `FORMS`."""
    shown = {line.split()[0]: line[53:].split(";")[0] for line in books.KERNELS.splitlines()[1:]}
    shown.pop("MODEL")
    assert list(shown) == list(KERNEL_FORMS)
    for name, form in KERNEL_FORMS.items():
        required, *optional = shown[name].split()
        assert required.split(",") == [letter for letter in form.letters if letter not in form.defaults], name
        assert {word.strip("[]") for word in optional} == {f"{k}={v}" for k, v in form.defaults.items()}, name


def test_a_missing_peak_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingValueError, match="no sourced fp8 peak"):
        run("roofline", *MATMUL, "--dtype", "fp8")
    with pytest.raises(InputError, match="--plot: cannot write"):
        run("roofline", *MATMUL, "--plot", str(tmp_path / "none" / "lines.svg"))


def test_kept_tensors_of_a_layer_are_listed_and_drawn(tmp_path: Path) -> None:
    arguments = (*MEMORY, "--layout", "fsdp=8 recompute=budget:20GB")
    (described,) = payload("memory", *arguments)["layouts"]
    (block,) = described["recompute"]
    kept = {tensor["tensor"]: tensor["num_bytes"] for tensor in block["kept"]}
    again = {name for operation in block["recomputed"] for name in operation["tensors"]}
    assert described["layout"]["recompute"] == "keep:" + ",".join(name for name in kept if name != "x")
    assert described["stages"][0]["activations"] <= 20e9
    assert kept["x"] == 8192 * 4096 * 2  # tokens · width · bf16
    assert again.isdisjoint(kept)
    assert all(operation["seconds"] > 0 for operation in block["recomputed"])
    text = run("memory", *arguments, "--plot-kept", str(tmp_path / "kept.svg"))
    assert "recompute=keep:" in str(text)
    drawn = (tmp_path / "kept.svg").read_text()
    assert all(words in drawn for words in ("bytes that a layer keeps in one micro-batch", "selective", "the layout"))
    with pytest.raises(InputError, match="--plot-kept: found 2 layouts; one --layout is required"):
        run("memory", *arguments, "--layout", "tp=8", "--plot-kept", str(tmp_path / "kept.svg"))


def test_memory_of_one_layout_is_the_estimates() -> None:
    report = payload("memory", *MEMORY, "--layout", "fsdp=8 recompute=full")
    assert report.keys() == {"schema", "model", "cluster", "defaults", "job", "memory_capacity_bytes", "layouts"}
    assert report["schema"] == "shardwise.memory/2"
    (described,) = report["layouts"]
    assert described.keys() == {
        "layout", "global_batch_tokens", "num_micro_batches", "memory_bytes", "fits", "verdict", "margin",
        "fullest_stage", "stages", "recompute",
    }  # fmt: skip
    layout = sw.Layout(fsdp=8, zero_stage=3, recompute="full")
    job = sw.Job(global_batch_tokens=2**19, seq_len=8192, loss="fused")  # the leanest of the stack that is typical
    priced = sw.estimate(sw.load_model("llama-3-8b"), sw.load_cluster("h100:8"), job, layout)
    assert described["stages"] == [priced.memory]
    assert described["memory_bytes"] == pytest.approx(priced.memory_bytes)
    assert described["fits"] is True


def test_the_report_is_a_tree_and_the_stages() -> None:
    shown = run("memory", "llama-3-8b", "h100:16", *JOB, "--layout", "fsdp=4 pp=4 zero_stage=1 recompute=full")
    for part in (
        "model state",
        "optimizer",
        "stage 3, the fullest",
        "stages, of the capacity",
        "<- fullest",
        "of 84.9 GB (fits",
    ):
        assert part in shown
    assert "side by side" not in shown
    (total,) = [line for line in shown.splitlines() if "<- fullest" in line]
    assert total.split()[1:3] == shown.splitlines()[3].split()[:2]


@pytest.mark.parametrize(
    ("layout", "num_micro_batches"),
    [
        ("fsdp=16 micro_batch_seqs=2", 1),
        ("fsdp=4 pp=4 zero_stage=1", 4),
        ("fsdp=4 pp=4 zero_stage=1 num_virtual_stages=2", 8),
        ("fsdp=4 pp=4 zero_stage=1 schedule=zb_h1", 4),
        ("fsdp=4 pp=4 zero_stage=1 schedule=zb_h2 recompute=full", 7),
        ("fsdp=4 pp=4 zero_stage=1 schedule=dualpipe", 8),
    ],
)
def test_the_default_batch_fills_the_pipeline(layout: str, num_micro_batches: int) -> None:
    """A batch four times as large takes no more memory, for every stage; the defaults are said."""
    report = payload("memory", "llama-3-8b", "h100:16", "--layout", layout)
    (described,) = report["layouts"]
    assert described["num_micro_batches"] == num_micro_batches
    assert report["defaults"] == ["seq_len", "batch_tokens"]
    assert report["job"] == {"global_batch_tokens": None, "seq_len": 4096, "precision": "bf16"}
    batch = str(4 * described["global_batch_tokens"])
    (larger,) = payload("memory", "llama-3-8b", "h100:16", "--layout", layout, "--batch-tokens", batch)["layouts"]
    assert larger["num_micro_batches"] == 4 * num_micro_batches
    assert larger["stages"] == described["stages"]
    shown = run("memory", "llama-3-8b", "h100:16", "--layout", layout)
    assert "sequences of 4,096 (default)" in shown
    assert f"{described['global_batch_tokens']:,} tokens per batch (default: micro-batches that fill" in shown


def test_given_sizes_are_not_listed_as_defaults(tmp_path: Path) -> None:
    arguments = ["llama-3-8b", "h100:8", "--layout", "fsdp=8"]
    assert payload("memory", *arguments, "--seq-len", "8192")["defaults"] == ["batch_tokens"]
    longer = payload("memory", *arguments, "--set", "job.seq_len=8192")
    assert (longer["defaults"], longer["job"]["seq_len"]) == (["batch_tokens"], 8192)
    assert longer["layouts"][0]["global_batch_tokens"] == 8 * 8192
    report = payload("memory", *arguments, "--set", "job.global_batch_tokens=64Ki")
    assert (report["defaults"], report["job"]["global_batch_tokens"]) == (["seq_len"], 65536)
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 1024}
        ),
        encoding="utf-8",
    )
    assert payload("memory", str(config), "h100:8", "--layout", "dp=8")["job"]["seq_len"] == 1024


def test_layouts_of_other_batches_are_told_apart() -> None:
    shown = run(
        "memory",
        "llama-3-8b",
        "h100:16",
        "--layout",
        "fsdp=8 dp=2",
        "--layout",
        "fsdp=4 pp=4 zero_stage=1 micro_batch_seqs=2",
    )
    assert "a batch for each layout (default" in shown
    assert "batch of 65,536 tokens, micro-batches of each replica: 1" in shown
    assert "micro-batches of each replica: 4" in shown


def test_the_tree_has_every_term() -> None:
    assert tuple(name for names in memory_module.GROUPS.values() for name in names) == MEMORY_TERMS


def test_layouts_side_by_side(tmp_path: Path) -> None:
    target = tmp_path / "memory.svg"
    arguments = [*MEMORY, "--layout", "dp=8", "--layout", "fsdp=8 recompute=full", "--plot", str(target)]
    shown = run("memory", *arguments)
    rows = {line.split()[0]: line.split()[1:] for line in shown.split("\n\n")[1].splitlines()[2:]}
    assert rows["fits"] == ["NO", "yes"]
    assert rows["optimizer"] == ["64.2", "GB", "8.03", "GB"]
    assert "DOES NOT FIT" in shown
    assert {"h100: 84.9 GB", "parameters", "optimizer"} <= texts(target)
    assert any(text.startswith("[2] fsdp=8") for text in texts(target))


def test_a_picture_of_stages(tmp_path: Path) -> None:
    target = tmp_path / "memory.svg"
    run("memory", "llama-3-8b", "h100:16", *JOB, "--layout", "fsdp=4 pp=4 zero_stage=1", "--plot", str(target))
    assert {f"stage {i}" for i in range(4)} <= texts(target)


@pytest.mark.parametrize(
    ("layouts", "problems"),
    [
        (["tp=3", "dp=8 bogus=1"], ["'bogus=1'"]),
        (["dp=4", "dp=8", "tp=16"], ["dp=4", "tp=16"]),
    ],
)
def test_wrong_layouts_are_refused(layouts: list[str], problems: list[str]) -> None:
    arguments = [word for layout in layouts for word in ("--layout", layout)]
    with pytest.raises(InputError) as caught:
        run("memory", *MEMORY, *arguments)
    for problem in problems:
        assert problem in str(caught.value)


def test_verbs_load_no_framework() -> None:
    """Neither searches; the scalar path is plain Python."""
    code = (
        "import sys\n"
        "from shardwise.present.command_line import build_parser, verb_parsers\n"
        "parser = build_parser()\n"
        "verb_parsers()\n"
        "assert not {'numpy', 'pydantic'} & set(sys.modules)\n"
        f"for words in ({['roofline', *MATMUL]!r}, {['memory', *MEMORY, '--layout', 'dp=8']!r}):\n"
        "    parsed = parser.parse_args(words)\n"
        "    parsed.run(parsed)\n"
        "assert not {'numpy', 'torch', 'jax'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "words", [("B=240,D=8192,F=28672",), ("B=240,", "D=8192,", "F=28672"), ("B=240", "D=8192", "F=28672")]
)
def test_sizes_may_be_several_words(words: tuple[str, ...]) -> None:
    assert answer("roofline", "matmul", *words, "tpu-v5e").startswith(
        "matmul [240, 8,192] · [8,192, 28,672] in bf16 on tpu-v5e"
    )
