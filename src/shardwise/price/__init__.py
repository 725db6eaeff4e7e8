"""Seconds and bytes of a layout: roofline times of kernels, link times of collectives, device memory, as named terms.

Every term has its formula, its inputs and its source. The same code prices one layout with numbers and a table of layouts with
arrays. A layout is priced unit by unit (embedding, block or head of a model): the expressions of a unit's instructions are
evaluated (`unit_cost`, `unit_memory`), the units of a pipeline stage are added up (`stage_contents`, `step_time`,
`device_memory`), and the slowest stage and the fullest device give the terms of the estimate (`estimate_terms`). `simulation`
plays the instructions on streams; `training_run` turns step time into days, dollars and energy.

Entry points:

- `estimate.estimate`: an `Estimate` of one layout;
- `layout_pricer.Pricing`: the same, stage by stage, with the explanation of each term;
- `unit_cost.UnitPricer`: columns of costs of one unit, for a search over tables of layouts;
- `simulation.result.simulate`: a step on simulated streams;
- `product.price_product`: one sharded einsum (`matmul`, `reshard`);
- `training_run.training_run`: a whole run.

May import: `step`, `hardware`, `batch_size` and what is below them. Imports no presentation but that of its own values, which
`present` takes over, and neither NumPy nor a framework.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
