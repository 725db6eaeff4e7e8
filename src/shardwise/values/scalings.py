"""Scalings of low-precision products: which elements of an operand share a scale, and what kind of number a scale is. Loads no
NumPy; `values.quantization` computes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.values.errors import lookup

ScaleBlock = tuple[int | None, int | None]  # rows and columns that share a scale; None: all of them
ScaleKind = Literal["fp32", "power_of_two", "e8m0", "e4m3"]
WHOLE_MATRIX: ScaleBlock = (None, None)
MIN_AMAX = 1e-12  # so that scales stay finite; source: torchao, float8_utils.EPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Scaling of a product: which elements of an operand and of a weight share a scale, and what kind of number a scale is.

    `fp32`: the format's largest number over the block's amax; `power_of_two`: the next power of two below; `e8m0`: a power of
    two from the exponents alone; `e4m3`: a number in E4M3, times one in fp32 for the whole matrix. `is_delayed`: amax is that
    of earlier steps.
    """

    name: str
    block: ScaleBlock
    weight_block: ScaleBlock
    kind: ScaleKind
    source: str
    is_delayed: bool = False

    @property
    def scales_inside_matmul(self) -> bool:
        """True if scales are exact in few bits, so that the matmul applies them while it accumulates."""
        return self.kind in ("e8m0", "e4m3")

    def producer_forms(self, *, has_rows: bool) -> tuple[Literal["rows", "columns"], ...]:
        """Return the forms of a result (`derive.producer_casts`) that the kernel which makes it can cast: a scale has to follow
        from elements that the kernel has at once, which are whole rows with `has_rows`, else a tile.

        Columns need blocks of some rows each, as a whole column has elements of all rows; and a scale of the whole matrix needs
        its largest magnitude first.

        >>> [SCALINGS[name].producer_forms(has_rows=True) for name in ("mx", "row", "nvfp4", "delayed")]
        [('rows', 'columns'), ('rows',), (), ()]
        """
        if self.block[0] != 1 or self.kind == "e4m3":
            return ()
        if self.block[1] is None:
            return ("rows",) if has_rows else ()
        return ("rows", "columns")


_TE = "NVIDIA, Transformer Engine user guide, FP8 recipes"
SCALINGS = {
    scaling.name: scaling
    for scaling in (
        Scaling(name="tensor", block=WHOLE_MATRIX, weight_block=WHOLE_MATRIX, kind="fp32", source=f"{_TE}: Float8CurrentScaling"),
        Scaling(
            name="delayed", block=WHOLE_MATRIX, weight_block=WHOLE_MATRIX, kind="fp32", is_delayed=True,
            source=f"{_TE}: DelayedScaling",
        ),
        Scaling(
            name="row", block=(1, None), weight_block=(1, None), kind="power_of_two",
            source="torchao, Float8LinearConfig.from_recipe_name('rowwise'): a scale of each row, a power of two",
        ),
        Scaling(
            name="tile", block=(1, 128), weight_block=(128, 128), kind="fp32",
            source="DeepSeek-AI 2024, DeepSeek-V3 (arXiv 2412.19437), section 3.3.2",
        ),
        Scaling(
            name="tile_power_of_two", block=(1, 128), weight_block=(128, 128), kind="power_of_two",
            source=f"{_TE}: Float8BlockScaling, whose scales are powers of two by default",
        ),
        Scaling(
            name="mx", block=(1, 32), weight_block=(1, 32), kind="e8m0",
            source="OCP Microscaling Formats (MX) Specification 1.0, section 6.3",
        ),
        Scaling(
            name="nvfp4", block=(1, 16), weight_block=(16, 16), kind="e4m3",
            source="NVIDIA 2025, Pretraining Large Language Models with NVFP4 (arXiv 2509.25149), appendix C",
        ),
    )
}  # fmt: skip


def get_scaling(name: str) -> Scaling:
    """Return a scaling by name. Raises `InputError` that lists the names."""
    return lookup(SCALINGS, name, "scaling")
