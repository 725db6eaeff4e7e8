"""Measurements, and what follows from them: micro-benchmarks, calibrated constants, and runs compared with their plans.

Imports everything but `verify` and `present`. This file imports nothing."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
