"""Rooflines of kernels and of a model's block on one chip, at the peaks and bandwidths that vendors state, as in the books."""

from shardwise.book_formulas.rooflines.blocks import BlockRoofline, OperationTime, block_roofline
from shardwise.book_formulas.rooflines.chip_bandwidths import ORIGINS, Origin, bandwidths, chip_and_links, transfers
from shardwise.book_formulas.rooflines.kernels import FORMS, Form, KernelRoofline, kernel_form, kernel_roofline

__all__ = [
    "FORMS",
    "ORIGINS",
    "BlockRoofline",
    "Form",
    "KernelRoofline",
    "OperationTime",
    "Origin",
    "bandwidths",
    "block_roofline",
    "chip_and_links",
    "kernel_form",
    "kernel_roofline",
    "transfers",
]
