"""Names of the terms by which the memory of a step is measured, those of a plan's memory among them."""

# The terms of a plan's memory that storages have here; `inputs` are unnamed tensors that existed before.
PARAMETERS, GRADIENTS, MASTER, OPTIMIZER, GATHERED = "parameters", "gradients", "master", "optimizer", "gathered"
ACTIVATIONS, LOGITS, WORKSPACE, INPUTS = "activations", "logits", "workspace", "inputs"
TERMS = (PARAMETERS, GRADIENTS, MASTER, OPTIMIZER, GATHERED, ACTIVATIONS, LOGITS, WORKSPACE, INPUTS)
