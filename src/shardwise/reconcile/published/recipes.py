"""From a row's number format, software and notes to a precision recipe."""

from __future__ import annotations

import re

from shardwise.reconcile.published.facts import Facts, SkippedRow

# A row names torchtitan, or the nightly build of PyTorch that it ran with.
TORCHTITAN = r"torchtitan|^torch [0-9a-f]{7,}\b"
# Precision recipes by the sources' names for a format and what the software says; the first line that fits. fp16 has the
# widths and the peak of bf16. NeMo scales fp8 with the maxima of earlier steps until 2025, Megatron Bridge with current ones;
# torchtitan casts with torchao. What MaxText's recipes for Trillium call fp8 sets quantization=int8.
RECIPES = (
    (r"|bf16|fp16|fp16-or-bf16", r"", "bf16"),
    (r"fp32", r"", "fp32"),
    (r"fp8-rowwise", r"\btorch", "fp8_torchao_rowwise"),
    (r"fp8", TORCHTITAN, "fp8_torchao"),
    (r"fp8", r"bridge|nemo container", "fp8_current"),
    (r"fp8", r"", "fp8_delayed"),
    (r"mxfp8", r"", "mxfp8"),
    (r"nvfp4", r"", "nvfp4"),
    (r"int8.*", r"maxtext", "int8_aqt"),
)


def recipe_of(facts: Facts) -> str:
    """The name of the precision recipe. Raises `SkippedRow` for a format that none has."""
    dtype, software = facts.text("dtype").lower(), facts.text("software").lower()
    found = (name for format_, stack, name in RECIPES if re.fullmatch(format_, dtype) and re.search(stack, software))
    recipe = next(found, None)
    if recipe is None:
        raise SkippedRow("no precision recipe", dtype[:40])
    return _accumulated(facts, software) if recipe == "bf16" else recipe


def _accumulated(facts: Facts, software: str) -> str:
    """Of bf16 recipes the one whose gradients are kept and reduced as the software or the row says."""
    if "deepspeed" in software:
        return "bf16_fp32_gradients"  # DeepSpeed's BF16 optimizer adds up an fp32 copy beside the bf16 gradients
    if re.search(r"fp32 grad", facts.text("notes")):
        return "bf16_fp32_main_gradients"
    if re.search(TORCHTITAN, software) or "mixed precision" in facts.text("notes"):
        return "bf16_fp32_reduction"  # of llm-foundry: Composer's mixed_precision DEFAULT, where PURE reduces in bf16
    return "bf16"
