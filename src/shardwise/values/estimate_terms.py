"""Names of the terms of an estimate, in the order in which they are shown (rules: `price.estimate_terms`,
`price.estimate_terms`)."""

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
