"""nanotron: published launches, what its own code asks, how it deals out layers, and files that are no launch of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.interop.frameworks.nanotron import TARGET
from shardwise.interop.launches.export_launch import export
from shardwise.interop.launches.launch import Launch, Machines, cluster_machines
from shardwise.interop.launches.translate_launch import refusals, to_options
from shardwise.interop.read_launch import ParsedLaunch, parse_launch
from shardwise.layout.layers_per_stage import layers_by_products
from shardwise.search.plan import plan_layout
from shardwise.values.errors import InputError

# Launches of huggingface/nanotron, by its examples: sizes (hidden, MLP, heads, key-value heads, layers, words, tied), degrees
# (dp, pp, tp) and tokens (sequence, micro-batch, accumulation, steps).
PUBLISHED = {
    "examples/config_llama.yaml": ((4096, 11008, 32, 32, 32, 32000, False), (2, 1, 4), (8192, 1, 8, 5)),
    "examples/config_train_llama.yaml": ((768, 3072, 16, 16, 12, 50272, True), (4, 1, 2), (512, 16, 32, 200)),
    "examples/config_tiny_llama_bench.yaml": ((3072, 8192, 24, 8, 28, 128256, True), (1, 1, 8), (2048, 1, 1, 100)),
    "examples/doremi/configs/config_2.8b_llama.yaml": ((4096, 24576, 32, 16, 6, 49152, True), (8, 1, 2), (1024, 64, 1, 70000)),
    "examples/config_tiny_llama.yaml": ((16, 64, 4, 4, 2, 256, True), (2, 2, 2), (256, 2, 1, 15)),
}  # fmt: skip
TEXT = """\
general: {{project: debug, benchmark_csv_path: null}}
model:
  dtype: bfloat16
  init_method: {{std: 0.025}}
  model_config:
    {{is_llama_config: true, hidden_size: {0[0]}, intermediate_size: {0[1]}, num_attention_heads: {0[2]},
     num_key_value_heads: {0[3]}, num_hidden_layers: {0[4]}, vocab_size: {0[5]}, tie_word_embeddings: {0[6]}, hidden_act: silu,
     max_position_embeddings: 256, rms_norm_eps: 1.0e-05, rope_scaling: null}}
optimizer: {{zero_stage: 0, accumulate_grad_in_fp32: true, optimizer_factory: {{name: adamW}}}}
parallelism: {{dp: {1[0]}, pp: {1[1]}, tp: {1[2]}, pp_engine: 1f1b, tp_mode: reduce_scatter, tp_linear_async_communication: true}}
tokens: {{sequence_length: {2[0]}, micro_batch_size: {2[1]}, batch_accumulation_per_replica: {2[2]}, train_steps: {2[3]}}}
"""
GOOD = TEXT.format(*PUBLISHED["examples/config_llama.yaml"])
STARCODER = GOOD.replace(
    "is_llama_config: true", "is_starcoder2_config: true, grouped_query: true, num_kv_heads: 4"
).replace("num_key_value_heads: 32,", "")


def parse_text(text: str, devices: int = 8) -> ParsedLaunch:
    return parse_launch({"config.yaml": text}, Machines(num_devices=devices, devices_per_node=8), target="nanotron")


def launch(text: str, precision: str = "bf16_fp32_gradients", model: str = "llama-3-8b") -> Launch:
    layout = sw.Layout.parse(text)
    cluster = sw.load_cluster(f"h100:{layout.num_devices}")
    job = sw.Job(global_batch_tokens=layout.num_devices * 4 * 8192, seq_len=8192, precision=precision)
    return Launch(model=sw.load_model(model), job=job, layout=layout, machines=cluster_machines(cluster))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_launch_is_read_and_priced(name: str) -> None:
    sizes, degrees, tokens = PUBLISHED[name]
    devices = degrees[0] * degrees[1] * degrees[2]
    parsed = parse_text(TEXT.format(sizes, degrees, tokens), devices)
    model, job, layout = parsed.launch.model, parsed.launch.job, parsed.launch.layout
    assert (
        model.d_model,
        model.d_ff,
        model.num_heads,
        model.num_kv_heads,
        model.num_layers,
        model.vocab_size,
    ) == sizes[:-1]
    assert model.tied_embeddings is sizes[-1]
    assert (layout.dp, layout.pp, layout.tp, layout.sequence_parallel, layout.async_tp) == (*degrees, True, True)
    assert job.global_batch_tokens == tokens[0] * tokens[1] * tokens[2] * degrees[0]
    assert job.tokens == job.global_batch_tokens * tokens[3]
    assert parsed.unknown == ()
    cluster = sw.load_cluster(f"h100:{devices}", stack="nanotron")
    assert plan_layout(model, cluster, job, layout).estimate.step_time_s > 0


def test_the_7b_of_the_examples_is_llama_2() -> None:
    assert parse_text(GOOD.replace("1.0e-05", "1.0e-06")).launch.model.name == "llama-2-7b"


QWEN = GOOD.replace(
    "is_llama_config: true", "is_qwen2_config: true, moe_config: null, no_rope_layer: 4, rope_theta: 50000.0"
)


def test_configurations_of_the_main_branch_are_read() -> None:
    """SmolLM3's stages: Qwen2Config with a layer without positions after three with them; the base of angles is a float."""
    parsed = parse_text(QWEN.replace("dp: 2,", "dp: 2, recompute_layer: true,"))
    model = parsed.launch.model
    assert model.layer_units[:8] == ("block", "block", "block", "nope") * 2
    assert model.unit_architecture("nope").positions == "none"
    assert model.numerics.rotary.base == 50_000
    assert parsed.launch.layout.recompute == "full"
    assert parse_text(
        GOOD.replace("is_llama_config: true", "is_llama_config: true, rope_theta: 10000.0")
    ).launch.model.name


@pytest.mark.parametrize(
    ("model", "pp", "stages"),
    [
        ("llama-3-8b", 4, (9, 9, 8, 6)),
        ("llama-3-8b", 2, (18, 14)),
        ("llama-2-7b", 4, (9, 8, 8, 7)),
        ("llama-3-8b", 1, (32,)),
    ],
)
def test_layers_are_dealt_out_as_build_model_does(model: str, pp: int, stages: tuple[int, ...]) -> None:
    """The head of 128,256 words counts as 2.2 layers of Llama 3 8B: stages pass 34.2 / 4 layers after the ninth."""
    assert layers_by_products(sw.load_model(model), pp) == stages


def test_other_stages_are_refused_and_the_nearest_has_nanotrons() -> None:
    layout = sw.Layout.parse("tp=2 pp=2 fsdp=4 zero_stage=1 recompute=none")
    job = sw.Job(global_batch_tokens=2**20, seq_len=4096, precision="bf16_fp32_gradients")
    plan = plan_layout(sw.load_model("llama-3-8b"), sw.load_cluster("h100:16"), job, layout)
    with pytest.raises(InputError, match=r"layout\.stages is 16,16, .* there it is 18,14") as raised:
        export(plan, TARGET)
    assert "layers_per_stage=18,14" in raised.value.problems[-1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fsdp=2 tp=16 zero_stage=1", "does not divide the 8 key-value heads"),
        ("dp=2 fsdp=4 zero_stage=1", "ZeRO shards over all replicas"),
        ("dp=1 pp=8 layers_per_stage=5,5,4,5,4,5,4,0 micro_batch_seqs=8", "at least 7 micro-batches"),
        ("dp=8 micro_batch_seqs=3", "dp·fsdp·micro_batch_seqs = 24 does not divide"),
        ("fsdp=8 zero_stage=3", "no ZeRO-3"),
        ("dp=8 recompute=full", "recompute=none is what it runs"),
        ("fsdp=4 cp=2 zero_stage=1", "has no cp"),
        ("dp=8 offload=optimizer", "offload=none is what it runs"),
    ],
)
def test_layouts_that_nanotron_lacks_are_refused(text: str, words: str) -> None:
    assert any(words in reason for reason in refusals(launch(text), TARGET))


def test_fields_without_an_option_are_refused() -> None:
    assert any("no precision bf16" in text for text in refusals(launch("dp=8", "bf16"), TARGET))
    assert any("model.num_experts" in text for text in refusals(launch("dp=8", model="mixtral-8x7b"), TARGET))
    usual = launch("dp=8")
    for name in ("lion", "adamw_8bit"):
        unsupported = replace(usual, job=replace(usual.job, optimizer=name))
        assert any("job.optimizer" in text for text in refusals(unsupported, TARGET))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_any_stage_of_zero_is_the_first(stage: int) -> None:
    layout = parse_text(GOOD.replace("zero_stage: 0", f"zero_stage: {stage}")).launch.layout
    assert (layout.dp, layout.fsdp, layout.zero_stage) == (1, 2, 1)


def test_starcoder_is_read_and_written() -> None:
    text = STARCODER.replace(
        "rope_scaling: null", "sliding_window_size: 128, global_attn_layers: [3, 7, 11, 15, 19, 23, 27, 31]"
    )
    for name in ("hidden_act: silu,", "tie_word_embeddings: False,", "rms_norm_eps: 1.0e-05,"):
        text = text.replace(name, "")
    parsed_launch = parse_text(text).launch
    model = parsed_launch.model
    assert (model.mlp, model.norm, model.bias, model.num_kv_heads) == (
        "gelu",
        "layer",
        ("qkv", "attention_out", "mlp"),
        4,
    )
    assert (model.sliding_window, model.global_every, model.tied_embeddings) == (128, 4, True)
    again = parse_launch(
        TARGET.write(to_options(TARGET, parsed_launch), parsed_launch), parsed_launch.machines, target="nanotron"
    )
    assert again.launch.fields() == parsed_launch.fields()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "options by name"),
        ("- 1\n- 2\n", "options by name"),
        ("a: [1, 2", "is not YAML: line"),
        ("a: !!python/object/apply:os.system ['true']", "YAML: "),
        ("a: &a [*a]\n", "is not YAML: line 1: found unconstructable recursive node"),
        ("\n".join(["a0: &a0 [1,1,1,1,1,1,1,1,1]", *(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9))]),
         "more than 100,000 values"),
        ("a" * 200_001, "at most 200,000"),
        ("{" * 5000, "more than 2,000 brackets"),
        (GOOD + "tokens: {}\n", "tokens is given twice"),
        (GOOD.replace("dp: 2", "dp: two"), "parallelism.dp: found 'two'; a value of type int is required"),
        (GOOD.replace("dp: 2", "dp: 0"), "parallelism.dp: found 0; a whole number of at least 1"),
        (GOOD.replace("pp_engine: 1f1b", "pp_engine: Foo"), "one of afab, 1f1b is required"),
        (GOOD.replace("sequence_length: 8192,", ""), "tokens.sequence_length: found nothing"),
        (GOOD.replace("is_llama_config: true", "is_llama_config: false"), "none of is_llama_config"),
        (GOOD.replace("hidden_act: silu", "hidden_act: mish"), "hidden_act: found 'mish'; one of silu"),
        (GOOD.replace("zero_stage: 0", "zero_stage: 7"), "zero_stage: found 7; 0 or 1"),
        (GOOD.replace("hidden_size: 4096", "hidden_size: 4097"), "a multiple of num_attention_heads = 32"),
        (GOOD.replace("accumulate_grad_in_fp32: true", "accumulate_grad_in_fp32: false"), "bfloat16 with true"),
        (GOOD.replace("dp: 2,", "dp: 2, expert_parallel_size: 4,"), "no model of nanotron 0.4 has experts"),
        (STARCODER.replace("rope_scaling: null", "sliding_window_size: 8, global_attn_layers: [1, 2]"), "every so many-th layer"),
    ],
)  # fmt: skip
def test_invalid_configurations_are_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words.replace("(", r"\(")) as raised:
        parse_text(text)
    assert all(len(problem) < 500 for problem in raised.value.problems)


def test_options_that_the_release_lacks_are_named() -> None:
    parsed = parse_text(
        GOOD.replace("rope_scaling: null", "rope_scaling: {factor: 2.0}, rotary_scaling: {factor: 2.0}")
    )
    assert "model.model_config.rotary_scaling.factor" in parsed.unknown
    assert "model.model_config.rope_scaling" in parsed.unread  # an option of the release, with sections of its own


def test_a_launch_is_one_file() -> None:
    with pytest.raises(InputError, match="found 0 YAML files"):
        parse_launch({"launch.sh": GOOD}, Machines(num_devices=8, devices_per_node=8), target="nanotron")
