"""Serving: what one pass of an inference engine costs, and what a configuration gives users under a workload.

A workload of requests takes the place of a training job's batch (`workload`), and a serving layout says how one instance of the
engine is split and how many instances there are (`serving_layout`). Weights rest in the formats of a checkpoint (`formats`).
A serving problem is a model, a cluster, a workload and an engine (`serving_problem`).

What a pass computes, reads and sends is derived from the model's program of inference (`inference_pass`, of many rows at once
`table_work`) and priced at a chip's rates under an engine's constants (`kernel_seconds`,
`pass_cost`, `engines`), what memory holds follows from each engine's rule (`memory`), and latencies from the steady state of an
instance (`steady_state`), or of two pools where prefill and decode run on instances of their own (`pools`, `pooled_layout`).

Entry points: `estimate.estimate_serving` for one layout, `estimate.estimate_table` for many,
`pools.estimate_pools` for pools; `workload.Workload`,
`serving_layout.ServingLayout`, `serving_problem.ServingProblem`. May import: `price`,
`book_formulas` and what is below them; neither torch nor jax.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
