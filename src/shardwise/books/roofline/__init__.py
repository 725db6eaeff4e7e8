"""Rooflines of kernels and of a model's block on one chip, at the peaks and bandwidths that vendors state, as in the books."""

from shardwise.books.roofline.block import BlockRoofline, OperationTime, block_roofline
from shardwise.books.roofline.chip import ORIGINS, Origin, bandwidths, chip_and_links, transfers
from shardwise.books.roofline.forms import FORMS, Form, kernel_form
from shardwise.books.roofline.kernel import KernelRoofline, kernel_roofline

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
