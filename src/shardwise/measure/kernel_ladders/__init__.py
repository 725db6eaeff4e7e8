"""Ladders of kernels: the same function in several ways, from the plain one to the one at the roofline.

Each rung has its FLOPs and what it loads and stores as closed forms, which tests count in Triton's interpreter, and runs on
a GPU where there is one. Only `triton_*` modules import Triton; all but `ladder` and `roofline_times` import PyTorch.
"""
