"""Malformed input of every kind: the exit code is 0, 2 or 3, errors are sentences, and no exception gets out."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import signal
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.model.huggingface.family_rules import family_tables
from shardwise.present.command_line import main

HANG_S = 120  # a command that has not ended by then hangs: no input may make it work without end
ESTIMATE = ["estimate", "llama-3.2-1b", "h100:8", "--batch-tokens", "64Ki", "--seq-len", "4096"]


FUZZED = settings(database=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@contextlib.contextmanager
def hang_guard(arguments: list[str]) -> Iterator[None]:
    """Fail where a command hangs, rather than hang with it."""

    def hung(*_: object) -> None:
        raise AssertionError(f"hangs: {arguments}")

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(arguments: list[str]) -> int:
    """Run one command; what it prints and returns is what a user may meet."""
    out, err = io.StringIO(), io.StringIO()
    with hang_guard(arguments), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as stopped:  # argparse: usage on stderr
            code = int(stopped.code or 0)
    assert code in (0, 2, 3), arguments
    if code:
        assert out.getvalue() == ""
        assert err.getvalue().startswith(("error: ", "usage: "))
        assert "Traceback" not in err.getvalue()
    else:
        assert err.getvalue() == ""
        assert out.getvalue().strip()
    return code


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=24)
NUMBERS = st.sampled_from([
    "0", "1", "-1", "2.5", "8", "64", "1e3", "4Mi", "8Ki", "NaN", "inf", "1e400", "9" * 30, "1" * 5000, "0x10", "", " ",
    "٣", "1_0",
])  # fmt: skip
VALUES = st.one_of(
    st.none(), st.booleans(), st.sampled_from([0, 1, -1, 3, 7, 8, 10**12, 10**30, -(10**30)]), st.integers(),
    st.floats(), st.sampled_from([1e-300, 1e300]), WORDS, st.lists(st.integers(), max_size=3),
    st.dictionaries(WORDS, st.integers(), max_size=2), st.sampled_from(["bf16", "full", "1f1b", "torus"]),
)  # fmt: skip


@FUZZED
@given(
    model=st.one_of(st.sampled_from(["llama-3.2-1b", "LLAMA-3.2-1B ", "none.json", "/", ".", "a\0b.json"]), WORDS),
    cluster=st.one_of(
        st.sampled_from(["h100:8", "tpu-v5e:4x4", "h100:-8", "h100:0", "tpu-v5p:4x4", "tpu-v5e:3x", "local:2", "x.toml"]),
        st.builds(lambda chip, size: f"{chip}:{size}", st.sampled_from(["h100", "tpu-v5p", "tpu-v5e", "local"]), NUMBERS),
        st.builds(lambda a, b: f"tpu-v5e:{a}x{b}", st.integers(-2, 40), st.integers(-2, 40)),
        WORDS,
    ),
)  # fmt: skip
def test_names_of_models_and_clusters_never_raise(model: str, cluster: str) -> None:
    check(["estimate", "--batch-tokens", "64Ki", "--seq-len", "4096", "--layout", "fsdp=8", "--", model, cluster])


@FUZZED
@given(
    batch=st.one_of(NUMBERS, WORDS), seq_len=st.one_of(NUMBERS, st.sampled_from(["4096", "1024"])),
    tokens=st.one_of(st.none(), NUMBERS, WORDS),
    precision=st.one_of(st.sampled_from(["bf16", "fp32", "mxfp8", "fp8_deepseek_v3"]), WORDS),
    overlap=st.one_of(st.sampled_from(["sum", "max"]), WORDS),
)  # fmt: skip
def test_jobs_never_raise(batch: str, seq_len: str, tokens: str | None, precision: str, overlap: str) -> None:
    words = [f"--batch-tokens={batch}", f"--seq-len={seq_len}", f"--precision={precision}", f"--overlap={overlap}"]
    words += [] if tokens is None else [f"--tokens={tokens}"]
    check(["estimate", "llama-3.2-1b", "h100:8", "--layout=fsdp=8", *words])


KEYS = (
    "dp", "fsdp", "tp", "cp", "pp", "ep", "num_virtual_stages", "zero_stage", "sequence_parallel", "cp_variant",
    "micro_batch_seqs", "recompute", "recompute_layers", "offload",
    "schedule", "placement", "num_micro_batches", "layers_per_stage", "colour", "",
)  # fmt: skip
TEXTS = st.one_of(
    NUMBERS, WORDS,
    st.sampled_from(["optimizer", "both"]),
    st.sampled_from(["true", "full", "1f1b", "afab", "tp,cp,fsdp,dp,pp@0,1", "tp@0", "tp,cp@9,9", "[16]", "8,8", "@"]),
)  # fmt: skip
ASSIGNED = st.builds(lambda key, value: f"{key}={value}", st.sampled_from(KEYS), TEXTS)


@FUZZED
@given(words=st.lists(st.one_of(ASSIGNED, st.sampled_from(["fsdp=8", "tp=8", "pp=8", "dp=2"]), WORDS), max_size=5))
def test_layouts_never_raise(words: list[str]) -> None:
    check([*ESTIMATE, f"--layout={' '.join(words)}"])


SETTABLE = (
    "model.num_layers", "model.d_model", "model.tied_embeddings", "model.bias", "model.mlp", "job.seq_len", "job.tokens",
    "chip.memory_bytes", "chip.matmul_fraction", "chip.sources", "chip.name", "chip.colour", "chip.price_usd_per_hour",
    "chip.price_date", "run.pue", "run.restart_s", "run.failures_per_device_hour", "run.checkpoint_interval_s",
    "room.key", "model",
)  # fmt: skip


@FUZZED
@given(settings_=st.lists(st.builds(lambda k, v: f"{k}={v}", st.sampled_from(SETTABLE), TEXTS), max_size=3))
def test_settings_never_raise(settings_: list[str]) -> None:
    check([*ESTIMATE, "--tokens=1T", "--layout=fsdp=8", *(f"--set={setting}" for setting in settings_)])


@FUZZED
@given(
    pins=st.lists(st.one_of(ASSIGNED, st.sampled_from(["tp=8", "pp=2", "recompute=full"])), max_size=2),
    maxima=st.lists(st.one_of(ASSIGNED, st.sampled_from(["tp=4", "pp=2", "zero_stage=1"])), max_size=2),
)
def test_pins_never_raise(pins: list[str], maxima: list[str]) -> None:
    check(["plan", *ESTIMATE[1:], *(f"--pin={pin}" for pin in pins), *(f"--max={maximum}" for maximum in maxima)])


DEADLINES = st.sampled_from(["30d", "1h", "2w", "45min", "1e300d", "1e-300s", "0d", "-1d", "5m", "d", ""])
BUDGETS = st.sampled_from(["2M", "500k", "$1", "1e308", "1e-300", "7 USD", "0", "-2M", "2 EUR", "", "USD"])


@FUZZED
@given(
    deadline=st.one_of(st.none(), DEADLINES, WORDS), budget=st.one_of(st.none(), BUDGETS, WORDS),
    tokens=st.sampled_from([["--tokens=1T"], ["--tokens=1T"], []]),
)  # fmt: skip
def test_limits_never_raise(deadline: str | None, budget: str | None, tokens: list[str]) -> None:
    limit_flags = [] if deadline is None else [f"--deadline={deadline}"]
    limit_flags += [] if budget is None else [f"--budget={budget}", "--set=chip.price_usd_per_hour=2"]
    check(["plan", *ESTIMATE[1:], *tokens, *limit_flags])


CONFIG = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096, "tie_word_embeddings": True, "attention_bias": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
FINE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
LATENT = {
    **FINE,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
OWN: dict[str, dict[str, Any]] = {  # what a family's config needs beside the sizes that all have
    "biogpt": {"max_position_embeddings": 512},
    "ctrl": {"dff": 1024},
    "mllama_text_model": {"cross_attention_layers": [1], "tie_word_embeddings": False},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128},
    "olmoe": EXPERTS,
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 256},
    "qwen2_moe": {**EXPERTS, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512, "qkv_bias": True},
    "opt": {
        "activation_function": "relu",
        "max_position_embeddings": 512,
        "word_embed_proj_dim": 512,
        "enable_bias": True,
    },
    "falcon": {
        "new_decoder_architecture": True,
        "num_kv_heads": 4,
        "parallel_attn": True,
        "num_ln_in_parallel_attn": 2,
    },
    "mpt": {"attn_config": {"alibi": True}, "no_bias": True, "expansion_ratio": 4},
    "glm4_moe": {**FINE, "use_qk_norm": True},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "kimi_k2": LATENT,
    "gpt_neox": {"use_parallel_residual": True},
    "git": {"max_position_embeddings": 1024},
    "moshi": {"ffn_dim": 1536, "tie_word_embeddings": False},
}
OWN_KEYS = {key for config in OWN.values() for key in config} | {
    "mlp_only_layers", "decoder_sparse_step", "multi_query", "alibi",
}  # fmt: skip
CHANGED = st.dictionaries(
    st.one_of(
        st.sampled_from([*CONFIG, "sliding_window", "layer_types", "sliding_window_pattern", "text_config", "n_positions"]), WORDS
    ),
    VALUES, max_size=3,
)  # fmt: skip
# Nemotron-NAS lists its layers one by one.
KIND_NAMES = sorted(
    {
        kind
        for kind, table in family_tables().items()
        if not table.keys() & {"experts", "latent", "like", "layer_types", "recurrence"} and kind != "nemotron-nas"
    }
    | {*OWN}
)
KINDS = st.sampled_from(KIND_NAMES)


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_configs_before_mutation_are_accepted(place: Path, kind: str) -> None:
    file = place / "config.json"
    file.write_text(json.dumps({**CONFIG, **OWN.get(kind, {}), "model_type": kind}), encoding="utf-8")
    assert check(["estimate", str(file), *ESTIMATE[2:], "--seq-len=512", "--layout=fsdp=8"]) == 0


@FUZZED
@given(changed=CHANGED, kind=KINDS, dropped=st.lists(st.sampled_from(list(CONFIG)), max_size=1))
def test_configs_never_raise(place: Path, changed: dict[str, Any], kind: str, dropped: list[str]) -> None:
    whole = {**CONFIG, **OWN.get(kind, {}), "model_type": kind, **changed}
    config = {key: value for key, value in whole.items() if key not in dropped}
    file = place / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    check(["estimate", str(file), *ESTIMATE[2:], "--seq-len=512", "--layout=fsdp=8"])


@FUZZED
@given(
    kind=st.sampled_from(list(OWN)),
    changed=st.dictionaries(st.sampled_from(sorted(OWN_KEYS)), VALUES, min_size=1),
)
def test_configs_of_one_family_never_raise(place: Path, kind: str, changed: dict[str, Any]) -> None:
    file = place / "config.json"
    file.write_text(json.dumps({**CONFIG, **OWN[kind], "model_type": kind, **changed}), encoding="utf-8")
    check(["estimate", str(file), *ESTIMATE[2:], "--seq-len=512", "--layout=fsdp=8"])


@FUZZED
@given(
    text=st.one_of(
        WORDS,
        st.sampled_from(["[]", "null", "1", '"a"', "{", "[" * 100_000, "1" * 5000, '{"schema": "shardwise.plan/1"}']),
    ),
    verb=st.sampled_from(["estimate", "explain"]),
)
def test_configs_that_are_no_objects_never_raise(place: Path, text: str, verb: str) -> None:
    file = place / "any.json"
    file.write_text(text, encoding="utf-8")
    assert check([verb, str(file), *([*ESTIMATE[2:], "--layout=fsdp=8"] if verb == "estimate" else [])]) == 2


@lru_cache(maxsize=1)
def valid_plan() -> dict[str, Any]:
    """The payload of a small plan with a pipeline, a placement, runners-up and rules."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["plan", *ESTIMATE[1:], "--tokens=1T", "--json"]) == 0
    payload: dict[str, Any] = json.loads(out.getvalue())
    payload["alternatives"] = payload["alternatives"][:2]
    return payload


def paths(value: Any, start: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a payload."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [start, *(path for key, part in inner for path in paths(part, (*start, key)))]


def mutate(payload: dict[str, Any], path: tuple[Any, ...], how: str, value: Any) -> Any:
    """The payload with one place replaced, removed, or given a neighbour that nobody knows."""
    if not path:
        return value
    payload = copy.deepcopy(payload)
    holder: Any = payload
    for key in path[:-1]:
        holder = holder[key]
    if how == "replace":
        holder[path[-1]] = value
    elif how == "remove":
        del holder[path[-1]]
    elif isinstance(holder, dict):
        holder["unknown"] = value
    return payload


def test_the_plan_before_mutation_is_accepted(place: Path) -> None:
    file = place / "valid.json"
    file.write_text(json.dumps(valid_plan()), encoding="utf-8")
    assert check(["explain", str(file)]) == 0


@FUZZED
@given(data=st.data(), how=st.sampled_from(["replace", "replace", "replace", "remove", "add"]), value=VALUES)
def test_plan_files_never_raise(place: Path, data: st.DataObject, how: str, value: Any) -> None:
    payload = valid_plan()
    room = data.draw(st.sampled_from(list(payload)))
    path = data.draw(st.sampled_from([(room, *path) for path in paths(payload[room])]))
    path = path[: data.draw(st.integers(0, len(path)))] if data.draw(st.booleans()) else path
    file = place / "plan.json"
    file.write_text(json.dumps(mutate(payload, path, how, value)), encoding="utf-8")
    check(["explain", str(file)])
