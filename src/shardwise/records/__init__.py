"""Records of training runs as plain data: the folder of a run and its files, and logs of other frameworks.

`RunFolder` names the files of a run. `step_log`, `step_memory_and_collectives`, `step_trace` and `run_summary` read and write
them; `logs` reads what torchtitan, Megatron-LM, NeMo, nanotron and MaxText log, and TensorBoard and W&B. The room imports
`values`, `sharding` and nothing above them, and no framework.
"""
