"""What a layout costs, how much memory it takes, and what bounds a kernel."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal, overload

from shardwise.hardware import Chip
from shardwise.layout import Layout
from shardwise.model import Architecture, Job
from shardwise.present.api.given import Model, Where, architecture_of, layout_of, resolved
from shardwise.price import Estimate, Problem
from shardwise.values import InputError, did_you_mean, parse_count, raise_problems, run_all

if TYPE_CHECKING:
    from shardwise.book_formulas import KernelRoofline
    from shardwise.book_formulas.rooflines import BlockRoofline, Origin

KernelName = Literal["dot", "elementwise", "matmul", "bmm", "moe", "attention"]


def estimate(
    model: Model, cluster: Where, job: Job | None = None, layout: str | Layout | None = None, *, stack: str | None = None,
    **job_fields: Any,
) -> Estimate:  # fmt: skip
    """What one layout costs: seconds of a step and bytes of a device, by term.

    With a `stack`, or on a calibrated cluster, the step is predicted with a 90% interval; otherwise it is a lower bound.

    Raises `InputError` for an unknown model, cluster or stack, a wrong job, and with every rule that the layout breaks;
    `MissingValueError` for a rate without a source.

    >>> import shardwise as sw
    >>> found = sw.estimate(
    ...     "llama-3-8b", "h100:8", layout="fsdp=8 recompute=full", global_batch_tokens="512Ki", seq_len="8Ki"
    ... )
    >>> found.fits, found.bound
    (True, 'compute')
    >>> abs(sum(found.time.values()) / found.step_time_s - 1) < 1e-12
    True
    """
    from shardwise.layout import layout_as_run, stack_of
    from shardwise.price.estimate import estimate as price
    from shardwise.search.recompute_budget import fit_recompute_budget

    chosen, (architecture, where, what) = run_all(
        lambda: layout_of(layout), lambda: resolved(model, cluster, job, stack, job_fields)
    )
    architecture.require_positions(what.seq_len)
    problem = Problem(architecture, where, what)
    return price(
        problem,
        fit_recompute_budget(problem, layout_as_run(stack_of(where), chosen)),
    )


@overload
def roofline(
    kernel: KernelName, chip: str | Chip, *, dtype: str = ..., weights: str | None = ..., origin: Origin = ...,
    causal: bool = ..., fused: bool = ..., **sizes: int | str,
) -> KernelRoofline: ...  # fmt: skip
@overload
def roofline(
    kernel: Architecture, chip: str | Chip, *, dtype: str = ..., weights: str | None = ..., origin: Origin = ...,
    causal: bool = ..., fused: bool = ..., **sizes: int | str,
) -> BlockRoofline: ...  # fmt: skip
@overload
def roofline(
    kernel: str, chip: str | Chip, *, dtype: str = ..., weights: str | None = ..., origin: Origin = ...,
    causal: bool = ..., fused: bool = ..., **sizes: int | str,
) -> KernelRoofline | BlockRoofline: ...  # fmt: skip
def roofline(
    kernel: str | Architecture, chip: str | Chip, *, dtype: str = "bf16", weights: str | None = None, origin: Origin = "hbm",
    causal: bool = False, fused: bool = True, **sizes: int | str,
) -> KernelRoofline | BlockRoofline:  # fmt: skip
    """The roofline of a kernel on a chip (FLOPs, bytes, intensity, seconds), or of every kernel of a model's block.

    Sizes are keywords by letter: "matmul" B, D, F; "attention" T, N, H and, if they differ, S, K; and so on (`shardwise roofline
    --help`). A model takes T, the tokens of a sequence, and B, the number of sequences (1). `dtype` is the format of activations
    and arithmetic, `weights` that of a product's weight if it differs; `origin` is where operands lie ("hbm", "host", "vmem");
    `causal` and `fused` apply to attention. Peaks and bandwidths are the vendor's.

    Raises `InputError` for an unknown kernel, letter, format or option, `MissingValueError` for a rate without a source. Source:
    "How to Scale Your Model", All About Rooflines.

    >>> import shardwise as sw
    >>> found = sw.roofline("matmul", "tpu-v5e", B=240, D=8192, F=28672)
    >>> found.bound, round(found.cost.intensity), round(found.critical_size)
    ('memory', 231, 253)
    >>> block = sw.roofline("llama-3-70b", "h100", T=8192)
    >>> block.num_seqs, block.operations[1].bound
    (1, 'compute')
    """
    from shardwise.book_formulas import KERNEL_FORMS, block_roofline, kernel_roofline, load_chip_and_links

    one = chip if isinstance(chip, Chip) else load_chip_and_links(chip)[0]
    counts = {letter: parse_count(size, label=f"SIZES: {letter}") for letter, size in sizes.items()}
    if isinstance(kernel, str) and kernel in KERNEL_FORMS:
        return kernel_roofline(one, kernel, counts, dtype, weights, origin=origin, causal=causal, fused=fused)
    wrong = block_problems(counts)
    hint = did_you_mean(kernel, KERNEL_FORMS)
    model = _kernel_model(
        kernel, f"kernel: found {kernel!r}{hint}; one of {', '.join(KERNEL_FORMS)}, or a model is required"
    )
    usual = (dtype, weights, origin, causal, fused) == ("bf16", None, "hbm", False, True)
    wrong += (
        [] if usual else ["a model's block is bf16 from HBM, its attention causal and flash; options are for kernels"]
    )
    raise_problems(wrong)
    return block_roofline(model, one, counts.get("B", 1), counts["T"])


def block_problems(letters: Collection[str]) -> list[str]:
    """What is wrong with the letters of the sizes of a model's block."""
    wrong = [f"SIZES: a block has no {letter!r}; T is required, B optional" for letter in letters if letter not in "BT"]
    return wrong + ([] if "T" in letters else ["SIZES: T missing; T is required, B optional, such as B=4,T=8192"])


def _kernel_model(kernel: str | Architecture, problem: str) -> Architecture:
    try:
        return architecture_of(kernel)
    except InputError as error:
        raise InputError(problem, *error.problems) from None
