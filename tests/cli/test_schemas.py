"""Every payload of `--json` is as its JSON Schema says, and a model and a layout look the same in all of them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from json_schemas import closed, require_valid, validators

from shardwise.api.schemas import PAYLOADS, json_schemas
from shardwise.cli import main, verb_parsers

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
JOB = "--batch-tokens 512Ki --seq-len 8192"
PLAN = f"plan llama-3-8b h100:8 {JOB} --out plan.json"
LAUNCH = f"--launch {EXAMPLES}/calibrate/run/launch.sh --cluster h100:64"
SMALL = (
    f"plan {EXAMPLES}/small-llama/config.json local:1 --batch-tokens 512 --seq-len 64 --precision fp32 --runnable "
    "--out plan.json"
)
TOKENS = "tokenize --python-library 100kB --vocab-size 512 --out data"
RUN = f"{SMALL}; {TOKENS}; train plan.json --data data --steps 6 --out run --device cpu"

# Sessions in an empty folder; the last command of each gets --json.
SESSIONS = (
    f"plan llama-3-8b h100:8 {JOB} --tokens 1T",
    "plan mixtral-8x7b tpu-v5p:4x4x4 --batch-tokens 1Mi --seq-len 4096",
    "plan llama-3-8b 'tpu-v5e:4x4*2' --batch-tokens 1Mi --seq-len 4096 --overlap sum",
    f"plan llama-3-8b h100:8 mi300x:1 {JOB} --tokens 1T --deadline 9000d",
    f"plan llama-3-8b h100:8 {JOB} --sweep gpus=1,8 --sweep tp=1,2",
    "plan gpt-2 h100:4,8 --noise-scale 128Ki --batch-tokens 64Ki,128Ki --seq-len 1024 --tokens 10G --budget 1M",
    "plan gpt-2 h100:8 --to-loss 3 --batch-tokens 64Ki --seq-len 1024 --out plan.json; explain plan.json",
    f"batch fit {EXAMPLES}/batch/runs.csv",
    f"batch noise {EXAMPLES}/noise",
    f"estimate llama-3-8b h100:8 {JOB} --layout dp=8",
    f"{PLAN}; explain plan.json --against tp=8 --term memory.activations",
    f"plan llama-3-8b h100:16 {JOB} --pin pp=2 --out plan.json; explain plan.json",
    f"{PLAN}; instructions plan.json --pass forward --unit block",
    "memory llama-3-8b h100:8 --layout 'fsdp=8 micro_batch_seqs=2' --layout 'tp=8'",
    "memory llama-3-8b h100:8 --layout 'pp=8' --batch-tokens 512Ki --seq-len 4096",
    "kv-cache llama-3-70b --context 8Ki --batch 32 --on h100:8",
    "kv-cache deepseek-v3 --context 8Ki",
    "roofline matmul B=240,D=8192,F=28672 tpu-v5e --with 'attention T=4096,N=32,H=128'",
    "roofline dot N=16Mi h100",
    "roofline llama-3-8b T=4096 h100",
    "rule critical_intensity flops_per_s=459TFLOP/s bytes_per_s=180GB/s",
    "completion bash",
    "matmul 'A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]' --mesh X=4,Y=2 --size I=64,J=64,K=64 --on h100 --backward --run numpy",
    "reshard 'A[I_X, J] -> A[I, J_X]' --mesh X=4 --size I=64,J=64",
    "collective all-gather 1GB --axes 16 --on tpu-v5p",
    "collective all-reduce 1GB --axes 16 --on h100",
    "schedule 1f1b --stages 4 --micro-batches 8",
    "schedule dualpipe --stages 4 --micro-batches 8",
    "schedule compare --stages 4 --micro-batches 8",
    f"{PLAN}; simulate plan.json",
    f"plan llama-3-8b h100:16 {JOB} --pin pp=2 --out plan.json; simulate plan.json --overlap none",
    f"{PLAN}; explore plan.json",
    f"{PLAN} --stack megatron; export plan.json --to megatron --out run",
    f"{PLAN} --stack megatron --pin recompute=full --export run; read run/launch.sh --cluster h100:8",
    f"mfu {EXAMPLES}/calibrate/run/train.log {LAUNCH} --row rows.csv",
    "mfu --model llama-3-8b --cluster h100:8 --seq-len 8192 --tokens-per-s 80k",
    "mfu --model llama-3-8b --cluster h100:8 --seq-len 8192 --batch-tokens 512Ki --step-time 7s",
    "show models",
    "show chips h100",
    "show clusters tpu-v5p:4x4x8",
    "show precisions",
    "precision e4m3 e8m0",
    "show stacks nemo-25 --chip h100",
    "show targets",
    "show rules",
    "show optimizers muon --precision fp16_fp32_update",
    "figures",
    "figures zero-stages",
    "validate --source torchtitan",
    "bench memory --device cpu",
    f"calibrate h100:32 --runs {EXAMPLES}/calibrate/runs.csv",
    TOKENS,
    f"{SMALL}; rehearse plan.json",
    "figures",
    "figures zero-stages",
    f"{RUN}; convert run --to huggingface --out hf",
    f"{SMALL}; verify plan.json --steps 1",
    RUN,
    f"{RUN}; reconcile plan.json run",
    f"{RUN} --profile 4:5; trace run --bottlenecks",
)  # fmt: skip
# Their values take minutes to make; the tests that make them anyway ask the schema: those of calibrate, bench and train.
ELSEWHERE = {
    "shardwise.validate.folds/1", "shardwise.validate.groups/1", "shardwise.bench-machine/1", "shardwise.batch_runs/1",
    "shardwise.batch_branches/1",
}  # fmt: skip
SEEN: set[str] = set()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("shardwise.train.probe.BUDGET_S", 0.0)
    monkeypatch.setattr("shardwise.bench.shapes.MEMORY_BYTES", {"cpu": (2**20,)})


@pytest.mark.parametrize("session", SESSIONS, ids=[session.rpartition(";")[2][:60].strip() for session in SESSIONS])
def test_a_payload_is_as_its_schema_says(
    session: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    *before, last = map(shlex.split, session.split(";"))
    for command in before:
        assert main(command) == 0
    capsys.readouterr()
    main([*last, "--json"])
    payload = json.loads(capsys.readouterr().out)
    SEEN.add(payload["schema"])
    assert payload["schema"] in json_schemas(last[0])
    require_valid(payload)


@pytest.mark.parametrize("key", ["model", "layout"])
def test_a_model_and_a_layout_have_one_shape(key: str) -> None:
    schemas = [schema for verb in PAYLOADS for schema in json_schemas(verb).values()]
    shapes = {tuple(shape) for schema in schemas for shape in shapes_of(key, schema)}
    assert len(shapes) == 1
    assert (
        {"name", "num_params", "num_layers"} <= {*shapes.pop()} if key == "model" else {"text", "tp"} <= {*shapes.pop()}
    )


def shapes_of(key: str, schema: dict[str, Any]) -> Iterator[list[str]]:
    """The keys of each object that a schema has under a key, however deep."""
    for part in (schema, *schema.get("$defs", {}).values()):
        if key in part.get("properties", {}):
            given = part["properties"][key]
            for choice in given.get("anyOf", [given]):
                if choice != {"type": "null"}:
                    yield list(schema["$defs"][choice["$ref"].rpartition("/")[2]]["properties"])


def test_every_schema_has_been_asked() -> None:
    """Behind the sessions above, in the process that runs them all."""
    named = {name for verb in PAYLOADS for name in json_schemas(verb)}
    commands = {session.rpartition(";")[2].split()[0] for session in SESSIONS}
    assert commands == set(PAYLOADS)
    if len(SEEN) >= len(SESSIONS) // 2:  # not where tests are shared among processes
        assert named - SEEN == {*ELSEWHERE, "shardwise.error/1"}


def test_every_verb_has_a_schema() -> None:
    assert verb_parsers().keys() == PAYLOADS.keys()


def test_an_error_is_as_its_schema_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "chips", "h900", "--json"]) == 2
    require_valid(json.loads(capsys.readouterr().err))


def test_a_schema_notices() -> None:
    validator = validators()["shardwise.error/1"]
    right = {"schema": "shardwise.error/1", "error": {"problems": ["a"], "exit_code": 2}}
    assert validator.is_valid(right)
    for wrong in (
        {**right, "more": 1}, {"schema": "shardwise.error/1"}, {**right, "schema": "shardwise.error/2"},
        {**right, "error": {"problems": "a", "exit_code": 2}}, {**right, "error": {"problems": [], "exit_code": 2, "x": 1}},
    ):  # fmt: skip
        assert not validator.is_valid(wrong)


def test_closing_a_schema_leaves_tables_open() -> None:
    assert closed({"type": "object", "additionalProperties": {"type": "number"}})["additionalProperties"] == {
        "type": "number"
    }
