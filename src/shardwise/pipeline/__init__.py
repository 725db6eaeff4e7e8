"""Pipeline schedules: the order in which the ranks of a pipeline run forward and backward passes of micro-batches.

A schedule is a table entry (`schedule.Schedule`): the numbers of stages and micro-batches that it supports, its action list,
and, where they exist, closed forms of its bubble and of its micro-batches in flight, for numbers or for arrays. An action list
has the passes of every rank in PyTorch's notation: `0F3` is the forward pass of micro-batch 3 through virtual stage 0, `B` a
whole backward pass, `I` and `W` its parts for activations and for weights. Lists are checked for deadlocks, played against the
durations of passes, and turned into ordered point-to-point messages.

Entry points:

- `pipeline.registry.get_schedule`, `pipeline.registry.build_actions`: a schedule by name, and its action list;
- `pipeline.clock.check_actions`: refuse a list that ranks cannot run;
- `pipeline.timeline.play_actions`: when each pass begins and ends, the bubble, and peak activations;
- `pipeline.messages.order_messages`: sends and receives in an order that both ends of a channel can post;
- `torch_csv.to_csv`, `torch_csv.from_csv`: PyTorch's file format of action lists.

Schedules know neither model nor layout. May import: `values`. `layout` reads the closed forms, so this room is below it.
Imports no NumPy and no framework.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
