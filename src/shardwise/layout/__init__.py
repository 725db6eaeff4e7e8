"""Layouts: how a model is distributed.

The degrees of the mesh axes and the choices that go with them are one `Layout`. The room says where each axis lies on the
network, how many layers each pipeline stage has, and by which rules a model and a cluster can run a layout. A
`ShardingScheme` is all of a layout, a model and a job that a derivation reads.

Entry points: `layout.Layout.parse`, `sharding_scheme.make_sharding_scheme`, `rules.table.layout_rules`,
`rules.table.violations`, `rules.table.require_legal`. May import: values, sharding, hardware, model, pipeline.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
