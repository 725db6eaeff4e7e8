"""`kernels`: the same function in several ways, from separate kernels to one at the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from shardwise import measure
from shardwise.hardware import Chip
from shardwise.present.verb import Argument, verb
from shardwise.values import Progress, argument_label, ignore_progress, parse_count

if TYPE_CHECKING:
    from shardwise.measure import KernelLadders

# A test compares them with `measure.kernel_ladders.ladders.LADDERS`; the help loads nothing.
LADDER_NAMES = (
    "elu", "divergence", "softmax", "norm", "gated-cast", "launches", "product", "deep-product", "batched-product", "layer-batch",
    "int8-layer-batch", "attention", "attention-gradient",
)  # fmt: skip


@verb(
    description=f"""Kernels in several ways, from separate ones that pass through memory to one at the roofline: what each reads
and writes, and what each step teaches. On a GPU with Triton every rung is run, checked and timed.

ladders: {", ".join(LADDER_NAMES)}""",
    examples=(
        "shardwise kernels softmax",
        "shardwise kernels product --chip b200 --compile-for 100",
        "shardwise kernels attention --json",
    ),
    group_order=("kernels", "measurement", "output"),
)
def kernels(
    names: Annotated[
        Sequence[str],
        Argument(
            group="kernels", metavar="NAME", variadic=True, optional=True, completes=lambda _: LADDER_NAMES,
            help="ladders (default: all)",
        ),
    ] = (),
    chip: Annotated[
        str | Chip,
        Argument(
            flag="--chip", group="kernels", metavar="CHIP", completes="chips",
            help="a chip of the catalogue, whose roofline is drawn on (default: h100)",
        ),
    ] = "h100",
    device: Annotated[
        Literal["auto", "none", "cuda"],
        Argument(
            flag="--device", group="measurement", choices=("auto", "none", "cuda"),
            help="run the rungs on a GPU (default: where there is one)",
        ),
    ] = "auto",
    compile_for: Annotated[
        Sequence[int | str],
        Argument(
            flag="--compile-for", group="measurement", repeat=True, metavar="SM",
            help="compile the kernels for a compute capability, 80, 90 or 100, without a GPU, and say what they take",
        ),
    ] = (),
    progress: Progress = ignore_progress,
) -> KernelLadders:  # fmt: skip
    """Return ladders of kernels on a chip: FLOPs, bytes and roofline of each rung, and its time on a GPU.

    Raises `InputError` for an unknown ladder, chip or compute capability, and for a GPU or Triton that is not there.

    >>> import shardwise as sw
    >>> (ladder,) = sw.kernels(["elu"], device="none").ladders
    >>> [rung.name for rung in ladder.rungs]
    ['separate kernels', 'compiled', 'one kernel, strided', 'one kernel, coalesced']
    """
    capabilities = [parse_count(value, label=argument_label("compile_for", "--compile-for")) for value in compile_for]
    return measure.run_workbench(names, chip, device=device, compile_for=capabilities, progress=progress)
