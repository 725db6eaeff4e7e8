"""Rooflines of kernels and of a model's block on one chip, at the peaks and bandwidths that vendors state, as in the books."""

from shardwise.book_formulas.rooflines.blocks import BlockRoofline, OperationTime, block_roofline
from shardwise.book_formulas.rooflines.kernels import (
    KERNEL_FORMS,
    KernelForm,
    KernelRoofline,
    get_kernel_form,
    kernel_roofline,
)
from shardwise.book_formulas.rooflines.operand_and_link_rates import (
    ORIGINS,
    Origin,
    link_bandwidths,
    load_chip_and_links,
    transfer_rates,
)

__all__ = [
    "KERNEL_FORMS",
    "ORIGINS",
    "BlockRoofline",
    "KernelForm",
    "KernelRoofline",
    "OperationTime",
    "Origin",
    "block_roofline",
    "get_kernel_form",
    "kernel_roofline",
    "link_bandwidths",
    "load_chip_and_links",
    "transfer_rates",
]
