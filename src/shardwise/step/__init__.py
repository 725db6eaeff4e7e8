"""The instruction list of one device: kernels, collectives that are started early and waited for late, frees.

The list is lowered from a derived program per unit (embedding, block or head of a model) and pass, with sizes as expressions in
the dims of the model and the degrees of the layout, so that one list is priced, searched, simulated, drawn and executed. The room
also names a rank's parameters, the flat arrays that ZeRO and gradient buckets move, and every collective of a step.

How a list is made: neighbouring elementwise operations become one kernel (`kernel_fusion`), derived communication on weights
becomes collectives on flat arrays (`flat_arrays`, `collectives`), and starts, waits and frees are placed around the kernels
(`unit_instructions`). A ring of the derivation is one instruction, which stands for those of its collectives and kernels;
`liveness` follows the tensors through a backward pass.

Entry points:

- `step.unit_instructions.lower_unit`: the instructions of a unit by pass;
- `step.rank_program.RankProgram`: all that one rank holds and runs, in numbers;
- `step.issued_collectives.count_collectives`: every collective of a step, with its count;
- `step.liveness.live_sets`: live tensors of a backward pass.

May import: `derive`, `layout`, `pipeline`, `model`, `sharding`, `values`. Imports no framework: engines bind the instructions.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
