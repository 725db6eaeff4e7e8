"""Kinds of operation: contract, map (elementwise, with or without a reduction), lookup, scatter, scan, route, carry, and
function of whole matrices.

Each kind knows three things: which shardings it needs and gives (`propagate_sharding`), its transpose (`gradients`), and what
it costs (`flops`; bytes are those of its operands). Layouts, costs and executors only ask these.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
