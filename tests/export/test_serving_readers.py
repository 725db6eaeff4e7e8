"""Command lines, scripts, manifests and files of options of serving engines, read field by field."""

from __future__ import annotations

import csv

import pytest

from shardwise.interop.serving.checkpoints import identify_checkpoint
from shardwise.interop.serving.engines import ENGINES
from shardwise.interop.serving.read_serving import COMMAND_LINE, read_serving
from shardwise.interop.text_formats.option_tables import read_option_file
from shardwise.present.command_line import main
from shardwise.serve import BatchLimits
from shardwise.values import InputError

NUM_OPTIONS = {"vllm": 321, "sglang": 531, "trtllm": 151}


def read(text, name=COMMAND_LINE, **more):
    return read_serving({name: text}, **more)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_option_stands_in_one_of_three_lists(engine):
    rows = list(csv.DictReader(read_option_file(f"{engine}.csv").splitlines()))
    assert len({row["name"] for row in rows}) == len(rows) == NUM_OPTIONS[engine]
    assert {row["effect"] for row in rows} == {"priced", "none", "model", "memory", "time"}
    flags = [flag for row in rows for flag in (f"--{row['name']}", *filter(None, row["aliases"].split("|")))]
    assert len(flags) == len(set(flags)) or engine == "trtllm"
    fields = {option for options in ENGINES[engine].field_options.values() for option in options}
    priced = {row["name"] for row in rows if row["effect"] == "priced"}
    assert fields <= priced | {"enable-dp-attention"}


@pytest.mark.parametrize(
    ("line", "layout", "limits", "length"),
    [
        ("vllm serve Qwen/Qwen3-32B --tensor-parallel-size 4 --max-num-seqs 256", "tp=4", {"max_num_seqs": 256}, None),
        ("vllm serve Qwen/Qwen3-32B -tp=2 -dp 4 --max_model_len 8k", "tp=2 replicas=4", {}, 8000),
        ("vllm serve Qwen/Qwen3-32B -tp 2 --tensor-parallel-size 8 --max-model-len=8K", "tp=8", {}, 8192),
        ("VLLM_LOGGING_LEVEL=INFO vllm serve --model Qwen/Qwen3-32B --gpu-memory-util 0.95", "tp=1", {"memory_fraction": 0.95},
         None),
        ("python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-32B --no-enable-chunked-prefill", "tp=1",
         {"chunked_prefill": False}, None),
        ("vllm serve deepseek-ai/DeepSeek-V3 -dp 8 --enable-expert-parallel -sc.method mtp -sc.num_speculative_tokens 2 -O3",
         "attention_dp=8 ep=8", {"mtp_tokens": 2}, None),
        ("vllm serve deepseek-ai/DeepSeek-V3 -tp 8 --speculative-config '{\"method\": \"deepseek_mtp\", "
         '"num_speculative_tokens": 1}\'', "tp=8", {"mtp_tokens": 1}, None),
        ("docker run --gpus '\"device=0,1\"' -e HF_TOKEN=x -p 80:80 vllm/vllm-openai:latest --model Qwen/Qwen3-32B -tp 2",
         "tp=2", {}, None),
        ("docker run --rm --ipc=host lmsysorg/sglang:latest python3 -m sglang.launch_server --model Qwen/Qwen3-32B --tp 2",
         "tp=2", {}, None),
        ("sglang serve deepseek-ai/DeepSeek-V3 --tp 16 --dp 8 --enable-dp-attention --ep 16 --max-running-requests 128 "
         "--chunked-prefill-size 65536 --nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.1:5000", "tp=2 attention_dp=8 ep=16",
         {"max_num_seqs": 16, "max_batched_tokens": 8192}, None),
        ("python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --attn-dp-size 8 --chunked-prefill-size -1 "
         "--max-prefill-tokens 8Ki --speculative-algorithm NEXTN --speculative-num-steps 1 --context-length 32Ki",
         "attention_dp=8", {"chunked_prefill": False, "max_batched_tokens": 8192, "mtp_tokens": 1}, 32768),
        ("python -m sglang.launch_server --model-path Qwen/Qwen3-32B --tp 2 --dp 4 --mem-fraction-static 0.9", "tp=2 replicas=4",
         {"memory_fraction": 0.9}, None),
        ("vllm serve deepseek-ai/DeepSeek-V3 -dp 16 -ep --all2all-backend pplx --enable-eplb "
         "--eplb-config.num_redundant_experts 32",
         "attention_dp=16 ep=16 dispatch=all_to_all redundant_experts=32", {}, None),
        ("vllm serve deepseek-ai/DeepSeek-V3 -tp 16 -ep --all2all-backend deepep_high_throughput", "tp=16 ep=16", {}, None),
        ("sglang serve deepseek-ai/DeepSeek-V3 --tp 16 --attn-dp-size 4 --moe-a2a-backend mooncake --ep-num-redundant-experts 32",
         "tp=4 attention_dp=4 ep=16 dispatch=all_to_all redundant_experts=32", {}, None),
        ("mpirun -n 8 trtllm-llmapi-launch trtllm-serve serve deepseek-ai/DeepSeek-V3 --tp_size 8 --ep_size 4 --max_batch_size "
         "64 --max_num_tokens 4096 --kv_cache_free_gpu_memory_fraction 0.85 --max_seq_len 2048", "tp=8 ep=4 expert_tp=2",
         {"max_num_seqs": 64, "max_batched_tokens": 4096, "memory_fraction": 0.85, "chunked_prefill": False}, 2048),
    ],
)  # fmt: skip
def test_command_lines_are_read(line, layout, limits, length):
    launch = read(line).launch
    assert str(launch.layout) == layout
    assert launch.batch_limits == BatchLimits(**limits)
    assert launch.max_model_len == length


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            "vllm serve Qwen/Qwen3-32B --tensor-paralel-size 4",
            "no option of vLLM 0.32.0 .did you mean '--tensor-parallel-size'",
        ),
        ("vllm serve Qwen/Qwen3-32B --max-num 4", "--max-num: stands for --max-num-active-seqs"),
        ("vllm serve Qwen/Qwen3-32B -tp four", "tensor-parallel-size: found 'four'; a value of type int"),
        ("vllm serve Qwen/Qwen3-32B -tp", "-tp: found no value"),
        ("vllm serve Qwen/Qwen3-32B --enforce-eager=true", "found the value 'true'; the flag alone"),
        ("vllm serve Qwen/Qwen3-32B extra", "found the words 'extra' that belong to no option"),
        ("vllm serve Qwen/Qwen3-32B --dtype float8", "dtype: found 'float8'"),
        (
            "vllm serve Qwen/Qwen3-32B -sc '{method: mtp}'",
            "speculative-config: found '{method: mtp}'; JSON is required",
        ),
        ("vllm serve Qwen/Qwen3-32B --port <PORT>", "port: found '<PORT>'; a value of type int is required"),
        ("vllm serve Qwen/Qwen3-32B -tp $GPUS", "found '\\$GPUS', a variable that nothing sets here"),
        ("vllm serve -tp 4", "no checkpoint is named"),
        ("vllm serve Qwen/Qwen3-32B --config serve.yaml", "'serve.yaml', which is not read; give the file"),
        ("vllm bench serve --model Qwen/Qwen3-32B", "no command starts an engine"),
        ("sglang serve Qwen/Qwen3-32B --tp_size 4", "--tp_size: no option of SGLang 0.5.23 .did you mean '--tp-size'"),
        ("sglang serve Qwen/Qwen3-32B --tp 4 --attn-dp-size 3", "a multiple of attn-dp-size \\* attn-cp-size = 3"),
        (
            "sglang serve Qwen/Qwen3-32B --mem-fraction-static 1.5",
            "mem-fraction-static: found '1.5'; more than 0 and at most 1",
        ),
        ("trtllm-serve Qwen/Qwen3-32B --tp 4", "--tp: no option of TensorRT-LLM"),
        ("vllm serve Qwen/Qwen3-32B\nvllm serve Qwen/Qwen3-8B", "2 commands start an engine"),
    ],
)
def test_values_that_the_engine_refuses_are_refused(line, problem):
    with pytest.raises(InputError, match=problem):
        read(line)


def test_unpriced_options_that_matter_are_listed():
    reading = read(
        "NCCL_DEBUG=INFO VLLM_ATTENTION_BACKEND=FLASHINFER VLLM_NEW_THING=1 vllm serve Qwen/Qwen3-32B --enforce-eager --seed 3 "
        "--cpu-offload-gb 10 --attention-backend FLASHINFER --all2all-backend allgather_reducescatter --block-size 16"
    )
    assert reading.not_priced == {
        "enforce-eager": "memory", "cpu-offload-gb": "memory", "attention-backend": "time", "VLLM_ATTENTION_BACKEND": "time",
        "VLLM_NEW_THING": "time",
    }  # fmt: skip
    assert reading.unread == ("seed", "all2all-backend", "block-size")
    assert not reading.memory_is_known
    assert any("VLLM_NEW_THING: not known here" in note for note in reading.notes)
    assert read("vllm serve Qwen/Qwen3-32B --attention-backend FLASHINFER").memory_is_known
    assert not read("vllm serve Qwen/Qwen3-32B --hf-overrides '{\"num_hidden_layers\": 2}'").model_is_known


@pytest.mark.parametrize(
    ("line", "option", "effect"),
    [
        ('vllm serve Qwen/Qwen3-32B -sc \'{"model": "a/b", "method": "eagle3", "num_speculative_tokens": 3}\'',
         "speculative-config", "memory"),
        ("vllm serve Qwen/Qwen3-32B --quantization quark", "quantization", "memory"),
        ("vllm serve Qwen/Qwen3-32B --kv-cache-dtype nvfp4", "kv-cache-dtype", "memory"),
        ("vllm serve Qwen/Qwen3-32B --dtype float32", "dtype", "memory"),
        ("vllm serve Qwen/Qwen3-32B --max-model-len auto", "max-model-len", "memory"),
        ("vllm serve Qwen/Qwen3-30B-A3B -pcp 2", "prefill-context-parallel-size", "time"),
        ("sglang serve Qwen/Qwen3-32B --speculative-algorithm EAGLE3 --speculative-draft-model-path a/b", "speculative-algorithm",
         "memory"),
        ("trtllm-serve Qwen/Qwen3-32B --cp_size 2", "context_parallel_size", "memory"),
    ],
)  # fmt: skip
def test_unpriced_values_of_priced_options_are_listed(line, option, effect):
    reading = read(line)
    assert reading.not_priced[option] == effect
    has_drafter = option.startswith("speculative")
    assert any("latencies are those without drafted tokens" in note for note in reading.notes) == has_drafter


def test_scripts_set_variables_and_manifests_count_replicas():
    script = """#!/bin/bash
export MODEL=Qwen/Qwen3-32B
TP=${TP:-4}
ARGS=(--max-num-seqs 64)
nohup vllm serve "$MODEL" --tensor-parallel-size $TP "${ARGS[@]}" > log.txt 2>&1 &
"""
    launch = read(script, "start.sh").launch
    assert (str(launch.layout), launch.batch_limits.max_num_seqs, launch.checkpoint) == ("tp=4", 64, "Qwen/Qwen3-32B")
    manifest = """apiVersion: apps/v1
kind: Deployment
metadata: {name: chat}
spec:
  replicas: 3
  template:
    spec:
      containers:
      - name: sidecar
        image: nginx
      - name: chat
        image: vllm/vllm-openai:v0.11.0
        args: ["--model", "$(MODEL)", "--tensor-parallel-size", "2"]
        env: [{name: MODEL, value: Qwen/Qwen3-32B}]
        resources: {limits: {nvidia.com/gpu: "2"}}
"""
    reading = read(manifest, "chat.yaml")
    assert str(reading.launch.layout) == "tp=2 replicas=3"
    assert (reading.devices_per_node, reading.num_nodes) == (2, 1)
    group = """apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {name: deep}
spec:
  replicas: 2
  leaderWorkerTemplate:
    size: 2
    leaderTemplate:
      spec:
        containers:
        - image: vllm/vllm-openai:latest
          command: [sh, -c, "bash ray.sh leader --ray_cluster_size=$(LWS_GROUP_SIZE); python3 -m
            vllm.entrypoints.openai.api_server --port 8080 --model deepseek-ai/DeepSeek-V3 --tensor-parallel-size 8
            --pipeline_parallel_size $(LWS_GROUP_SIZE)"]
    workerTemplate:
      spec: {containers: [{image: "vllm/vllm-openai:latest", command: [sh, -c, "bash ray.sh worker"]}]}
"""
    reading = read(group, "deep.yaml")
    assert (str(reading.launch.layout), reading.num_nodes) == ("tp=8 pp=2 replicas=2", 2)


def test_files_of_options_are_read():
    config = "tensor_parallel_size: 2\nmax-num-seqs: 32\nenable-chunked-prefill: false\nspeculative-config: {method: ngram}\n"
    line = "vllm serve Qwen/Qwen3-32B --config /etc/serve.yaml --max-num-seqs 64"
    reading = read_serving({COMMAND_LINE: line, "serve.yaml": config})
    assert reading.launch.batch_limits == BatchLimits(
        max_num_seqs=64, chunked_prefill=False
    )  # the command line counts first
    assert (reading.launch.layout.tp, reading.not_priced) == (2, {"speculative-config": "memory"})
    yaml = "moe_config: {backend: DEEPGEMM}\nkv_cache_config: {dtype: fp8, free_gpu_memory_fraction: 0.8}\nmax_batch_size: 16\n"
    line = "trtllm-serve deepseek-ai/DeepSeek-V3 --max_batch_size 64 --tp_size 8 --extra_llm_api_options extra.yaml"
    reading = read_serving({COMMAND_LINE: line, "extra.yaml": yaml + "enable_attention_dp: true\n"})
    assert str(reading.launch.layout) == "attention_dp=8"
    assert reading.launch.batch_limits == BatchLimits(max_num_seqs=16, memory_fraction=0.8, chunked_prefill=False)
    assert (reading.launch.formats.cache, reading.not_priced) == ("fp8", {"moe_config.backend": "time"})
    by_config = read(yaml, "config.yaml", checkpoint_default="deepseek-ai/DeepSeek-V3")
    assert (by_config.engine.name, by_config.launch.batch_limits.max_num_seqs) == ("trtllm", 16)
    with pytest.raises(InputError, match=r"kv_cache_config\.dtpe: no option of TensorRT-LLM"):
        read("kv_cache_config: {dtpe: fp8}\nmax_batch_size: 2\n", "config.yaml", checkpoint_default="Qwen/Qwen3-32B")
    with pytest.raises(InputError, match="none of the keys is an option"):
        read("services: {}\n", "compose.yaml")


@pytest.mark.parametrize(
    ("name", "model", "formats"),
    [
        ("Qwen/Qwen3-32B", "qwen3-32b", "bf16"),
        ("/models/Qwen3-32B-FP8", "qwen3-32b", "fp8"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "qwen3-235b-a22b", "fp8_block"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "llama-3.1-8b", "int8"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-v3", "fp8_block"),
        ("nvidia/DeepSeek-R1-FP4", "deepseek-v3", "nvfp4, attention bf16"),
        ("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2", "fp8_block"),
        ("openai/gpt-oss-120b", "gpt-oss-120b", "bf16, experts mxfp4"),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int4", "qwen2.5-72b", "int4"),
        ("someone/unheard-of-9b", None, "bf16"),
    ],
)
def test_checkpoint_names_map_to_models(name, model, formats):
    checkpoint = identify_checkpoint(name)
    assert (checkpoint.architecture and checkpoint.architecture.name) == model
    assert str(checkpoint.formats) == formats


def test_files_of_a_folder_that_are_no_part_of_the_launch(tmp_path, capsys):
    """Results and logs beside a script are left out with the reason, whatever they hold."""
    contents = {
        "large.yaml": b"- {a: 1}\n" * 500_000, "binary.yaml": b"\xff\xfe\x00", "results.yaml": b"runs: [1, }\n",
        "manifest.yaml": b"apiVersion: v1\nkind: ConfigMap\ndata: {a: [1, }\n",
        "long.yaml": b"apiVersion: v1\nkind: List\nitems:\n" + b"- {a: 1}\n" * 30_000,
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert main(["serve", "read", str(tmp_path)]) == 2
    assert "results.yaml is not YAML: line 1" in capsys.readouterr().err
    (tmp_path / "start.sh").write_text("vllm serve Qwen/Qwen3-32B -tp 4\n", encoding="utf-8")
    assert main(["serve", "read", str(tmp_path)]) == 0
    report = capsys.readouterr().out
    assert "with vLLM 0.32.0: tp=4" in report
    reasons = [" ".join(line.split()) for line in report.splitlines() if "left out of the folder: " in line]
    assert len(reasons) == len(contents) - 1  # one file of options that no command names is not looked at
    for words in ("large.yaml: it has more than 4,000,000 bytes", "binary.yaml is not text: byte 0xff",
                  "manifest.yaml is not YAML: line 3", "long.yaml: 270,033 characters"):  # fmt: skip
        assert sum(words in reason for reason in reasons) == 1
    (tmp_path / "start.sh").write_text("vllm serve Qwen/Qwen3-32B --config large.yaml\n", encoding="utf-8")
    assert main(["serve", "read", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "found 'large.yaml', which is not read" in error
    assert "large.yaml: it has more than" in error


def test_of_several_files_of_options_the_one_of_an_engine_is_read(tmp_path):
    files = {"a.yaml": "color: red\n", "vllm.yaml": "model: Qwen/Qwen3-32B\ntensor-parallel-size: 2\n"}
    assert str(read_serving(files).launch.layout) == "tp=2"
