"""Search answers a planning question (a model and a job on a cluster) with a `Plan`: a layout, its estimate, and why others
lost.

Every legal layout is priced with NumPy arrays (`vectorised`). Among the fastest, the simplest that predictions cannot tell from
the best is taken, and its pipeline stages are balanced. Around one plan the room builds comparisons of clusters, sweeps over a
value, plans to a target loss, and explanations (`explain`).

Entry points: `planner.make_plan`, `plan.plan_layout`, `vectorised.search_layouts.search_layouts`,
`compare_clusters.plan_clusters`, `plan_sweep.plan_cases`, `plan_to_target_loss.plan_to_loss`,
`explain.explanation.explain_plan`, `plan_file.dump_plan` and `load_plan`.

May import `values`, `hardware`, `model`, `pipeline`, `records`, `batch_size`, `layout`, `derive`, `step`, `price` and
`book_formulas`; never `run`, `measure`, `present` or torch. Inside: `plan`, `vectorised` < `verdicts`, `balance_stages` <
`planner` < `nearest_fitting_layout`, `loss_time`, `plan_sweep`, `explain` < `compare_clusters` < `plan_to_target_loss` <
`payloads`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
