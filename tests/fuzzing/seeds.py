"""Valid inputs of every verb, small enough to be read in milliseconds: files in a folder, and command lines that read them."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np
from conversion.random_models import random_weights
from measurement import logs_of
from train.shard_files import write_shards

import shardwise as sw
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.interop.frameworks.targets import TARGETS
from shardwise.interop.weights.convert import WEIGHT_FORMATS, ConvertOptions
from shardwise.interop.weights.stored_model import boxes_of_weights
from shardwise.interop.weights.stored_slices import WeightSource
from shardwise.layout import Layout
from shardwise.model import Architecture, Job
from shardwise.present.command_line import main
from shardwise.search import dump_plan, plan_layout

TRACKED = Path(__file__).parents[1] / "measurement" / "tracked"
SEQ_LEN = 16
TINY = Architecture(
    name="tiny", num_layers=2, d_model=16, d_ff=24, num_heads=2, num_kv_heads=2, head_dim=8, vocab_size=32
)  # fmt: skip
CLUSTER = """
name = "mine"
chip = "h100"
[[tiers]]
name = "nvlink"
size = 8
bytes_per_s = "450 GB/s"
hop_latency_s = 2e-6
"""
TORUS = 'chip = { base = "tpu-v5e", memory_bytes = "16 GB" }\ntorus = { shape = [4, 4], bytes_per_s = "45 GB/s" }\n'
BENCH = '{"bench": "matmul", "dtype": "bf16", "m": 8192, "n": 8192, "k": 8192, "seconds": 0.002, "machine": "a"}\n' * 3
SWEEP = "batch_tokens,steps,seed,learning_rate\n" + "".join(
    f"{2**n},{1000 + 2**20 // 2**n},0,1e-3\n" for n in range(8, 18)
)
NOISE = '{"schema": "shardwise.noise/1", "tokens": 1e6, "interval90": [5e5, 2e6], "source": "x"}\n'
JOB = "--batch-tokens 64Ki --seq-len 1024"


class Command(NamedTuple):
    """A command line, and the files and folders that it reads; `weight`: how often it is drawn, and `slow` ones seldom."""

    words: str
    reads: Sequence[str] = ()
    weight: float = 1.0


READING = (
    Command("explain plan.json", ["plan.json"], 3), Command("instructions plan.json --pass forward", ["plan.json"]),
    Command("simulate plan.json", ["plan.json"]), Command("export plan.json --to megatron --json", ["plan.json"]),
    Command("mfu --step-time 8.1s --plan plan.json", ["plan.json"]),
    Command(f"plan model/config.json h100:8 {JOB}", ["model/config.json"], 2),
    Command(f"estimate model/config.json cluster.toml {JOB} --layout fsdp=8", ["model/config.json", "cluster.toml"], 3),
    Command(f"memory gpt-2 torus.toml {JOB} --layout fsdp=16", ["torus.toml"], 2),
    Command("kv-cache model --context 1Ki", ["model/config.json"], 2), Command("show clusters cluster.toml", ["cluster.toml"], 2),
    Command("show models model/config.json", ["model/config.json"], 2),
    Command(f"plan gpt-2 h100:8 {JOB} --noise-scale noise.json", ["noise.json"]),
    Command("batch fit sweep.csv", ["sweep.csv"], 2), Command("batch fit sweep.jsonl", ["sweep.jsonl"], 2),
    Command("schedule actions.csv", ["actions.csv"], 3),
    Command("validate --rows rows.csv", ["rows.csv"], 3), Command("calibrate h100:8 --runs rows.csv", ["rows.csv"], 0.3),
    Command("calibrate h100:8 --bench bench.jsonl", ["bench.jsonl"], 1),
    Command("tokenize text.jsonl --tokenizer tokenizer.json --out tokens", ["text.jsonl", "tokenizer.json"], 1),
    Command("rehearse small.json", ["small.json"], 0.2),
    Command("train small.json --data data --steps 1 --out out", ["small.json", "data/index.json"], 0.1),
    Command("mfu run", ["run/log.jsonl", "run/plan.json", "run/run.json", "run/recipe.json"], 2),
    Command("reconcile run/plan.json run", ["run/log.jsonl", "run/plan.json", "run/measured.json", "run/run.json"], 1),
    Command("trace run --bottlenecks", ["run/log.jsonl", "run/plan.json"], 1),
    Command("batch noise run", ["run/log.jsonl", "run/plan.json"], 1),
    Command("explore plan.json --json", ["plan.json"], 1),
)  # fmt: skip
LOGGED = "--model gpt-2 --cluster h100:8 --seq-len 1024"
# Command lines without files of ours; their words are mutated alone. Not of `explore` and `mcp`, which may start to serve.
SPELT = (
    f"plan gpt-2 h100:8 {JOB}", f"plan gpt-2 h100:8 {JOB} --tokens 1T --deadline 60d",
    f"estimate gpt-2 h100:8 {JOB} --layout dp=8",
    f'memory gpt-2 h100:8 {JOB} --layout "fsdp=8 micro_batch_seqs=1"', "kv-cache llama-3-8b --context 8Ki --batch 32 --on h100:8",
    "schedule 1f1b --stages 4 --micro-batches 8", "schedule interleaved --stages 4 --micro-batches 16 --virtual-stages 2",
    "roofline matmul B=240,D=8192,F=28672 tpu-v5e --weights int8", "roofline attention T=8192,N=64,K=8,H=128 h100 --causal",
    "rule critical_intensity flops_per_s=459TFLOP/s bytes_per_s=180GB/s", "rule params_by_part architecture=llama-3-70b --json",
    "precision bf16 fp16 e4m3", "reshard A[I_X,J]->A[I,J_X] --mesh X=4 --size I=1024,J=4096 --on h100:4",
    "matmul A[I_X,J]*B[J,K_Y]->C[I_X,K_Y] --mesh X=4,Y=2 --size I=1024,J=4096,K=8192", "doctor --json",
    "collective all-gather 2048x8192 --axes 4 --on tpu-v5e",
    "mfu --tokens-per-s 410k --model llama-3-8b --cluster h100:64 --seq-len 8192",
    "validate --chip h100 --source dgxc", "show models qwen", "show chips h200 --json",
    "show optimizers muon --precision bf16_bf16_moments",
    "figures zero-stages --json", "completion bash", "bench nothing --out machine.jsonl",
    f"explain gpt-2 h100:8 {JOB}", "verify none.json", "export none.json --to megatron --out run",
    "tokenize none --out data", "convert none --to torchtitan --out titan",
)  # fmt: skip


QUICK_TARGETS = ("megatron", "deepspeed", "torchtitan-toml", "nanotron")  # a shell script, JSON, TOML and YAML


def write_seeds(folder: Path, *, complete: bool = True) -> list[Command]:
    """Write the files, and return the command lines that read them; unless `complete`, without a run and most launches."""
    folder.mkdir(parents=True)
    dump_plan(sw.plan("gpt-2", "h100:8", global_batch_tokens="64Ki", seq_len=1024), folder / "plan.json")
    job = Job(global_batch_tokens=4 * SEQ_LEN, seq_len=SEQ_LEN, precision="fp32")
    dump_plan(plan_layout(TINY, load_cluster("local:1"), job, Layout(micro_batch_seqs=2)), folder / "small.json")
    _write_texts(folder)
    commands = [
        *READING,
        *_write_logs(folder),
        *_write_launches(folder, list(TARGETS) if complete else QUICK_TARGETS),
        *_write_weights(folder),
    ]
    rng = np.random.default_rng(0)
    documents = [np.minimum(rng.geometric(0.2, 50), 31).tolist() for _ in range(20)]
    write_shards(folder / "data", documents, documents[:2], vocab_size=32)
    if complete:
        _write_run(folder)
        traces = [
            path.relative_to(folder).as_posix() for path in (folder / "run" / "trace").rglob("*") if path.is_file()
        ]
        commands += [
            Command(f"trace run {flags}", traces) for flags in ("--bottlenecks", "--out trace.json", "--step 5")
        ]
        checkpoint = [
            path.relative_to(folder).as_posix()
            for path in (folder / "run" / "checkpoints").rglob("*.*")
            if path.is_file()
        ]
        commands.append(Command("convert run --to huggingface --out hf", [*checkpoint, "run/plan.json"], 2))
    return [command for command in commands if all((folder / path).is_file() for path in command.reads)]


def _write_texts(folder: Path) -> None:
    rows = (
        resources.files("shardwise.measure.calibrate.published_runs").joinpath("runs.csv").read_text(encoding="utf-8")
    )
    header, *lines = rows.splitlines(keepends=True)
    texts = {
        "cluster.toml": CLUSTER, "torus.toml": TORUS, "bench.jsonl": BENCH, "sweep.csv": SWEEP, "noise.json": NOISE,
        "rows.csv": "".join([header, *(row for row in lines if ",h100," in row)][:4]),
        "sweep.jsonl": "".join(json.dumps({"batch_tokens": 2**n, "steps": 1000 + 2**20 // 2**n}) + "\n" for n in range(8, 18)),
        "text.jsonl": '{"text": "Once upon a time"}\n{"text": "there was"}\n' * 5,
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    quiet("schedule", "1f1b", "--stages", "2", "--micro-batches", "4", "--csv", str(folder / "actions.csv"))
    (folder / "corpus.txt").write_text("the cat sat on the mat. " * 50, encoding="utf-8")
    quiet(
        "tokenize",
        str(folder / "corpus.txt"),
        "--vocab-size",
        "270",
        "--held-out",
        "0",
        "--out",
        str(folder / "tokens"),
    )
    shutil.move(folder / "tokens" / "tokenizer.json", folder / "tokenizer.json")
    shutil.rmtree(folder / "tokens")


def quiet(*words: str) -> None:
    """Run a verb that makes a seed."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(list(words))
    assert code == 0, errors.getvalue()


def _write_logs(folder: Path) -> list[Command]:
    logs = {
        "torchtitan": [logs_of.torchtitan(step, 6500.0) for step in range(1, 9)],
        "megatron": [logs_of.megatron(step, 900.0) for step in range(1, 9)],
        "maxtext": [logs_of.maxtext(step, 1.5, 6500.0) for step in range(1, 9)],
        "history": ["_step,loss,throughput(tps)", *(f"{step},8.0,6500" for step in range(1, 9))],
    }
    for name, lines in logs.items():
        (folder / f"{name}.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for path in TRACKED.rglob("*"):
        if path.is_file():
            (folder / path.parent.name).mkdir(exist_ok=True)
            shutil.copy(path, folder / path.parent.name / path.name)
    tracked = [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if ".tfevents" in path.name or ".wandb" in path.name
    ]
    names = [*(f"{name}.log" for name in logs), *tracked]
    return [Command(f"mfu {name} {LOGGED}", [name], 0.6) for name in names]


def _write_launches(folder: Path, targets: Sequence[str]) -> list[Command]:
    """Write the launch of each framework that can run the model."""
    commands = []
    for name in targets:
        out = folder / "launch" / name
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = main(["plan", "llama-3-8b", "h100:8", *["--batch-tokens", "128Ki", "--seq-len", "4096"],
                         "--out", str(folder / "p.json"),
                         *(["--stack", TARGETS[name].stack] if TARGETS[name].stack != "shardwise" else [])])  # fmt: skip
            code = code or main(["export", str(folder / "p.json"), "--to", name, "--out", str(out)])
        if code == 0:
            files = sorted(
                path.relative_to(folder).as_posix()
                for path in out.rglob("*")
                if path.is_file() and path.suffix not in (".md", ".slurm")
            )
            model = "" if TARGETS[name].includes_model else " --model llama-3-8b"
            commands.append(Command(f"read {' '.join(files)} --cluster h100:8 --from {name}{model}", files))
    (folder / "p.json").unlink(missing_ok=True)
    assert len(commands) >= 4, "a target that needs another chip is left out"
    return commands


def _write_weights(folder: Path) -> list[Command]:
    weights = random_weights(TINY, 1)
    source = WeightSource(TINY, boxes_of_weights(weights), weights.dtype)
    commands = []
    for name, weight_format in WEIGHT_FORMATS.items():
        out = folder / ("model" if name == "huggingface" else name)
        weight_format.write(out, source, ConvertOptions(seq_len=SEQ_LEN))
        files = sorted(path.relative_to(folder).as_posix() for path in out.rglob("*") if path.is_file())
        model = [] if name == "huggingface" else ["--model", "model/config.json"]
        target = "torchtitan" if name == "huggingface" else "huggingface"
        lengths = ["--seq-len", "16"] if target == "huggingface" else []
        words = ["convert", out.name, "--to", target, "--out", "converted", *model, *lengths]
        commands.append(Command(" ".join(words), files, 3))
    return commands


def _write_run(folder: Path) -> None:
    """Write a run of a few steps, by training one."""
    quiet(
        "train", str(folder / "small.json"), "--data", str(folder / "data"), "--steps", "12", "--out", str(folder / "run"),
        "--profile", "5:6", "--noise-scale-every", "2",
    )  # fmt: skip
