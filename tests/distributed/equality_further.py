"""More such layouts: structures and optimizers with data parallelism and axes that `equality_cases` has with others."""

from __future__ import annotations

from equality_cases import EACH_STEP
from training import Case

from shardwise.layout.layout import Layout

FURTHER = {
    "3 zero-1 after": Case(layout=Layout(fsdp=3, zero_stage=1), recipe={"reduction": "after"}),
    "4 zero-3": Case(layout=Layout(fsdp=4, zero_stage=3)),
    "4 hybrid zero-1": Case(layout=Layout(dp=2, fsdp=2, zero_stage=1)),
    "4 hybrid zero-2": Case(layout=Layout(dp=2, fsdp=2, zero_stage=2)),
    "4 hybrid zero-3": Case(layout=Layout(dp=2, fsdp=2, zero_stage=3)),
    "tied 2 bucketed": Case("tied", Layout(dp=2)),
    "tied 3 zero-3": Case("tied", Layout(fsdp=3, zero_stage=3)),
    "moe 3 zero-1": Case("moe", Layout(fsdp=3, zero_stage=1)),
    "moe 2 zero-2": Case("moe", Layout(fsdp=2, zero_stage=2)),
    "full recompute 2 zero-3": Case(layout=Layout(fsdp=2, zero_stage=3, recompute="full")),
    "moe full recompute 2 zero-3": Case("moe", Layout(fsdp=2, zero_stage=3, recompute="full")),
    "adapted 2 bucketed": Case("adapted", Layout(dp=2)),
    "biased 2 zero-3": Case("biased", Layout(fsdp=2, zero_stage=3)),
    "flat norms 2 zero-2": Case("flat norms", Layout(fsdp=2, zero_stage=2)),
    "adapted 2 zero-3": Case("adapted", Layout(fsdp=2, zero_stage=3)),
    "tp 2 fsdp 2 zero-2": Case(layout=Layout(tp=2, fsdp=2, zero_stage=2)),
    "tied tp 2 sp zero-1": Case("tied", Layout(tp=2, fsdp=2, zero_stage=1, sequence_parallel=True)),
    "adapted tp 2 sp": Case("adapted", Layout(tp=2, sequence_parallel=True, micro_batch_seqs=2)),
    "biased cp 2": Case("biased", Layout(cp=2, dp=2)),
    "routed ep 2 tp 2": Case("routed", Layout(fsdp=2, ep=2, tp=2, zero_stage=1)),
    "predicting cp 2 zero-1": Case("predicting", Layout(cp=2, zero_stage=1, micro_batch_seqs=2)),
    "lion tp 2 sp": Case(layout=Layout(tp=2, sequence_parallel=True, micro_batch_seqs=2), optimizer="lion"),
    "routed ep 2 cp 2": Case("routed", Layout(fsdp=2, ep=2, cp=2, zero_stage=3)),
    "uneven vocabulary, predicting tp 4": Case("uneven predicting", Layout(tp=4, micro_batch_seqs=2)),
    "uneven vocabulary, adapted tp 2 zero-3": Case("uneven adapted", Layout(tp=2, fsdp=2, zero_stage=3)),
    "lion 2 bucketed": Case(layout=Layout(dp=2, micro_batch_seqs=2), optimizer="lion"),
    "adafactor 2 bucketed": Case(layout=Layout(dp=2, micro_batch_seqs=2), optimizer="adafactor"),
    "adafactor 3 zero-3": Case("moe", Layout(fsdp=3, zero_stage=3), optimizer="adafactor"),
    "adafactor 4 hybrid zero-3": Case(
        layout=Layout(dp=2, fsdp=2, zero_stage=3, recompute="full"), optimizer="adafactor"
    ),
    "adafactor tp 4 of 2 key-value heads": Case(layout=Layout(tp=4, micro_batch_seqs=2), optimizer="adafactor"),
    "adafactor tp 2 zero-3": Case("tied", Layout(tp=2, fsdp=2, zero_stage=3), optimizer="adafactor"),
    "adafactor uneven vocabulary tp 2 zero-2": Case(
        "uneven", Layout(tp=2, fsdp=2, zero_stage=2), optimizer="adafactor"
    ),
    "adafactor a rank without a word, zero-3": Case(
        "nine words", Layout(tp=4, fsdp=2, zero_stage=3), optimizer="adafactor"
    ),
    "adafactor routed ep 2 tp 2 sp zero-1": Case(
        "routed", Layout(fsdp=2, ep=2, tp=2, sequence_parallel=True, zero_stage=1), optimizer="adafactor"
    ),
    "adafactor predicting zero-2": Case("predicting", Layout(fsdp=2, zero_stage=2), optimizer="adafactor"),
    "adafactor pp 2 dualpipe zero-2": Case(
        "deep routed", Layout(pp=2, fsdp=2, zero_stage=2, schedule="dualpipe"), optimizer="adafactor"
    ),
    "muon 2 bucketed": Case(layout=Layout(dp=2, micro_batch_seqs=2), optimizer="muon"),
    "muon 3 zero-3": Case("moe", Layout(fsdp=3, zero_stage=3), optimizer="muon"),
    "muon 4 hybrid zero-3": Case(layout=Layout(dp=2, fsdp=2, zero_stage=3, recompute="full"), optimizer="muon"),
    "muon tp 2 sp": Case(layout=Layout(tp=2, sequence_parallel=True, micro_batch_seqs=2), optimizer="muon"),
    "muon tp 2 zero-1": Case(layout=Layout(tp=2, fsdp=2, zero_stage=1), optimizer="muon"),
    "muon tp 2 zero-3": Case("tied", Layout(tp=2, fsdp=2, zero_stage=3), optimizer="muon"),
    "muon routed ep 2 tp 2 sp zero-1": Case(
        "routed", Layout(fsdp=2, ep=2, tp=2, sequence_parallel=True, zero_stage=1), optimizer="muon"
    ),
    "muon predicting zero-2": Case("predicting", Layout(fsdp=2, zero_stage=2), optimizer="muon"),
    "adamw_8bit 2 bucketed": Case("blocks", Layout(dp=2, micro_batch_seqs=2), optimizer="adamw_8bit"),
    "adamw_8bit 4 hybrid zero-3": Case(
        "blocks", Layout(dp=2, fsdp=2, zero_stage=3, recompute="full"), optimizer="adamw_8bit"
    ),
    "adamw_8bit tp 2 sp": Case(
        "blocks", Layout(tp=2, sequence_parallel=True, micro_batch_seqs=2), optimizer="adamw_8bit"
    ),
    "adamw_8bit tp 4 of 2 key-value heads": Case("blocks", Layout(tp=4, micro_batch_seqs=2), optimizer="adamw_8bit"),
    "adamw_8bit tp 2 zero-3": Case("blocks", Layout(tp=2, fsdp=2, zero_stage=3), optimizer="adamw_8bit"),
    "adamw_8bit adapted 2 zero-3": Case("adapted", Layout(fsdp=2, zero_stage=3), optimizer="adamw_8bit"),
    "adamw_8bit pp 2 1f1b zero-1": Case(
        "blocks", Layout(pp=2, fsdp=2, zero_stage=1, schedule="1f1b"), optimizer="adamw_8bit"
    ),
    "shampoo 2 bucketed": Case(layout=Layout(dp=2, micro_batch_seqs=2), optimizer="shampoo"),
    "shampoo 3 zero-3": Case("moe", Layout(fsdp=3, zero_stage=3), optimizer="shampoo"),
    "shampoo 4 hybrid zero-3": Case(
        layout=Layout(dp=2, fsdp=2, zero_stage=3, recompute="full"), optimizer="shampoo", recipe=EACH_STEP
    ),
    "shampoo tp 2 sp": Case(
        layout=Layout(tp=2, sequence_parallel=True, micro_batch_seqs=2), optimizer="shampoo", recipe=EACH_STEP
    ),
    "shampoo routed ep 2 zero-1": Case(
        "routed", Layout(fsdp=2, ep=2, zero_stage=1, micro_batch_seqs=2), optimizer="shampoo", recipe=EACH_STEP
    ),
    "predicting 2 bucketed": Case("predicting", Layout(dp=2, micro_batch_seqs=2, recompute="selective")),
    "predicting 2 by bias": Case("predicting", Layout(dp=2), recipe={"balance": "bias", "balance_rate": 0.05}),
    "predicting 3 zero-1": Case("predicting", Layout(fsdp=3, zero_stage=1)),
    "predicting 3 zero-3": Case("predicting", Layout(fsdp=3, zero_stage=3)),
    "tied predicting 2 per parameter": Case("tied predicting", Layout(dp=2), recipe={"reduction": "per_parameter"}),
    "tied predicting 2 zero-3": Case("tied predicting", Layout(fsdp=2, zero_stage=3)),
}
