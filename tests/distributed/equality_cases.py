"""Layouts compared with one process: each combination of structures, axes, schedules and optimizers."""

from __future__ import annotations

from training import Case

from shardwise.layout.layout import Layout
from shardwise.layout.placement import Placement

# Inverse roots of gradients in double precision are as good as the damping allows: 1e-16 / 1e-4 of a step.
EACH_STEP = {"optimizer": {"precondition_every": 1}}
CASES = {
    "one process": Case(),
    "one process, accumulating": Case(layout=Layout(micro_batch_seqs=3)),
    "2 after": Case(layout=Layout(dp=2, micro_batch_seqs=4), recipe={"reduction": "after"}),
    "2 per parameter": Case(layout=Layout(dp=2, micro_batch_seqs=2), recipe={"reduction": "per_parameter"}),
    "2 bucketed": Case(layout=Layout(dp=2, micro_batch_seqs=2)),
    "2 bucketed in each micro-batch": Case(layout=Layout(dp=2), recipe={"reduce_each_micro_batch": True}),
    "3 uneven": Case(layout=Layout(dp=3)),
    "3 uneven, a rank without a sequence": Case(layout=Layout(dp=3), num_seqs=7),
    "2 zero-1": Case(layout=Layout(fsdp=2, zero_stage=1, micro_batch_seqs=2)),
    "3 zero-1 in each micro-batch": Case(layout=Layout(fsdp=3, zero_stage=1), recipe={"reduce_each_micro_batch": True}),
    "2 zero-2": Case(layout=Layout(fsdp=2, zero_stage=2, micro_batch_seqs=2)),
    "3 zero-2": Case(layout=Layout(fsdp=3, zero_stage=2)),
    "2 zero-3": Case(layout=Layout(fsdp=2, zero_stage=3, micro_batch_seqs=2)),
    "3 zero-3": Case(layout=Layout(fsdp=3, zero_stage=3)),
    "4 hybrid zero-1 in each micro-batch": Case(
        layout=Layout(dp=2, fsdp=2, zero_stage=1), recipe={"reduce_each_micro_batch": True}
    ),
    "4 hybrid zero-0": Case(layout=Layout(dp=2, fsdp=2)),
    "tied tp 2 in pieces": Case("tied", Layout(tp=2, sequence_parallel=True, async_tp=True, micro_batch_seqs=2)),
    "tied 3 zero-1": Case("tied", Layout(fsdp=3, zero_stage=1)),
    "tied 2 zero-2": Case("tied", Layout(fsdp=2, zero_stage=2)),
    "moe 1": Case("moe", Layout(micro_batch_seqs=4)),
    "moe 2 bucketed": Case("moe", Layout(dp=2, micro_batch_seqs=2)),
    "moe 3 uneven": Case("moe", Layout(dp=3), num_seqs=7),
    "moe 2 by bias": Case("moe", Layout(dp=2), recipe={"balance": "bias", "balance_rate": 0.05}),
    "moe 3 zero-3": Case("moe", Layout(fsdp=3, zero_stage=3)),
    "moe 4 hybrid zero-3": Case("moe", Layout(dp=2, fsdp=2, zero_stage=3)),
    "full recompute 2 bucketed": Case(layout=Layout(dp=2, recompute="full")),
    "selective recompute 3 zero-3": Case(layout=Layout(fsdp=3, zero_stage=3, recompute="selective")),
    "one layer recomputed 2 zero-3": Case(
        layout=Layout(fsdp=2, zero_stage=3, recompute="full", recompute_layers=1), recipe={"reduction": "after"}
    ),
    "moe selective recompute 2 zero-2": Case("moe", Layout(fsdp=2, zero_stage=2, recompute="selective")),
    "tied full recompute 4 hybrid zero-2": Case("tied", Layout(dp=2, fsdp=2, zero_stage=2, recompute="full")),
    "adapted 2 accumulating": Case("adapted", Layout(dp=2, recompute="full"), num_seqs=5),
    "adapted 3 zero-1": Case("adapted", Layout(fsdp=3, zero_stage=1)),
    "adapted 4 hybrid zero-2": Case("adapted", Layout(dp=2, fsdp=2, zero_stage=2)),
    "biased 3 zero-1": Case("biased", Layout(fsdp=3, zero_stage=1)),
    "leading 2 zero-3": Case("leading", Layout(fsdp=2, zero_stage=3, recompute="selective")),
    "leading 3 uneven": Case("leading", Layout(dp=3), num_seqs=7),
    "fsdp outside dp": Case(
        layout=Layout(
            dp=2, fsdp=2, zero_stage=1, placement=Placement(axes=("tp", "cp", "dp", "fsdp", "pp"), levels=(0,))
        )
    ),
    "tp 2": Case(layout=Layout(tp=2, micro_batch_seqs=2)),
    "tp 4 sp, fewer key-value heads": Case(layout=Layout(tp=4, sequence_parallel=True, micro_batch_seqs=2)),
    "grouped, balanced by a loss": Case("grouped", Layout(fsdp=2, ep=2, dp=2, zero_stage=2)),
    "grouped, balanced by a bias": Case(
        "grouped", Layout(tp=2, fsdp=2, ep=4, etp=1, zero_stage=1), recipe={"balance": "bias", "balance_rate": 0.05}
    ),
    "experts with a capacity, 2 zero-2": Case(
        "routed", Layout(fsdp=2, zero_stage=2, micro_batch_seqs=2), recipe={"capacity_factor": 0.75}
    ),
    "experts with a capacity, ep 2 by bias": Case(
        "grouped", Layout(fsdp=2, ep=2, dp=2), recipe={"capacity_factor": 1.0, "balance": "bias", "balance_rate": 0.05}
    ),
    "experts with a capacity, whole, alike, full recompute": Case(
        "routed", Layout(tp=2, fsdp=2, ep=4, etp=1, recompute="full", zero_stage=3), recipe={"capacity_factor": 0.5}
    ),
    "tp 4 in pieces": Case(layout=Layout(tp=4, sequence_parallel=True, async_tp=True, recompute="full")),
    "adapted tp 2 in pieces, zero-3": Case(
        "adapted", Layout(tp=2, fsdp=2, zero_stage=3, sequence_parallel=True, async_tp=True, micro_batch_seqs=2)
    ),
    "tp 2 sp dp 2": Case(layout=Layout(tp=2, dp=2, sequence_parallel=True, micro_batch_seqs=2)),
    "tp 2 sp fsdp 2 zero-3, full recompute": Case(
        layout=Layout(tp=2, fsdp=2, zero_stage=3, sequence_parallel=True, recompute="full")
    ),
    "tp 2 sp fsdp 2 zero-3, set of kept tensors": Case(
        layout=Layout(
            tp=2,
            fsdp=2,
            zero_stage=3,
            sequence_parallel=True,
            recompute="keep:attention_norm.squares,k,attended,lse,gate",
        )
    ),
    "moe set of kept tensors 2 zero-2": Case(
        "moe", Layout(fsdp=2, zero_stage=2, recompute="keep:q,v,x_mid,gates,received,experts_gate_out,returned")
    ),
    "cp 2 sp tp 2, set of kept tensors": Case(
        layout=Layout(
            cp=2, tp=2, zero_stage=1, sequence_parallel=True, recompute="keep:k,v,mlp_norm.out,act", micro_batch_seqs=2
        )
    ),
    "biased tp 4": Case("biased", Layout(tp=4, micro_batch_seqs=2)),
    "flat norms tp 2 sp": Case("flat norms", Layout(tp=2, sequence_parallel=True, micro_batch_seqs=2)),
    "cp 4": Case(layout=Layout(cp=4, micro_batch_seqs=2)),
    "cp 2 zero-3": Case(layout=Layout(cp=2, zero_stage=3, micro_batch_seqs=2)),
    "cp 2 ulysses": Case(layout=Layout(cp=2, cp_variant="ulysses", micro_batch_seqs=2)),
    "cp 4 ring": Case(layout=Layout(cp=4, cp_variant="ring", micro_batch_seqs=2)),
    "cp 2 zigzag tp 2 sp": Case(
        layout=Layout(
            cp=2, tp=2, cp_variant="zigzag", sequence_parallel=True, micro_batch_seqs=2, recompute="selective"
        )
    ),
    "biased cp 2 zigzag": Case("biased", Layout(cp=2, cp_variant="zigzag", micro_batch_seqs=2)),
    "moe tp 2 sp": Case("moe", Layout(tp=2, sequence_parallel=True, micro_batch_seqs=2)),
    "routed ep 2 without ZeRO": Case("routed", Layout(fsdp=2, ep=2, micro_batch_seqs=2)),
    "routed ep 2 zero-1": Case("routed", Layout(fsdp=2, ep=2, zero_stage=1, micro_batch_seqs=2)),
    "routed ep 2 fsdp 4 zero-3, full recompute": Case("routed", Layout(fsdp=4, ep=2, zero_stage=3, recompute="full")),
    "routed ep 2 zero-3, experts whole over fsdp": Case("routed", Layout(fsdp=2, ep=2, zero_stage=3)),
    "routed ep 4 zero-2": Case("routed", Layout(fsdp=4, ep=4, zero_stage=2)),
    "half of each head turned, tp 2": Case("half of each head turned", Layout(tp=2, micro_batch_seqs=2)),
    "half of each head turned, tp 2 sp cp 2, full recompute": Case(
        "half of each head turned",
        Layout(tp=2, cp=2, cp_variant="zigzag", sequence_parallel=True, micro_batch_seqs=2, recompute="full"),
    ),
    "routed ep 2 tp 2 sp": Case("routed", Layout(fsdp=2, ep=2, tp=2, sequence_parallel=True, zero_stage=1)),
    "routed ep 4 whole experts tp 2 sp": Case(
        "routed", Layout(fsdp=2, ep=4, tp=2, etp=1, sequence_parallel=True, zero_stage=1)
    ),
    "windowed ep 2 cp 2 zigzag zero-3": Case(
        "windowed", Layout(fsdp=2, ep=2, cp=2, cp_variant="zigzag", zero_stage=3, micro_batch_seqs=2)
    ),
    "predicting cp 2 ring": Case("predicting", Layout(cp=2, cp_variant="ring", micro_batch_seqs=2)),
    "predicting tp 2 sp": Case("predicting", Layout(tp=2, sequence_parallel=True, micro_batch_seqs=2)),
    "tied predicting tp 2 fsdp 2 zero-3": Case("tied predicting", Layout(tp=2, fsdp=2, zero_stage=3)),
    "other values of the optimizer 2 zero-1": Case(
        layout=Layout(fsdp=2, zero_stage=1), recipe={"optimizer": {"beta1": 0.8, "epsilon": 1e-4, "weight_decay": 0.3}}
    ),
    "pp 2 1f1b": Case("deep", Layout(pp=2, schedule="1f1b")),
    "pp 3 zb_h2, tied": Case("deep tied", Layout(pp=3, schedule="zb_h2", recompute="selective")),
    "pp 2 interleaved zero-3": Case(
        "deep", Layout(pp=2, num_virtual_stages=2, fsdp=2, zero_stage=3, schedule="interleaved"), num_seqs=8
    ),
    "pp 2 zb_h1 tp 2 sp": Case("dense", Layout(pp=2, tp=2, sequence_parallel=True, schedule="zb_h1"), num_seqs=4),
    "pp 2 dualpipe zero-2": Case("deep routed", Layout(pp=2, fsdp=2, zero_stage=2, schedule="dualpipe")),
    "pp 3 zb_v, tied, ends without layers": Case(
        "deep tied", Layout(pp=3, num_virtual_stages=2, schedule="zb_v", recompute="selective")
    ),
    "pp 4 zb_v, given layers, few micro-batches": Case(
        "deep", Layout(pp=4, num_virtual_stages=2, schedule="zb_v", layers_per_stage=(0, 3, 3, 2)), num_seqs=5
    ),
    "tied predicting pp 2 dualpipe_v zero-1": Case(
        "tied predicting", Layout(pp=2, num_virtual_stages=2, fsdp=2, zero_stage=1, schedule="dualpipe_v")
    ),
    "tied pp 2 interleaved_zb": Case(
        "deep tied", Layout(pp=2, num_virtual_stages=3, schedule="interleaved_zb", recompute="selective"), num_seqs=6
    ),
    "pp 4 interleaved_zb, ends without layers": Case(
        "deep", Layout(pp=4, num_virtual_stages=2, schedule="interleaved_zb", layers_per_stage=(1, 2, 3, 2)), num_seqs=8
    ),
    "predicting pp 2 interleaved_breadth_first zero-2": Case(
        "predicting", Layout(pp=2, num_virtual_stages=2, fsdp=2, zero_stage=2, schedule="interleaved_breadth_first")
    ),
    "predicting pp 2 zb_h1 zero-1, by bias": Case(
        "predicting",
        Layout(pp=2, fsdp=2, zero_stage=1, schedule="zb_h1"),
        recipe={"balance": "bias", "balance_rate": 0.05},
    ),
    "adapted pp 2 afab, first layers recomputed": Case(
        "adapted", Layout(pp=2, schedule="afab", recompute="full", recompute_layers=1), num_seqs=4
    ),
    "pp 4 zb_h1, ends without layers": Case(
        "routed", Layout(pp=4, schedule="zb_h1", layers_per_stage=(0, 1, 2, 0)), num_seqs=4
    ),
    "pp 2 interleaved tp 2, ends without layers": Case(
        "deep tied",
        Layout(
            pp=2, tp=2, sequence_parallel=True, schedule="interleaved", num_virtual_stages=3, layers_per_stage=(2, 2)
        ),
        num_seqs=4,
    ),
    "uneven vocabulary, tp 4 sp": Case("uneven", Layout(tp=4, sequence_parallel=True, micro_batch_seqs=2)),
    "uneven vocabulary, tied, pp 2 tp 2 sp zero-2": Case(
        "uneven tied", Layout(pp=2, tp=2, fsdp=2, zero_stage=2, sequence_parallel=True, schedule="1f1b")
    ),
    "a rank without a word, zero-3": Case("nine words", Layout(tp=4, fsdp=2, zero_stage=3)),
    "a rank without a word, capped logits, tied": Case("uneven capped", Layout(tp=4, micro_batch_seqs=2)),
    "lion 1": Case(layout=Layout(micro_batch_seqs=4), optimizer="lion"),
    "lion 3 zero-1": Case("tied", Layout(fsdp=3, zero_stage=1), optimizer="lion"),
    "lion 2 zero-2": Case(layout=Layout(fsdp=2, zero_stage=2), optimizer="lion", recipe={"optimizer": {"beta2": 0.7}}),
    "lion 3 zero-3": Case("moe", Layout(fsdp=3, zero_stage=3), optimizer="lion"),
    "lion 4 hybrid zero-3": Case(layout=Layout(dp=2, fsdp=2, zero_stage=3, recompute="full"), optimizer="lion"),
    "sgd 2 bucketed": Case(layout=Layout(dp=2, micro_batch_seqs=2), optimizer="sgd"),
    "sgd 2 zero-2": Case(layout=Layout(fsdp=2, zero_stage=2), optimizer="sgd"),
    "sgd tp 2 sp": Case(layout=Layout(tp=2, sequence_parallel=True, micro_batch_seqs=2), optimizer="sgd"),
    "sgd 3 zero-1": Case("tied", Layout(fsdp=3, zero_stage=1), optimizer="sgd"),
    "sgd 2 zero-3 nesterov": Case(
        layout=Layout(fsdp=2, zero_stage=3),
        optimizer="sgd",
        recipe={"optimizer": {"nesterov": 1.0, "weight_decay": 0.1}},
    ),
    "adafactor 1": Case(layout=Layout(micro_batch_seqs=4), optimizer="adafactor"),
    "adafactor 3 zero-1": Case("tied", Layout(fsdp=3, zero_stage=1), optimizer="adafactor"),
    "adafactor 2 zero-2, other values": Case(
        layout=Layout(fsdp=2, zero_stage=2),
        optimizer="adafactor",
        recipe={
            "optimizer": {"beta2_decay": -0.5, "epsilon1": 1e-3, "epsilon2": 0.1, "clip": 1.05, "weight_decay": 0.2}
        },
    ),
    "adafactor tp 2 sp": Case(layout=Layout(tp=2, sequence_parallel=True, micro_batch_seqs=2), optimizer="adafactor"),
    "adafactor biased tp 2 zero-1": Case("biased", Layout(tp=2, fsdp=2, zero_stage=1), optimizer="adafactor"),
    "adafactor routed ep 4 whole experts tp 2 sp zero-3": Case(
        "routed", Layout(fsdp=2, ep=4, tp=2, etp=1, sequence_parallel=True, zero_stage=3), optimizer="adafactor"
    ),
    "adafactor tied pp 2 dualpipe_v zero-1": Case(
        "tied predicting",
        Layout(pp=2, num_virtual_stages=2, fsdp=2, zero_stage=1, schedule="dualpipe_v"),
        optimizer="adafactor",
    ),
    "muon 1": Case(layout=Layout(micro_batch_seqs=4), optimizer="muon"),
    "muon 3 zero-1": Case("tied", Layout(fsdp=3, zero_stage=1), optimizer="muon"),
    "muon 2 zero-2, plain momentum": Case(
        layout=Layout(fsdp=2, zero_stage=2), optimizer="muon", recipe={"optimizer": {"nesterov": 0.0, "momentum": 0.8}}
    ),
    "muon tp 4 of 2 key-value heads": Case(layout=Layout(tp=4, micro_batch_seqs=2), optimizer="muon"),
    "muon routed ep 4 whole experts tp 2 sp zero-3": Case(
        "routed", Layout(fsdp=2, ep=4, tp=2, etp=1, sequence_parallel=True, zero_stage=3), optimizer="muon"
    ),
    "muon pp 2 dualpipe zero-2": Case(
        "deep routed", Layout(pp=2, fsdp=2, zero_stage=2, schedule="dualpipe"), optimizer="muon"
    ),
    "adamw_8bit 1": Case("blocks", Layout(micro_batch_seqs=4), optimizer="adamw_8bit"),
    "adamw_8bit 3 zero-1": Case("blocks", Layout(fsdp=3, zero_stage=1), optimizer="adamw_8bit"),
    "adamw_8bit 2 zero-2, other values": Case(
        "tied",
        Layout(fsdp=2, zero_stage=2),
        optimizer="adamw_8bit",
        recipe={"optimizer": {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-4, "weight_decay": 0.3}},
    ),
    "adamw_8bit 3 zero-3": Case("moe", Layout(fsdp=3, zero_stage=3), optimizer="adamw_8bit"),
    "adamw_8bit tp 2 whose parts are blocks of their own": Case(
        layout=Layout(tp=2, micro_batch_seqs=2), optimizer="adamw_8bit", parts=2
    ),
    "adamw_8bit routed ep 2 tp 2 zero-2": Case(
        "routed blocks", Layout(fsdp=2, ep=2, tp=2, zero_stage=2), optimizer="adamw_8bit"
    ),
    "adamw_8bit tied pp 2 dualpipe_v zero-1": Case(
        "tied predicting",
        Layout(pp=2, num_virtual_stages=2, fsdp=2, zero_stage=1, schedule="dualpipe_v"),
        optimizer="adamw_8bit",
    ),
    "shampoo 1": Case(layout=Layout(micro_batch_seqs=4), optimizer="shampoo", recipe=EACH_STEP),
    "shampoo 3 zero-1": Case("tied", Layout(fsdp=3, zero_stage=1), optimizer="shampoo", recipe=EACH_STEP),
    "shampoo 2 zero-2, other values": Case(
        layout=Layout(fsdp=2, zero_stage=2),
        optimizer="shampoo",
        recipe={"optimizer": {"beta1": 0.7, "beta2": 0.8, "damping": 1e-3, "precondition_every": 2}},
    ),
    "shampoo tp 2 zero-3": Case("tied", Layout(tp=2, fsdp=2, zero_stage=3), optimizer="shampoo", recipe=EACH_STEP),
    "shampoo routed ep 4 whole experts tp 2 sp zero-3": Case(
        "routed", Layout(fsdp=2, ep=4, tp=2, etp=1, sequence_parallel=True, zero_stage=3), optimizer="shampoo"
    ),
    "shampoo pp 2 dualpipe zero-2": Case(
        "deep routed", Layout(pp=2, fsdp=2, zero_stage=2, schedule="dualpipe"), optimizer="shampoo", recipe=EACH_STEP
    ),
    "predicting, one process, accumulating": Case("predicting", Layout(micro_batch_seqs=3)),
    "predicting 3 uneven in each micro-batch": Case(
        "predicting", Layout(dp=3), num_seqs=7, recipe={"reduce_each_micro_batch": True}
    ),
    "predicting 2 zero-2": Case("predicting", Layout(fsdp=2, zero_stage=2, micro_batch_seqs=2)),
    "predicting 4 hybrid zero-3": Case("predicting", Layout(dp=2, fsdp=2, zero_stage=3, recompute="full")),
    "tied predicting 3 zero-1": Case("tied predicting", Layout(fsdp=3, zero_stage=1)),
    "adapted predicting 2 zero-3": Case("adapted predicting", Layout(fsdp=2, zero_stage=3)),
}
