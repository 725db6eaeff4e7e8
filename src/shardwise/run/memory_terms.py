"""Names of the terms by which the memory of a step is measured, those of a plan's memory among them."""

# Terms of a plan's memory, but `inputs`: tensors without a term that existed before the step.
PARAMETERS, GRADIENTS, MASTER, OPTIMIZER, GATHERED = "parameters", "gradients", "master", "optimizer", "gathered"
ACTIVATIONS, LOGITS, WORKSPACE, INPUTS = "activations", "logits", "workspace", "inputs"
TERMS = (PARAMETERS, GRADIENTS, MASTER, OPTIMIZER, GATHERED, ACTIVATIONS, LOGITS, WORKSPACE, INPUTS)
