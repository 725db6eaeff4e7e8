"""Names of the terms of an estimate, in display order; `price.estimate_terms` has the rules behind them."""

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
