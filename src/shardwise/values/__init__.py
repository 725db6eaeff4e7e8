"""Values that every other room is written in: errors, units, number formats, quantization, precision recipes, and polynomials of
sizes.

Entry points: `errors` (`InputError`, `ShardwiseError`), `units` (`parse_quantity`, `format_bytes`), `dtypes`
(`bytes_per_element`, `NumberFormat`), `precision` (`Precision`, `PRECISIONS`), `symbolic` (`Polynomial`). Imports nothing of
Shardwise but its own modules; only `quantization` loads NumPy at import, and nothing here loads a framework.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
