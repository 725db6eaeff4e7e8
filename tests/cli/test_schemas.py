"""Every `--json` payload conforms to its JSON Schema, and models and layouts have the same form in all of them."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from json_schemas import closed, require_valid, validators
from thinned import covering

from shardwise.present.command_line import main, verb_parsers
from shardwise.present.json_schemas import PAYLOADS, json_schemas

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
JOB = "--batch-tokens 512Ki --seq-len 8192"
PLAN = f"plan llama-3-8b h100:8 {JOB} --out plan.json"
POOL = "sglang serve Qwen/Qwen3-8B --disaggregation-mode"
LAUNCH = f"--launch {EXAMPLES}/calibrate/run/launch.sh --cluster h100:64"
SMALL = (
    f"plan {EXAMPLES}/small-llama/config.json local:1 --batch-tokens 512 --seq-len 64 --precision fp32 --runnable "
    "--out plan.json"
)
TOKENS = "tokenize --python-library 100kB --vocab-size 512 --out data"
RUN = f"{SMALL} && {TOKENS} && train plan.json --data data --steps 6 --out run --device cpu"

# Sessions in an empty folder, and the schema of what the last command of each prints with --json.
SESSIONS = {
    "kernels softmax":
        "shardwise.kernels/1",
    f"plan llama-3-8b h100:8 {JOB} --tokens 1T":
        "shardwise.plan/3",
    "plan mixtral-8x7b tpu-v5p:4x4x4 --batch-tokens 1Mi --seq-len 4096":
        "shardwise.plan/3",
    "plan llama-3-8b 'tpu-v5e:4x4*2' --batch-tokens 1Mi --seq-len 4096 --overlap sum":
        "shardwise.plan/3",
    f"plan llama-3-8b h100:8 mi300x:1 {JOB} --tokens 1T --deadline 9000d":
        "shardwise.comparison/2",
    f"plan llama-3-8b h100:8 {JOB} --sweep gpus=1,8 --sweep tp=1,2":
        "shardwise.sweep/2",
    "plan gpt-2 h100:4,8 --noise-scale 128Ki --batch-tokens 64Ki,128Ki --seq-len 1024 --tokens 10G --budget 1M":
        "shardwise.to_loss/1",
    "plan gpt-2 h100:8 --to-loss 3 --batch-tokens 64Ki --seq-len 1024 --out plan.json && explain plan.json":
        "shardwise.explain/3",
    f"batch fit {EXAMPLES}/batch/runs.csv":
        "shardwise.batch_fit/1",
    f"batch noise {EXAMPLES}/noise":
        "shardwise.batch_noise/1",
    f"experiments run {EXAMPLES}/experiments/commands.toml --ledger runs/ledger.jsonl":
        "shardwise.experiments_status/1",
    f"experiments report {EXAMPLES}/calibrate/runs.csv":
        "shardwise.experiments_report/1",
    f"estimate llama-3-8b h100:8 {JOB} --layout dp=8":
        "shardwise.plan/3",
    f"{PLAN} && explain plan.json --against tp=8 --term memory.activations":
        "shardwise.explain/3",
    f"plan llama-3-8b h100:16 {JOB} --pin pp=2 --out plan.json && explain plan.json":
        "shardwise.explain/3",
    "serve estimate llama-3-8b h100:2 --isl 1000 --osl 200 --concurrency 8":
        "shardwise.serving_estimate/1",
    "serve estimate llama-3-8b h100:2 --layout 'prefill: tp=1; decode: tp=1' --isl 1000 --osl 200 --concurrency 8":
        "shardwise.serving_pools/1",
    "serve read 'vllm serve Qwen/Qwen3-8B -tp 2 --max-num-seqs 64' h100:2": "shardwise.serving-launch/1",
    f"serve read '{POOL} prefill & {POOL} decode' h100:2": "shardwise.serving-pools-launch/1",
    "serve plan gpt-oss-20b h100:4 --isl 1000 --osl 200 --rate 5/s --ttft 2s --tpot 30ms":
        "shardwise.serving_plan/1",
    f"{PLAN} && instructions plan.json --pass forward --unit block":
        "shardwise.instructions/2",
    "memory llama-3-8b h100:8 --layout 'fsdp=8 micro_batch_seqs=2' --layout 'tp=8'":
        "shardwise.memory/2",
    "memory llama-3-8b h100:8 --layout 'pp=8' --batch-tokens 512Ki --seq-len 4096":
        "shardwise.memory/2",
    "kv-cache llama-3-70b --context 8Ki --batch 32 --on h100:8":
        "shardwise.kv-cache/3",
    "kv-cache deepseek-v3 --context 8Ki":
        "shardwise.kv-cache/3",
    "roofline matmul B=240,D=8192,F=28672 tpu-v5e --with 'attention T=4096,N=32,H=128'":
        "shardwise.roofline/2",
    "roofline dot N=16Mi h100":
        "shardwise.roofline/2",
    "roofline llama-3-8b T=4096 h100":
        "shardwise.roofline-block/2",
    "rule critical_intensity flops_per_s=459TFLOP/s bytes_per_s=180GB/s":
        "shardwise.rule/1",
    "completion bash":
        "shardwise.completion/1",
    "doctor":
        "shardwise.doctor/1",
    "matmul 'A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]' --mesh X=4,Y=2 --size I=64,J=64,K=64 --on h100 --backward --run numpy":
        "shardwise.matmul/1",
    "reshard 'A[I_X, J] -> A[I, J_X]' --mesh X=4 --size I=64,J=64":
        "shardwise.reshard/1",
    "collective all-gather 1GB --axes 16 --on tpu-v5p":
        "shardwise.collective/1",
    "collective all-reduce 1GB --axes 16 --on h100":
        "shardwise.collective/1",
    "cheat-sheet llama-3-8b h100:16":
        "shardwise.cheat-sheet/1",
    "network h100:64 --layout 'tp=8 dp=8'":
        "shardwise.network/1",
    "schedule 1f1b --stages 4 --micro-batches 8":
        "shardwise.schedule/1",
    "schedule dualpipe --stages 4 --micro-batches 8":
        "shardwise.schedule/1",
    "schedule compare --stages 4 --micro-batches 8":
        "shardwise.schedule-comparison/1",
    f"{PLAN} && simulate plan.json":
        "shardwise.simulation/2",
    f"plan llama-3-8b h100:16 {JOB} --pin pp=2 --out plan.json && simulate plan.json --overlap none":
        "shardwise.simulation/2",
    f"{PLAN} && explore plan.json":
        "shardwise.explore/1",
    f"{PLAN} --stack megatron && export plan.json --to megatron --out run":
        "shardwise.export/1",
    f"{PLAN} --stack megatron --pin recompute=full --export run && read run/launch.sh --cluster h100:8":
        "shardwise.read/3",
    f"mfu {EXAMPLES}/calibrate/run/train.log {LAUNCH} --row rows.csv":
        "shardwise.mfu/2",
    "mfu --model llama-3-8b --cluster h100:8 --seq-len 8192 --tokens-per-s 80k":
        "shardwise.mfu/2",
    "mfu --model llama-3-8b --cluster h100:8 --seq-len 8192 --batch-tokens 512Ki --step-time 7s":
        "shardwise.mfu/2",
    "show models":
        "shardwise.show/1",
    "show chips h100":
        "shardwise.show/1",
    "show clusters tpu-v5p:4x4x8":
        "shardwise.show/1",
    "show precisions":
        "shardwise.show/1",
    "precision e4m3 e8m0":
        "shardwise.precision/1",
    "show stacks nemo-25 --chip h100":
        "shardwise.show/1",
    "show targets":
        "shardwise.show/1",
    "show rules":
        "shardwise.show/1",
    "show optimizers muon --precision fp16_fp32_update":
        "shardwise.show/1",
    "figures":
        "shardwise.figures/1",
    "figures zero-stages":
        "shardwise.figure/2",
    "validate --source torchtitan":
        "shardwise.validate/2",
    "bench memory --device cpu":
        "shardwise.bench/1",
    f"calibrate h100:32 --runs {EXAMPLES}/calibrate/runs.csv":
        "shardwise.calibrate/1",
    TOKENS:
        "shardwise.tokens/2",
    f"{SMALL} && rehearse plan.json":
        "shardwise.rehearse/2",
    f"{RUN} && convert run --to huggingface --out hf":
        "shardwise.convert/1",
    f"{SMALL} && verify plan.json --steps 1":
        "shardwise.verify/1",
    RUN:
        "shardwise.run_summary/1",
    f"{RUN} && reconcile plan.json run":
        "shardwise.reconcile/3",
    f"{RUN} --profile 4:5 && trace run --bottlenecks":
        "shardwise.trace/1",
}  # fmt: skip
# Their values take minutes to make; the tests that make them anyway ask the schema: those of calibrate, bench and train.
ELSEWHERE = {
    "shardwise.validate.folds/2", "shardwise.validate.groups/1", "shardwise.validate.serving/1", "shardwise.bench-machine/1",
    "shardwise.serving_calibration/1",
    "shardwise.batch_runs/1", "shardwise.batch_branches/1",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("shardwise.run.trainer.machine_probe.BUDGET_S", 0.0)
    monkeypatch.setattr("shardwise.measure.microbenchmarks.benchmark_lines.MEMORY_BYTES", {"cpu": (2**20,)})


class Folders:
    """The folders that commands leave, made once for all sessions that begin with the same commands."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self.factory = factory
        self.folders: dict[tuple[str, ...], Path] = {}

    def after(self, commands: Sequence[str]) -> Path:
        key = tuple(command.strip() for command in commands)
        if key not in self.folders:
            folder = self.factory.mktemp("session")
            if key:
                shutil.copytree(self.after(key[:-1]), folder, dirs_exist_ok=True)
                with contextlib.chdir(folder):
                    assert main(shlex.split(key[-1])) == 0
            self.folders[key] = folder
        return self.folders[key]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory)


IN_SUITE = covering([{session.rpartition("&&")[2].split()[0]} for session in SESSIONS], 1 / 2)  # each verb


@pytest.mark.parametrize(
    "session",
    [
        pytest.param(
            session, id=session.rpartition("&&")[2][:60].strip(), marks=[] if number in IN_SUITE else pytest.mark.matrix
        )
        for number, session in enumerate(SESSIONS)
    ],
)
def test_payloads_validate_against_their_schemas(
    session: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: Folders
) -> None:
    *before, end = session.split("&&")
    last = shlex.split(end)
    shutil.copytree(folders.after(before), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    main([*last, "--json"])
    payload = json.loads(capsys.readouterr().out)
    assert payload["schema"] == SESSIONS[session]
    assert payload["schema"] in json_schemas(last[0])
    require_valid(payload)


@pytest.mark.parametrize("key", ["model", "layout"])
def test_a_model_and_a_layout_have_one_shape(key: str) -> None:
    schemas = [schema for verb in PAYLOADS if verb != "serve" for schema in json_schemas(verb).values()]
    shapes = {tuple(shape) for schema in schemas for shape in shapes_of(key, schema)}
    assert len(shapes) == 1
    assert (
        {"name", "num_params", "num_layers"} <= {*shapes.pop()} if key == "model" else {"text", "tp"} <= {*shapes.pop()}
    )


def test_serving_has_layouts_of_its_own() -> None:
    shapes = {tuple(shape) for schema in json_schemas("serve").values() for shape in shapes_of("layout", schema)}
    assert len(shapes) == 2
    pools, instance = sorted(shapes, key=len)
    assert set(pools) == {"prefill", "decode"}
    assert {"tp", "attention_dp", "replicas"} <= {*instance}


def shapes_of(key: str, schema: dict[str, Any]) -> Iterator[list[str]]:
    """Return the keys of each object that a schema has under a key, at any depth."""
    for part in (schema, *schema.get("$defs", {}).values()):
        if key in part.get("properties", {}):
            subschema = part["properties"][key]
            for choice in subschema.get("anyOf", [subschema]):
                if choice != {"type": "null"}:
                    yield list(schema["$defs"][choice["$ref"].rpartition("/")[2]]["properties"])


def test_every_schema_is_that_of_a_session() -> None:
    named = {name for verb in PAYLOADS for name in json_schemas(verb)}
    assert {session.rpartition("&&")[2].split()[0] for session in SESSIONS} == {
        verb for verb, kinds in PAYLOADS.items() if kinds
    }
    assert named - set(SESSIONS.values()) == {*ELSEWHERE, "shardwise.error/1"}


def test_every_verb_has_a_schema() -> None:
    assert verb_parsers().keys() == PAYLOADS.keys()


def test_errors_validate_against_their_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "chips", "h900", "--json"]) == 2
    require_valid(json.loads(capsys.readouterr().err))


def test_invalid_errors_fail_validation() -> None:
    validator = validators()["shardwise.error/1"]
    error = {"schema": "shardwise.error/1", "error": {"problems": ["a"], "exit_code": 2}}
    assert validator.is_valid(error)
    for wrong in (
        {**error, "more": 1}, {"schema": "shardwise.error/1"}, {**error, "schema": "shardwise.error/2"},
        {**error, "error": {"problems": "a", "exit_code": 2}}, {**error, "error": {"problems": [], "exit_code": 2, "x": 1}},
    ):  # fmt: skip
        assert not validator.is_valid(wrong)


def test_closing_a_schema_leaves_tables_open() -> None:
    assert closed({"type": "object", "additionalProperties": {"type": "number"}})["additionalProperties"] == {
        "type": "number"
    }
