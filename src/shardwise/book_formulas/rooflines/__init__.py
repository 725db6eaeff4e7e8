"""Rooflines of kernels and of a model's block on one chip, at the peaks and bandwidths that vendors state, as in the books."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
