"""Memory of serving against start-up reports of vLLM, and rules of other engines."""

import dataclasses

import pytest

import shardwise as sw
from shardwise.model.omitted_parts import OmittedPart
from shardwise.present.command_line import main
from shardwise.serve import BatchLimits, ServingFormats, ServingLayout, ServingProblem, Workload, estimate_serving

GIB = 2.0**30
# Start-up reports of vLLM 0.11 on an H100 of 79.18 GiB: weights, peak of activations, what is not torch's, and the cache, in GiB;
# tp and the fraction of memory. Source: llm-d-planner at e50305a, docs/empirical-vllm-memory-results.md, Apache-2.0.
REPORTS = [
    ("gpt-oss-20b", "mxfp4", 13.47, 7.38, 0.13, 50.28, 1, 0.9),
    ("gpt-oss-120b", "mxfp4", 64.38, 7.38, 0.13, 3.33, 1, 0.95),  # said to be 0.9, but its parts add up to 0.95
    ("llama-3.3-70b", "fp8", 33.88, 4.84, 0.55, 32.00, 2, 0.9),
    ("llama-3.1-8b", "bf16", 14.99, 4.76, 0.13, 51.38, 1, 0.9),
    ("qwen3-0.6b", "bf16", 1.12, 5.56, 0.13, 64.45, 1, 0.9),
    ("qwen3-32b", "bf16", 61.03, 5.64, 0.14, 4.45, 1, 0.9),
    ("qwen3-32b", "bf16", 30.59, 5.64, 0.54, 34.49, 2, 0.9),
    ("mistral-small-24b", "bf16", 44.76, 2.12, 0.14, 28.20, 1, 0.95),
]


def problem_of(model, weights, fraction, tp):
    formats = ServingFormats(weights="bf16", experts="mxfp4") if weights == "mxfp4" else ServingFormats(weights=weights)
    cluster = sw.load_cluster("h100:8")
    architecture = sw.load_model(model)
    if (
        model == "mistral-small-24b"
    ):  # the report is of the multimodal model: Pixtral's encoder has 0.44 billion parameters
        architecture = dataclasses.replace(
            architecture, omitted_parts=(OmittedPart(name="vision tower", num_params=439_000_000),)
        )
    chip = dataclasses.replace(cluster.chip, usable_bytes=79.18 * GIB)
    return ServingProblem(
        architecture=architecture, cluster=dataclasses.replace(cluster, chip=chip), formats=formats,
        workload=Workload(isl=1000, osl=100, concurrency=1), batch_limits=BatchLimits(memory_fraction=fraction),
    )  # fmt: skip


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: f"{report[0]}-tp{report[6]}")
def test_memory_equals_the_start_up_report(report):
    model, weights, weight_gib, activation_gib, other_gib, cache_gib, tp, fraction = report
    problem = problem_of(model, weights, fraction, tp)
    memory = estimate_serving(problem, ServingLayout(tp=tp)).memory
    assert memory.weight_bytes / GIB == pytest.approx(weight_gib, rel=0.01)
    assert memory.activation_bytes / GIB == pytest.approx(activation_gib, rel=0.01)
    assert memory.runtime_bytes / GIB == pytest.approx(other_gib, abs=0.02)
    assert memory.cache_bytes / GIB == pytest.approx(cache_gib, rel=0.03)
    documented = fraction * 79.18 - weight_gib - activation_gib - other_gib  # vLLM's rule on the report's own parts
    assert memory.cache_bytes / GIB == pytest.approx(documented, rel=0.03)


def test_bytes_of_experts_equal_the_difference_of_two_reports():
    """gpt-oss-120b has 4,608 experts in all layers and gpt-oss-20b 768; all other weights are in 16 bits."""
    loaded = {name: gib for name, _, gib, *_ in REPORTS if name.startswith("gpt-oss")}
    other_gib = {
        name: 2 * (sw.num_params(model) - model.num_layers * model.num_experts * (3 * 2880**2 + 3 * 2880)) / GIB
        for name in loaded for model in [sw.load_model(name)]
    }  # fmt: skip
    reported = (loaded["gpt-oss-120b"] - other_gib["gpt-oss-120b"]) - (loaded["gpt-oss-20b"] - other_gib["gpt-oss-20b"])
    ours = {
        name: estimate_serving(problem_of(name, "mxfp4", 0.95, 1), ServingLayout()).memory.weight_bytes / GIB
        - other_gib[name]
        for name in loaded
    }
    assert ours["gpt-oss-120b"] - ours["gpt-oss-20b"] == pytest.approx(reported, rel=5e-4)


def test_tokens_of_cache_equal_the_reports():
    # The report of Mistral Small: 28.20 GiB hold 184,832 tokens of 40 layers with 8 key-value heads of 128 in 16 bits.
    memory = estimate_serving(problem_of("mistral-small-24b", "bf16", 0.95, 1), ServingLayout()).memory
    assert memory.cache_bytes_per_token == 40 * 2 * 128 * 8 * 2
    assert memory.cache_tokens == pytest.approx(184_832, rel=0.03)


@pytest.mark.parametrize(("engine", "fraction"), [("trtllm", 0.9), ("sglang", 0.9)])
def test_memory_follows_the_rules_of_other_engines(engine, fraction):
    problem = dataclasses.replace(problem_of("llama-3.1-8b", "bf16", fraction, 1), engine=engine)
    memory = estimate_serving(problem, ServingLayout()).memory
    free = memory.capacity_bytes - memory.weight_bytes - memory.activation_bytes - memory.runtime_bytes
    expected = fraction * free if engine == "trtllm" else fraction * memory.capacity_bytes - memory.weight_bytes
    assert memory.cache_bytes == pytest.approx(min(expected, free), rel=1e-12)


@pytest.mark.parametrize(
    ("fraction", "verdict"), [(0.95, "fits"), (0.918, "fits"), (0.91, "not known"), (0.89, "does not fit")]
)
def test_the_verdict_is_withheld_within_the_error_of_the_parts(fraction, verdict):
    """The report of gpt-oss-120b has 71.89 GiB beside the cache: 0.908 of the device, and 1% of it are 0.009 of the device."""
    memory = estimate_serving(problem_of("gpt-oss-120b", "mxfp4", fraction, 1), ServingLayout()).memory
    assert memory.verdict == verdict
    lacking_gib = 64.38 + 7.38 + 0.13 - fraction * 79.18
    assert memory.lacking_bytes / GIB == pytest.approx(max(lacking_gib, 0.0), abs=0.1)


def test_weights_larger_than_a_device_do_not_fit(capsys):
    memory = estimate_serving(problem_of("llama-3.3-70b", "fp8", 0.9, 1), ServingLayout()).memory
    assert (memory.verdict, memory.largest_batch, memory.cache_tokens) == ("does not fit", 0, 0)
    fixed = memory.weight_bytes + memory.activation_bytes + memory.runtime_bytes
    request = (1000 + 100 / 2) * 80 * 2 * 8 * 128 * 2  # half of the output is in the cache on average
    assert memory.lacking_bytes == pytest.approx(fixed + request - memory.usable_bytes, rel=0.01)
    arguments = ["serve", "estimate", "llama-3.3-70b", "h100:1", "--isl", "1000", "--osl", "100", "--concurrency", "1"]
    assert main(arguments) == 0
    report = capsys.readouterr().out
    assert "(does not fit)" in report
    assert "more are required for one such request: more devices, weights of fewer bits" in report
    assert "TTFT" not in report
