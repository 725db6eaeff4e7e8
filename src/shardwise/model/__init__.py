"""What is trained.

A catalogue entry or a Hugging Face `config.json` becomes an `Architecture`. A model is a number of units (embedding, block,
head), each of which becomes a program of operations on named tensors. The backward program, the optimizer's program and the
counts of parameters and FLOPs follow from it. The room also holds what a job chooses: the optimizer and the recompute policy.

Entry points: `load.load_model`, the unit programs of `decoder`, the transpose in `backward`, `optimizer_program`,
`parameters_and_flops.num_params`. May import: values, sharding.
"""
