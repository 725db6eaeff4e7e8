"""Names of the terms of an estimate, in display order, whose rules are in `price.estimate_terms`, and of those by which the
memory of a step is measured.
"""

TIME_TERMS = (
    "forward", "backward", "recompute",  # compute of the worst stage
    "tp", "cp", "ep", "pp", "fsdp", "dp", "control",  # exposed communication, by axis
    "host",  # transfers to and from the memory of the host, where they show
    "bubble", "optimizer",
)  # fmt: skip
COMMUNICATION_TERMS = ("tp", "cp", "ep", "pp", "fsdp", "dp")  # of these, traffic by axis
MEMORY_TERMS = (
    "parameters", "gradients", "master", "optimizer", "activations", "workspace", "gathered", "logits", "buffers", "runtime",
)  # fmt: skip

# Terms of a plan's memory, but `inputs`: tensors without a term that existed before the step.
PARAMETERS, GRADIENTS, MASTER, OPTIMIZER, GATHERED = "parameters", "gradients", "master", "optimizer", "gathered"
ACTIVATIONS, LOGITS, WORKSPACE, INPUTS = "activations", "logits", "workspace", "inputs"
MEASURED_MEMORY_TERMS = (PARAMETERS, GRADIENTS, MASTER, OPTIMIZER, GATHERED, ACTIVATIONS, LOGITS, WORKSPACE, INPUTS)
