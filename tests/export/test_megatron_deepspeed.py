"""Launches of Megatron-DeepSpeed: experts, Ulysses, ZeRO from the configuration or its template, and what the fork alone has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.interop.frameworks.targets import READERS
from shardwise.interop.launches.launch import Machines
from shardwise.interop.read_launch import ParsedLaunch, parse_launch
from shardwise.layout import Layout
from shardwise.model import num_params
from shardwise.values import InputError

MACHINES = Machines(num_devices=64, devices_per_node=8, chip="a100-80gb")
# Sizes of examples_deepspeed/MoE/ds_pretrain_gpt_1.3B_MoE128.sh and ds_pretrain_gpt_350M_MoE128.sh (4efb479d).
SIZES = (
    "--num-layers 24 --hidden-size {width} --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048"
)
USUAL = (
    "--micro-batch-size 2 --global-batch-size 512 --merge-file merges.txt --fp16 --deepspeed --deepspeed_config ds.json"
)
EXPERTS = "--num-experts 128 --moe-expert-parallel-size 64 --no-pipeline-parallel"


def read(
    arguments: str, width: int = 2048, stage: int | None = 1, before: str = "", usual: str = USUAL, **settings: Any
) -> ParsedLaunch:  # fmt: skip
    script = f"{before}\ndeepspeed pretrain_gpt.py {SIZES.format(width=width)} {usual} {arguments}\n"
    config = {"ds.json": json.dumps({"zero_optimization": {"stage": stage}, "steps_per_print": 10, **settings})}
    return parse_launch({"launch.sh": script, **(config if stage is not None else {})}, MACHINES)


# Parameters: Rajbhandari et al., DeepSpeed-MoE (arXiv:2201.05596), table 1.
@pytest.mark.parametrize(("width", "billions"), [(2048, 52), (1024, 13)])
def test_every_second_layer_has_experts(width: int, billions: int) -> None:
    parsed = read(EXPERTS, width)
    assert parsed.target is READERS["megatron-deepspeed"]
    assert round(num_params(parsed.launch.model) / 1e9) == billions
    assert parsed.launch.layout == Layout(fsdp=64, ep=64, zero_stage=1, micro_batch_seqs=2)


def test_experts_of_plain_replicas_are_borrowed_from_them() -> None:
    layout = read(f"{EXPERTS} --moe-expert-parallel-size 16", stage=0).launch.layout
    assert (layout.dp, layout.fsdp, layout.ep, layout.zero_stage) == (4, 16, 16, 0)


def test_experts_that_differ_by_layer_and_none() -> None:
    by_layer = read(f"--num-experts {'64 ' * 10} 128 128").launch.model.layer_architectures.values()
    assert sorted({layer.num_experts for layer in by_layer}) == [0, 64, 128]
    dense = read("--num-experts 1 --normalization rmsnorm").launch.model
    assert (dense.num_experts, dense.norm) == (0, "rms")
    with pytest.raises(
        InputError, match=r"num-experts: found '64 64 128'; one number, or 12 \(one for every 2 of 24 layers"
    ):
        read("--num-experts 64 64 128")


def test_ulysses_shares_sequences_and_state() -> None:
    parsed = read("--ds-sequence-parallel-size 4 --use-flash-attn-v2")
    layout = parsed.launch.layout
    assert (layout.fsdp, layout.cp, layout.cp_variant, parsed.target.stack) == (16, 4, "ulysses", "deepspeed")


def test_the_stage_comes_from_the_configuration_the_script_or_its_template() -> None:
    assert read("--zero-stage 3", stage=2).launch.layout.zero_stage == 2
    assert read("--zero-stage 3", stage=None).launch.layout.zero_stage == 3
    template = 'stage=1\nsed "s/GBSIZE/512/" template.json | sed "s/ZERO_STAGE/${stage}/" > ds.json'
    assert read("", stage=None, before=template).launch.layout.zero_stage == 1
    with pytest.raises(InputError, match="zero-stage: missing, and the DeepSpeed configuration is not among the files"):
        read("", stage=None)


def test_pipelines_accumulate_in_fp32() -> None:
    formats = [
        read(arguments, usual=USUAL.replace("--fp16", "--bf16"), **settings).launch.job.precision
        for arguments, settings in (
            ("", {}), ("--no-pipeline-parallel", {}), ("", {"data_types": {"grad_accum_dtype": "bf16"}}),
        )
    ]  # fmt: skip
    assert formats == ["bf16_fp32_gradients", "bf16", "bf16"]


def test_recomputation_offload_and_options_that_are_not_priced() -> None:
    parsed = read(
        "--checkpoint-activations --cpu-optimizer --moe-train-capacity-factor 2.0 --train-tokens 300000000000"
    )
    layout = parsed.launch.layout
    assert (layout.recompute, layout.offload, parsed.launch.job.tokens) == ("full", "optimizer", 3e11)
    assert parsed.not_priced == {"moe-train-capacity-factor": "time"}
    assert not parsed.unknown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mlp-type residual", "mlp-type: found 'residual', which makes the model another one"),
        ("--position-embedding-type sinusoidal", "position-embedding-type: .*absolute, rotary, alibi"),
        ("--glu-activation liglu", "glu-activation: .*swiglu, geglu"),
        ("--zero-stage 7", "zero-stage: found '7'; a stage from 0 to 3 is required"),
    ],
)
def test_unsupported_options_are_refused(arguments: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(arguments, stage=None if "zero" in arguments else 1)


def test_a_configuration_whose_cost_is_not_known() -> None:
    with pytest.raises(InputError, match="zero_hpz_partition_size: found 8, whose cost is not known"):
        read("", zero_optimization={"stage": 3, "zero_hpz_partition_size": 8})


def test_bigscience_options() -> None:
    model = read("--embed-layernorm --position-embedding-type alibi --pad-vocab-size-to 250880").launch.model
    assert (model.embedding_norm, model.positions, model.vocab_size) == (True, "none", 250880)
