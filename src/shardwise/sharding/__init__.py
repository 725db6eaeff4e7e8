"""Named-axis shardings, as text and as arithmetic: parse them, reshard them, and find the cheapest sharded matmul.

`A[I_X, J_Y]{U_Z}`: the array A has dims I and J, I is split over the mesh axis X and J over Y, and each device along Z holds
a partial sum. The notation is the scaling book's (S2, "Sharded matrices"). Entry points: `parse_tensor`, `Spec`, `Mesh`,
`reshard`, `contract`, and `matmul_search`. Imports `values` alone, neither NumPy nor a framework, and no prices: these are
passed in.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
