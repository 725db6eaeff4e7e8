"""Chips, networks, clusters and software stacks: the catalogue with a source for each value, users' own cluster files,
calibrated constants, and the time of each collective on each network.

Entry points: `cluster_loading` (`load_cluster`), `chips` (`load_chip`, `Chip`), `cluster` (`Cluster`), `stacks`,
`network.collective_times` (`collective_report`). Imports `values` and `sharding`; knows no model, and `model` does not know
it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
