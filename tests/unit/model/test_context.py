"""The longest sequence of a model: read from its config, refused in serving beyond it, and noted in training."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.model.huggingface.config import parse_config, read_max_context
from shardwise.present.command_line import main
from shardwise.serve import ServingLayout
from shardwise.values import InputError

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 2048,
}  # fmt: skip
LOAD = {"osl": 100, "concurrency": 4}


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 40960}, 40960),  # Qwen3
        ({"n_positions": 1024}, 1024),
        ({}, None),
        # DeepSeek-V3: 4096 tokens, and 40 times as many after scaling, which its number of positions says too
        ({"max_position_embeddings": 163840,
          "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}}, 163840),
        # Qwen's documentation of long inputs: YaRN with a factor of 4 over 32,768 tokens
        ({"max_position_embeddings": 40960,
          "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ({"max_position_embeddings": 131072,
          "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"model_type": "gemma3_text", "max_position_embeddings": 131072, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
         131072),
    ],
)  # fmt: skip
def test_the_context_of_a_config_has_the_factor_of_its_angles(config, context):
    assert read_max_context(config) == context


def test_configs_and_the_catalogue_state_the_context_and_equality_ignores_it():
    assert parse_config(LLAMA).max_context == 2048
    model = sw.load_model("llama-3-8b")
    assert (model.max_context, sw.load_model("palm-8b").max_context) == (8192, None)
    assert replace(model, max_context=None) == model


def test_requests_beyond_the_context_are_refused_with_the_length_the_limit_and_the_fix(capsys):
    arguments = ["serve", "estimate", "llama-3-8b", "h100:8", "--isl", "150000", "--osl", "100", "--concurrency", "4"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "requests of 150,100 tokens (in and out), but its context is 8,192" in error
    assert "--set model.max_context=150100 for a checkpoint that takes more" in error
    assert main([*arguments, "--set", "model.max_context=150100"]) == 0
    with pytest.raises(InputError, match="its context is 8,192"):
        sw.serve_plan("llama-3-8b", "h100:8", isl=8000, osl=193)
    assert sw.serve_estimate("llama-3-8b", "h100:8", isl=8092, **LOAD).memory.verdict == "fits"
    assert sw.serve_estimate("palm-8b", "h100:8", isl=150000, **LOAD).layout == ServingLayout(tp=8)  # not known


def test_launches_are_limited_by_their_flag_or_else_by_the_model():
    line = "vllm serve meta-llama/Meta-Llama-3-8B"
    with pytest.raises(
        InputError, match=r"its context is 8,192; at most that is required, or --max-model-len 150100 in"
    ):
        sw.serve_read(line, "h100:8", isl=150000, **LOAD)
    assert sw.serve_read(f"{line} --max-model-len 200000", "h100:8", isl=150000, **LOAD).estimate is not None


def test_exports_note_that_the_engine_refuses_longer_requests():
    plan = sw.serve_estimate("llama-3-8b", "h100:1", isl=20000, overrides=["model.max_context=32768"], **LOAD)
    deployment = sw.serve.ServingDeployment(problem=plan.problem, layout=plan.layout)
    warnings = sw.export_plan(deployment, "vllm").warnings
    assert any(
        "requests of up to 20,100 tokens are longer than the context of llama-3-8b, 8,192" in text for text in warnings
    )
    short = replace(plan.problem, workload=replace(plan.problem.workload, isl=2000))
    assert sw.export_plan(replace(deployment, problem=short), "vllm").warnings == ()


def test_trainings_on_longer_sequences_are_noted():
    job = {"global_batch_tokens": "1Mi"}
    long, short = (sw.plan("llama-3-8b", "h100:64", seq_len=tokens, **job) for tokens in ("16Ki", "8Ki"))
    note = "sequences of 16,384 tokens are longer than the context of llama-3-8b, 8,192: they extend it"
    assert note in long.estimate.notes
    assert not any("extend" in text for text in short.estimate.notes)
