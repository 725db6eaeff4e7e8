"""The mapping of published rows: selected rows of every family give exactly their job and layout; others have a reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from shardwise.hardware.calibration_constants import CONSTANTS
from shardwise.hardware.chips import load_chip
from shardwise.hardware.network.pods import Pods
from shardwise.hardware.network.switches import Switched
from shardwise.hardware.network.torus import Torus
from shardwise.hardware.published_constants import constant_values
from shardwise.measure.calibrate.prediction_errors import predict_rows
from shardwise.measure.calibrate.published_runs.layout_from_row import typical_virtual_stages
from shardwise.measure.calibrate.published_runs.model_and_cluster_from_row import (
    catalogue_name,
    read_cluster,
    slice_shape,
)
from shardwise.measure.calibrate.published_runs.prediction_from_row import (
    RunCase,
    predict_cached,
    predict_row,
    read_case,
)
from shardwise.measure.calibrate.published_runs.run_table import (
    INPUT_COLUMNS,
    MEASURED_COLUMNS,
    RowCells,
    RunRow,
    SkippedRow,
    published_rows,
)
from shardwise.price import Problem
from shardwise.price.estimate import estimate

ROWS = {row.id: row for row in published_rows()}


def case(name: str) -> RunCase:
    return read_case(RowCells(dict(ROWS[name].inputs)))


# Layout as printed, schedule, tokens of a batch and of a sequence, precision recipe; read off the sources by hand.
LAYOUTS = {
    # MosaicML llm-foundry: FSDP on one node
    "mosaicml-mpt-017": (
        "fsdp=8 zero_stage=3 micro_batch_seqs=40 recompute=none", "none", 640 * 2048, 2048, "bf16_fp32_reduction",
    ),
    # BigScience: DeepSpeed's ZeRO-1 and 1F1B, no sequence parallelism; fp16 and as many layers on each stage, until there were
    # an optimizer for bf16 with an fp32 copy of the gradients and stages that count the embedding as a layer
    "bigscience-bloom-a100-020": (
        "fsdp=4 tp=8 pp=12 zero_stage=1 sequence_parallel=false layers_per_stage=6,6,6,6,6,6,6,6,6,6,6,6 micro_batch_seqs=8 "
        "recompute=full", "1f1b", 2048 * 2048, 2048, "fp16_fp32_update",
    ),
    "bigscience-bloom-a100-005": (
        "fsdp=8 tp=4 pp=12 zero_stage=1 sequence_parallel=false micro_batch_seqs=4 recompute=full", "1f1b",
        2048 * 2048, 2048, "bf16_fp32_gradients",
    ),
    # NVIDIA NeMo, Llama 3.1 70B: interleaved, context parallel; ZeRO stage and recompute not stated
    "dgxc-h100-137": (
        "fsdp=8 tp=4 cp=2 pp=4 num_virtual_stages=5 zero_stage=1 sequence_parallel=true cp_variant=zigzag "
        "async_tp=true layers_per_stage=20,20,20,20 micro_batch_seqs=1 recompute=none", "interleaved", 512 * 8192, 8192, "bf16",
    ),
    "dgxc-gb200-011": (
        "fsdp=4 tp=4 cp=2 pp=8 num_virtual_stages=8 zero_stage=1 sequence_parallel=true cp_variant=zigzag async_tp=true "
        "micro_batch_seqs=1 recompute=none", "interleaved", 128 * 8192, 8192, "bf16",
    ),
    # Korthikanti et al. 2022, table 5: one replica, so nothing to shard over
    "korthikanti-2022-004": (
        "tp=8 pp=64 sequence_parallel=true "
        f"layers_per_stage={','.join(64 * ['2'])} micro_batch_seqs=1 recompute=selective", "1f1b", 512 * 2048, 2048,
        "fp16_fp32_update",
    ),
    # MaxText: sharded inside a slice, replicas across slices
    "maxtext-tpu-v5e-016": (
        "dp=8 fsdp=256 zero_stage=3 micro_batch_seqs=4 recompute=full", "none", 8192 * 2048, 2048, "bf16",
    ),
    "maxtext-tpu-v5p-014": (
        "dp=2 fsdp=16 tp=4 zero_stage=3 sequence_parallel=true async_tp=true micro_batch_seqs=24 recompute=selective", "none",
        768 * 2048, 2048, "bf16",
    ),
    "tpu-v6e-recipes-020": (
        "fsdp=256 zero_stage=3 micro_batch_seqs=12 recompute=full offload=activations", "none", 3072 * 4096, 4096, "bf16",
    ),
    # recipes that say more than their table: block inputs that stay on the device, FSDP across slices, state in bf16
    "tpu-v6e-recipes-001": ("fsdp=256 zero_stage=3 micro_batch_seqs=1 recompute=full", "none", 256 * 32768, 32768, "bf16"),
    "tpu-v6e-recipes-007": (
        "fsdp=512 zero_stage=3 micro_batch_seqs=1 recompute=full offload=activations", "none", 512 * 8192, 8192, "bf16",
    ),
    "tpu-v6e-recipes-008": (
        "fsdp=32 zero_stage=3 micro_batch_seqs=2 recompute=full offload=activations", "none", 64 * 8192, 8192,
        "bf16_bf16_state",
    ),
    # SimuMax: Megatron's distributed optimizer with gradients in fp32
    "simumax-b200-001": (
        "fsdp=4 pp=2 ep=4 zero_stage=1 "
        "layers_per_stage=2,2 micro_batch_seqs=1 recompute=none", "1f1b", 128 * 4096, 4096,
        "bf16_fp32_main_gradients",
    ),
    # Pax: recompute not stated
    "jax-toolbox-pax-007": ("fsdp=256 zero_stage=3 micro_batch_seqs=8 recompute=none", "none", 2048 * 2048, 2048, "bf16"),
    "jax-toolbox-maxtext-001": ("fsdp=8 zero_stage=3 micro_batch_seqs=2 recompute=selective", "none", 16 * 4096, 4096, "bf16"),
    # IBM fms-fsdp: hybrid sharding, a node is one group
    "fms-fsdp-005": ("dp=16 fsdp=8 zero_stage=3 micro_batch_seqs=2 recompute=none", "none", 256 * 4096, 4096, "bf16"),
    "torchtitan-016": (
        "fsdp=8 zero_stage=3 micro_batch_seqs=2 recompute=alternate", "none", 16 * 8192, 8192, "bf16_fp32_reduction",
    ),
    # InternEvo: optimizer sharded over a stated group
    "internevo-7b-a100-005": (
        "fsdp=4 tp=2 zero_stage=1 sequence_parallel=true micro_batch_seqs=4 recompute=none", "none", 64 * 2048, 2048, "bf16",
    ),
    # Snowflake's runs in ml-engineering: DeepSpeed's ZeRO-2
    "ml-engineering-8b-006": (
        "fsdp=8 zero_stage=2 micro_batch_seqs=1 recompute=none", "none", 8 * 8192, 8192, "bf16_fp32_gradients",
    ),
    # The same with ZeRO-3 and the optimizer on the host
    "ml-engineering-8b-001": (
        "fsdp=8 zero_stage=3 micro_batch_seqs=1 recompute=full offload=optimizer", "none", 8 * 131072, 131072,
        "bf16",
    ),
    # MaxText on v5p: FSDP alone is stated
    "tpu-v5p-recipes-002": ("fsdp=512 zero_stage=3 micro_batch_seqs=4 recompute=none", "none", 2048 * 2048, 2048, "bf16"),
    # Megatron-LM 2021: micro-batch not stated
    "megatron-ptdp-2021-003": (
        "dp=24 tp=8 pp=8 num_virtual_stages=5 sequence_parallel=false "
        "layers_per_stage=10,10,10,10,10,10,10,10 micro_batch_seqs=1 recompute=full", "interleaved",
        2304 * 2048, 2048, "fp16_fp32_update",
    ),
    # NVIDIA Megatron Bridge: experts over a whole NVLink domain
    "nvidia-mbridge-25-11-002": (
        "fsdp=64 pp=4 ep=64 num_virtual_stages=4 zero_stage=1 micro_batch_seqs=1 recompute=none", "interleaved",
        4096 * 4096, 4096, "bf16",
    ),
    # The same, whole experts over both replicas and tp
    "mbridge-skills-007": (
        "fsdp=4 tp=2 ep=8 zero_stage=1 sequence_parallel=true etp=1 async_tp=true micro_batch_seqs=1 recompute=none", "none",
        4 * 4096, 4096, "bf16_bf16_moments",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_give_their_job_and_layout(name: str) -> None:
    run_case = case(name)
    job = run_case.job
    assert (
        str(run_case.layout),
        run_case.layout.schedule,
        job.global_batch_tokens,
        job.seq_len,
        job.precision,
    ) == LAYOUTS[name]
    assert run_case.layout.num_devices == run_case.cluster.num_devices == int(ROWS[name].cell("n_devices"))


def test_sizes_of_a_dense_architecture_are_read() -> None:
    architecture = case("dgxc-h100-137").architecture
    assert (architecture.num_layers, architecture.d_model, architecture.d_ff, architecture.vocab_size) == (
        80,
        8192,
        28672,
        128256,
    )
    assert (architecture.num_heads, architecture.num_kv_heads, architecture.head_dim) == (64, 8, 128)
    assert (
        architecture.mlp,
        architecture.norm,
        architecture.positions,
        architecture.bias,
        architecture.tied_embeddings,
    ) == (
        "swiglu",
        "rms",
        "rotary",
        (),
        False,
    )


def test_a_gpt_has_biases_and_learned_positions_unless_its_family_has_others() -> None:
    gpt, mpt, bloom = (
        case(name).architecture for name in ("korthikanti-2022-004", "mosaicml-mpt-017", "bigscience-bloom-a100-020")
    )
    assert (gpt.mlp, gpt.norm, gpt.positions, gpt.max_positions, len(gpt.bias)) == ("gelu", "layer", "learned", 2048, 3)
    assert (mpt.mlp, mpt.norm, mpt.positions, mpt.bias, mpt.tied_embeddings) == ("gelu", "layer", "none", (), True)
    assert (bloom.positions, bloom.head_dim, bloom.vocab_size) == ("none", 224, 250880)


@pytest.mark.parametrize(
    ("name", "layers", "heads"),
    [
        ("bigscience-bloom-a100-088", 72, 96),
        ("bigscience-bloom-a100-114", 77, 96),
        ("bigscience-bloom-a100-096", 80, 96),
    ],
)
def test_layers_by_the_name_and_heads_of_the_usual_width(name: str, layers: int, heads: int) -> None:
    """BigScience's chronicle: 183B and 195B of width 14,400; 96 heads where NHIDDEN is 13,824, as in its training script."""
    architecture = case(name).architecture
    assert (architecture.num_layers, architecture.num_heads, architecture.d_model % heads) == (layers, heads, 0)


def test_lora_rows_have_adapters_on_queries_keys_and_values() -> None:
    run_case = case("dgxc-h100-127")
    assert (run_case.architecture.lora_rank, run_case.architecture.lora_targets) == (8, ("qkv",))
    assert str(run_case.layout) == (
        "fsdp=2 tp=2 pp=4 num_virtual_stages=20 zero_stage=1 sequence_parallel=true "
        "async_tp=true layers_per_stage=20,20,20,20 micro_batch_seqs=1 recompute=none"
    )
    assert case("dgxc-h100-137").architecture.lora_rank == 0


def test_a_gpt3_without_a_vocabulary_has_that_of_the_others() -> None:
    assert case("jax-toolbox-pax-001").architecture.vocab_size == case("jax-toolbox-pax-007").architecture.vocab_size


@pytest.mark.parametrize(
    ("cells", "recipe"),
    [
        ({"dtype": ""}, "bf16"), ({"dtype": "fp16"}, "fp16"), ({"dtype": "fp16-or-bf16"}, "bf16"),
        ({"dtype": "fp32"}, "fp32"), ({"dtype": "nvfp4"}, "nvfp4"),
        ({"dtype": "mxfp8"}, "mxfp8"), ({"dtype": "fp8"}, "fp8_delayed"),
        ({"dtype": "fp8", "software": "NeMo container 26.02"}, "fp8_current"),
        ({"dtype": "fp8", "software": "torch 1963fc8, torchtitan 9dec370"}, "fp8_torchao"),
        ({"dtype": "fp8-rowwise", "software": "torch 38410cf9 2025-06-14"}, "fp8_torchao_rowwise"),
        ({"dtype": "int8/fp8-quant", "software": "MaxText tpu-recipes v0.1.x"}, "int8_aqt"),
        ({"software": "torch 38410cf9 2025-06-14"}, "bf16_fp32_reduction"),
        ({"notes": "mixed precision"}, "bf16_fp32_reduction"), ({"notes": "pure bf16"}, "bf16"),
        ({"notes": "fp32 gradients"}, "bf16_fp32_main_gradients"), ({"software": "Megatron-DeepSpeed"}, "bf16_fp32_gradients"),
    ],
)  # fmt: skip
def test_dtypes_are_mapped_to_precision_recipes(cells: dict[str, str], recipe: str) -> None:
    assert read_case(RowCells({**BASE, **cells})).job.precision == recipe


def test_an_uncompiled_run_has_the_eager_stack_of_its_software() -> None:
    """Its elementwise kernels and launches are those of eager PyTorch, its attention and its collectives those of torchtitan."""
    titan = {**BASE, "software": "torch 1963fc8 2024-12-23, torchtitan 9dec370"}
    stacks = {text: read_case(RowCells({**titan, "compile": text})).software.stack for text in ("", "yes", "no")}
    assert {text: stack.name for text, stack in stacks.items()} == {
        "": "torchtitan", "yes": "torchtitan", "no": "torchtitan-eager"
    }  # fmt: skip
    eager, compiled = (constant_values("h100", stacks[text]) for text in ("no", "yes"))
    shared = {name for name in eager if eager[name] == compiled[name]}
    assert CONSTANTS.keys() - shared <= {"elementwise", "launch_s"}
    assert eager["elementwise"] > 1.3 * compiled["elementwise"]
    older = {**BASE, "software": "FSDP of PyTorch 2.1", "compile": "no"}
    assert read_case(RowCells(older)).software.stack.name != "torchtitan-eager"


@pytest.mark.parametrize(
    ("text", "offload"),
    [
        ("", "none"), ("none", "none"), ("CPU AdamW optimizer offload", "optimizer"), ("activations to host", "activations"),
        ("optimizer and activations on the host", "both"), ("qkv projections to host", "none"),
    ],
)  # fmt: skip
def test_offload_texts_are_mapped_to_offload(text: str, offload: str) -> None:
    run_case = read_case(RowCells({**BASE, "offload": text}))
    assert run_case.layout.offload == offload
    assert any("host" in approximation for approximation in run_case.approximations) == (
        text in ("CPU AdamW optimizer offload", "qkv projections to host")
    )


def test_a_micro_batch_of_a_single_sequence_is_assumed_for_split_models_only() -> None:
    split = {**BASE, "micro_batch": "", "tp": "2", "global_batch": "16"}
    assert read_case(RowCells(split)).layout.micro_batch_seqs == 1
    assert read_case(RowCells({**split, "grad_accum": "2"})).layout.micro_batch_seqs == 2
    with pytest.raises(SkippedRow, match="micro-batch not stated"):
        read_case(RowCells({**split, "tp": "1"}))


def test_latent_attention_and_experts_are_read() -> None:
    architecture = case("simumax-b200-001").architecture
    assert (
        architecture.q_lora_rank,
        architecture.kv_lora_rank,
        architecture.rope_head_dim,
        architecture.v_head_dim,
        architecture.head_dim,
    ) == (
        1536,
        512,
        64,
        128,
        192,
    )
    assert (
        architecture.num_experts,
        architecture.experts_per_token,
        architecture.d_ff,
        architecture.shared_expert_width,
    ) == (160, 6, 1536, 3072)
    assert (architecture.num_dense_layers, architecture.dense_d_ff) == (1, 12288)


def test_windows_on_all_but_every_nth_layer_are_read() -> None:
    architecture = case("tpu-v6e-recipes-001").architecture
    assert (
        architecture.sliding_window,
        architecture.global_every,
        architecture.num_windowed_layers,
        architecture.mlp,
    ) == (1024, 6, 40, "geglu")


@pytest.mark.parametrize(("layers", "windowed", "every"), [(36, 18, 2), (48, 40, 6), (62, 52, 6), (8, 8, 0), (7, 4, 2)])
def test_numbers_of_windowed_layers_are_mapped_to_a_period(layers: int, windowed: int, every: int) -> None:
    architecture = read_case(
        RowCells({**BASE, "layers": str(layers), "window": "128", "window_layers": str(windowed)})
    ).architecture
    assert (architecture.num_windowed_layers, architecture.global_every) == (windowed, every)


def test_multi_token_prediction_is_in_the_name() -> None:
    name = next(name for name, row in ROWS.items() if "w/ MTP" in row.cell("model"))
    assert "w/o" not in ROWS[name].cell("model")
    with_it = RowCells({**dict(ROWS["nvidia-mbridge-25-11-002"].inputs), "model": "DeepSeekV3 (w/ MTP)"})
    assert read_case(with_it).architecture.num_predict_layers == 1
    assert case("nvidia-mbridge-25-11-002").architecture.num_predict_layers == 0


# Chip as the source writes it, the levels of the network and its outermost rate in bytes/s of one device.
MACHINES = {
    "bigscience-bloom-a100-020": ("a100-80gb", (8, 48), 4 * 100e9 / 8 / 8),  # four Omni-Path cards a node
    "mosaicml-mpt-017": ("a100-80gb", (8, 1), 1600e9 / 8 / 8),
    "internevo-7b-a100-005": ("a100-80gb", (8, 1), 4 * 100e9 / 8 / 8),
    "fms-fsdp-005": ("a100-80gb", (8, 16), 400e9 / 8 / 8),
    "dgxc-h100-137": ("h100", (8, 32), 50e9),  # not stated: the DGX reference
    "torchtitan-016": ("h100", (8, 1), 50e9),  # of each GPU
    "dgxc-gb200-011": ("gb200", (64, 4), 50e9),  # equal parts of racks of 72
    "maxtext-tpu-v5e-016": ("tpu-v5e", (16, 16, 8), 25e9 / 8),
    "maxtext-tpu-v5p-014": ("tpu-v5p", (4, 4, 4, 2), 25e9 / 4),
    "tpu-v6e-recipes-020": ("tpu-v6e", (16, 16), 90e9),
}


@pytest.mark.parametrize("name", MACHINES)
def test_rows_give_their_chip_and_network(name: str) -> None:
    cluster = case(name).cluster
    topology = cluster.topology
    rate = topology.tiers[-1].bytes_per_s if isinstance(topology, Switched) else topology.bytes_per_s
    assert (cluster.chip.name, topology.levels, rate) == MACHINES[name]
    assert isinstance(topology, Switched | Torus | Pods)


def test_a_power_limit_and_other_memory_are_changes_of_the_chip() -> None:
    """torchtitan's H100s: 96 GB of HBM2e at 2.4 TB/s, 500 W of 700."""
    chip = case("torchtitan-016").cluster.chip
    assert (chip.memory_bytes, chip.memory_bytes_per_s, chip.power_w) == (96e9, 2.4e12, 500)
    assert chip.matmul_fraction == pytest.approx(case("dgxc-h100-137").cluster.chip.matmul_fraction * 0.894, rel=1e-3)


@pytest.mark.parametrize("text", ["TPU-v5e", "TPU-v5p", "TPU-v6e", "TPU-v4", "A100-80GB-SXM", "H200-SXM"])
def test_a_printed_memory_of_the_usual_chip_is_no_change(text: str) -> None:
    """Sources print "16 GB" for 16 GiB."""
    chip = load_chip(catalogue_name(text))
    printed = {"tpu-v5e": 16, "tpu-v5p": 95, "tpu-v6e": 32, "tpu-v4": 32, "a100-80gb": 80, "h200": 141}[chip.name]
    row = {"chip": text, "chip_mem_gb": str(printed), "n_devices": "8"}
    assert read_cluster(RowCells(row)).chip.memory_bytes == chip.memory_bytes
    assert read_cluster(RowCells({**row, "chip_mem_gb": str(2 * printed)})).chip.memory_bytes == 2e9 * printed


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A100-80GB-SXM", "a100-80gb"), ("NVIDIA H100-80GB-SXM", "h100"), ("H100-96GB-HBM2e-500W", "h100"), ("h100", "h100"),
        ("B200-SXM", "b200"), ("GB300", "gb300"), ("A100-80GB-PCIe", "a100-80gb-pcie"), ("H100-80GB-PCIe", "h100-pcie"),
        ("TPU-v5e", "tpu-v5e"), ("v5p-256", "tpu-v5p"), ("TPU v4", "tpu-v4"), ("AMD MI300X", "mi300x"), ("V100-32GB", "v100"),
    ],
)  # fmt: skip
def test_chips_are_identified_by_the_names_of_sources(text: str, name: str) -> None:
    assert catalogue_name(text) == name


def test_a_tpu_name_counts_cores_where_a_chip_has_two() -> None:
    assert read_cluster(RowCells({"chip": "v5p-256"})).num_devices == 128
    assert read_cluster(RowCells({"chip": "v5e-256"})).num_devices == 256
    assert read_cluster(RowCells({"chip": "v5p-256", "n_devices": "64"})).num_devices == 64


@pytest.mark.parametrize(
    ("chips", "axes", "shape"),
    [(256, 2, (16, 16)), (32, 2, (4, 8)), (8, 2, (2, 4)), (64, 3, (4, 4, 4)), (512, 3, (8, 8, 8)), (1024, 3, (8, 8, 16)),
     (32, 3, (2, 4, 4)), (6144, 3, (16, 16, 24)), (4, 3, (1, 2, 2))],
)  # fmt: skip
def test_slices_have_the_vendors_shapes(chips: int, axes: int, shape: tuple[int, ...]) -> None:
    assert slice_shape(chips, axes) == shape


def test_unstated_virtual_stages_have_a_default() -> None:
    assert typical_virtual_stages(80, 4, 64) == 10  # two layers in each
    assert typical_virtual_stages(80, 4, 63) == 1  # micro-batches are not a multiple of the stages
    assert typical_virtual_stages(96, 8, 64) == 6
    assert typical_virtual_stages(8, 8, 64) == 1


BASE = {
    "model": "gpt", "layers": "8", "d_model": "1024", "n_heads": "8", "d_ff": "4096", "vocab": "51200", "gated_mlp": "yes",
    "chip": "H100", "n_devices": "8", "seq_len": "2048", "micro_batch": "1", "global_batch": "8", "tp": "1", "pp": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"layers": ""}, "architecture not stated"), ({"gated_mlp": ""}, "architecture not stated"),
        ({"vocab": " "}, "architecture not stated"), ({"layers": "many"}, "no number"), ({"layers": "nan"}, "no number"),
        ({"layers": "1e300"}, "no number"), ({"layers": "-3"}, "no number"), ({"head_dim": "150.5"}, "no whole number"),
        ({"layers": "0"}, "no whole number"), ({"layers": "999999999"}, "no number of layers"),
        ({"gated_mlp": "perhaps"}, "no yes or no"), ({"chip": ""}, "chip not stated"),
        ({"chip": "Cerebras"}, "chip not in the catalogue"), ({"n_devices": ""}, "number of devices not stated"),
        ({"n_devices": "12"}, "refused by the cluster"), ({"tp": "", "pp": ""}, "layout not stated"),
        ({"tp": "3"}, "degrees do not multiply out"), ({"dp": "4"}, "degrees do not multiply out"),
        ({"seq_len": ""}, "sequence length not stated"), ({"global_batch": ""}, "batch not stated"),
        ({"micro_batch": ""}, "micro-batch not stated"), ({"micro_batch": "", "grad_accum": "3"}, "micro-batch not stated"),
        ({"dtype": "int8/fp8-quant"}, "no precision recipe"),
        ({"n_heads": "", "tp": "3", "n_devices": "24"}, "architecture not stated"),
        ({"layers": "", "model": "gpt 3B", "n_experts": "8"}, "architecture not stated"),
        ({"recompute": "some"}, "recompute not known here"),
        ({"pp": "2", "pp_schedule": "chimera"}, "schedule not known here"), ({"n_kv_heads": "3"}, "refused by the model"),
        ({"tp": "16", "n_devices": "16"}, "refused by rule layout: heads_by_tp"),
        ({"micro_batch": "2"}, "refused by rule layout: micro_batch"),
        ({"notes": "zero group 3"}, "ZeRO group does not divide the replicas"),
        ({"n_experts": "8", "top_k": "2", "ep": "2", "etp": "3", "tp": "2"}, "refused by the layout"),
        ({"window": "128", "window_layers": "1"}, "windows on other layers than all but every n-th"),
        ({"chip": "v5e", "n_devices": "12"}, "no slice of so many chips"),
        ({"chip": "v5e", "inter_node_link": "DCN between 3 slices"}, "devices do not divide into slices"),
    ],
)  # fmt: skip
def test_incomplete_and_contradictory_rows_are_skipped_with_the_reason(change: dict[str, str], kind: str) -> None:
    predict_row(RowCells(BASE))
    outcome = predict_cached(tuple({**BASE, **change}.items()))
    assert isinstance(outcome, SkippedRow)
    assert outcome.kind == kind


def test_blank_cells_have_the_documented_defaults() -> None:
    run_case = predict_row(RowCells({**BASE, "n_devices": "16", "tp": "2"})).case
    assert str(run_case.layout) == "fsdp=8 tp=2 zero_stage=1 sequence_parallel=true micro_batch_seqs=1 recompute=none"
    assert run_case.job.precision == "bf16"
    assert predict_row(RowCells({**BASE, "fsdp": "yes"})).case.layout.zero_stage == 3
    assert predict_row(RowCells({**BASE, "dist_optimizer": "no"})).case.layout.dp == 8


@pytest.mark.parametrize(
    ("cells", "layout"),
    [
        ({"notes": "HSDP"}, (2, 8)), ({"recompute_detail": "HSDP; every other block"}, (2, 8)),
        ({"notes": "FSDP (not HSDP)"}, (1, 16)), ({"notes": "optimizer shard group: 4 GPUs"}, (4, 4)),
        ({"notes": "zero1 group 2"}, (8, 2)),
    ],
)  # fmt: skip
def test_notes_about_sharding_groups_are_mapped_to_degrees(cells: dict[str, str], layout: tuple[int, int]) -> None:
    parsed = read_case(RowCells({**BASE, "n_devices": "16", "global_batch": "16", "fsdp": "yes", **cells})).layout
    assert (parsed.dp, parsed.fsdp) == layout


HEAVY = {**BASE, "layers": "48", "d_model": "4096", "n_heads": "32", "d_ff": "16384", "seq_len": "8192", "micro_batch": "2",
         "global_batch": "16", "fsdp": "yes"}  # fmt: skip


def test_an_unstated_recompute_is_the_least_that_fits() -> None:
    """With a layer less, memory would be tight; the weaker policies would not fit."""
    prediction = predict_row(RowCells(HEAVY))
    case, layout = prediction.case, prediction.case.layout
    assert prediction.estimate.verdict == "fits"
    assert layout.recompute == "full"
    assert layout.recompute_layers is not None
    less = layout.recompute_layers - 1
    for policy, number in (("none", None), ("selective", None), ("full", less)):
        weaker = replace(layout, recompute=policy, recompute_layers=number)
        priced = estimate(Problem(case.architecture, case.cluster, case.job), weaker)
        assert priced.verdict == ("tight" if policy == "full" else "does not fit")


def test_every_nth_block_is_full_recompute_of_few_layers() -> None:
    cells = {**HEAVY, "recompute": "selective", "recompute_detail": "FSDP; fractional (every n-th block) selective AC"}
    assert predict_row(RowCells(cells)).case.layout == predict_row(RowCells(HEAVY)).case.layout
    smallest = predict_row(RowCells({**cells, "layers": "8"})).case
    assert (smallest.layout.recompute, smallest.layout.recompute_layers, smallest.approximations) == ("full", 1, ())


def test_a_model_that_never_fits_is_priced_with_all_recomputed() -> None:
    prediction = predict_row(RowCells({**HEAVY, "n_devices": "1", "layers": "96", "global_batch": "2"}))
    assert not prediction.estimate.fits
    assert (prediction.case.layout.recompute, prediction.case.layout.recompute_layers) == ("full", None)


def test_a_stated_recompute_is_kept_unless_it_cannot_fit() -> None:
    assert predict_row(RowCells({**HEAVY, "recompute": "none"})).case.layout.recompute == "none"
    refuted = predict_row(RowCells({**HEAVY, "recompute": "selective"})).case
    assert refuted.layout.recompute == "full"
    assert "selective recompute would not fit; priced as full" in refuted.approximations
    assert predict_row(RowCells({**BASE, "recompute": "selective"})).case.layout.recompute == "selective"


@pytest.mark.parametrize(
    ("part", "stated", "expected"),
    [(1.099, "selective", "selective"), (1.101, "selective", "full"), (0.999, "", "selective"), (1.001, "", "full")],
)
def test_a_stated_recompute_is_replaced_if_memory_exceeds_capacity_by_a_tenth(
    part: float, stated: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is mocked: `selective` takes `part` of the capacity, `none` twice the capacity, `full` half of it. Since the
    memory model may err by a tenth, a stated policy is kept up to there; an unstated one has to fit."""
    parts = {"none": 2.0, "selective": part, "full": 0.5}

    def taking(problem: Problem, layout: Any) -> Any:
        priced = estimate(problem, layout)
        capacity = priced.memory_capacity_bytes
        return replace(priced, memory_bytes=parts[layout.recompute] * capacity, fits=parts[layout.recompute] <= 1)

    monkeypatch.setattr("shardwise.measure.calibrate.published_runs.prediction_from_row.estimate", taking)
    assert predict_row(RowCells({**HEAVY, "recompute": stated})).case.layout.recompute == expected


def test_recompute_modules_free_the_measured_memory() -> None:
    """Megatron Bridge, Llama 3 70B on 32 H100s: attention and norms freed nothing, the MLP 3.2 GB of 58.8 GB."""
    measured_gb, predicted_gb = {}, {}
    for number, policy in ((1, "core_attn"), (2, "core_attn+layernorm"), (3, "mlp"), (4, "core_attn+mlp")):
        row = ROWS[f"mbridge-skills-{number:03}"]
        assert set(policy.split("+")) == set(row.cell("recompute_detail").split()[0].split("+"))
        run_case = case(row.id)
        priced = estimate(
            Problem(run_case.architecture, run_case.cluster, run_case.job), replace(run_case.layout, recompute=policy)
        )
        measured_gb[policy], predicted_gb[policy] = row.peak_memory_gb or 0.0, priced.memory_bytes / 1e9
    for peaks_gb in (measured_gb, predicted_gb):
        assert peaks_gb["core_attn+layernorm"] == pytest.approx(peaks_gb["core_attn"], rel=0.015)
        assert peaks_gb["core_attn+mlp"] == pytest.approx(peaks_gb["mlp"], rel=0.015)
        assert peaks_gb["mlp"] < peaks_gb["core_attn"] - 2.0


def test_virtual_stages_are_reduced_to_a_block_each() -> None:
    """The first and the last may have no block: 126 blocks fill 128 virtual stages, and 125 blocks only 120."""
    for layers, virtual in ((126, 16), (125, 15)):
        run_case = read_case(RowCells({**BASE, "layers": str(layers), "pp": "8", "vpp": "16", "global_batch": "64"}))
        assert run_case.layout.num_virtual_stages == virtual


@pytest.mark.parametrize(
    ("text", "virtual", "schedule"),
    [
        ("1F1B (DeepSpeed)", "", "1f1b"), ("1F1B", "2", "interleaved"), ("Interleaved1F1B", "", "interleaved"),
        ("1f1b-interleaved", "1", "1f1b"), ("", "", "interleaved"), ("GPipe", "", "afab"), ("AFAB", "", "afab"),
        ("ZB-H1", "", "zb_h1"), ("zb-h2", "", "zb_h2"), ("DualPipe", "", "dualpipe"),
    ],
)  # fmt: skip
def test_schedules_are_identified_by_the_names_of_sources(text: str, virtual: str, schedule: str) -> None:
    """ "1F1B" means the interleaved schedule where virtual stages are stated; schedules of whole stages have no unstated ones."""
    cells = {**BASE, "pp": "2", "vpp": virtual, "pp_schedule": text, "global_batch": "64"}
    assert read_case(RowCells(cells)).layout.schedule == schedule


def test_measured_columns_do_not_affect_predictions() -> None:
    """Blank or absurd values in every measured column give the same predictions."""
    rows = [ROWS[name] for name in LAYOUTS]
    blank = [replace(row, measured=dict.fromkeys(row.measured, "")) for row in rows]
    absurd = [replace(row, measured=dict.fromkeys(row.measured, "1e9")) for row in rows]

    def priced(rows_to_price: list[RunRow]) -> list[tuple[float, float]]:
        predict_cached.cache_clear()
        return [(run.prediction.estimate.step_time_s, run.prediction.estimate.memory_bytes)
                for run in predict_rows(rows_to_price) if run.prediction]  # fmt: skip

    assert priced(rows) == priced(blank) == priced(absurd)
    assert len(priced(rows)) == len(rows)
    assert not set(INPUT_COLUMNS) & {
        *MEASURED_COLUMNS,
        "peak_memory_gb",
        "mfu_reported",
        "hfu_reported",
        "tflops_per_device_reported",
    }


@pytest.mark.parametrize(
    ("cells", "phrase"),
    [
        ({"flash_attn": "no"}, ""), ({"dtype": "fp16"}, ""),
        ({"task": "sft"}, ""), ({"notes": "packed sequences"}, "packed sequences"),
        ({"notes": "capacity routing"}, "capacity"), ({"model": "DeepSeekV3 (tokendrop)"}, "capacity"),
        ({"overlap_flags": "EP overlap on (search)"}, "exchanges of experts"),
        ({"overlap_flags": "EP overlap off"}, ""), ({"overlap_flags": "vanilla TP"}, ""), ({"notes": "balanced routing"}, ""),
    ],
)  # fmt: skip
def test_approximations_are_stated(cells: dict[str, str], phrase: str) -> None:
    approximations = read_case(RowCells({**BASE, **cells})).approximations
    assert (len(approximations) == 1 and phrase in approximations[0]) if phrase else not approximations


def test_completed_runs_fit_and_few_are_tight() -> None:
    """Two of GPT-3 175B on TPU v6e do not fit: XLA scatters each gradient at once, but a whole layer's gradients are counted."""
    verdicts = Counter(
        run.prediction.estimate.verdict
        for run in predict_rows(published_rows())
        if run.scored and run.prediction and run.row.step_time_s
    )
    assert verdicts.total() > 900
    assert verdicts["does not fit"] <= 2
    assert verdicts["tight"] <= 0.05 * verdicts.total()
