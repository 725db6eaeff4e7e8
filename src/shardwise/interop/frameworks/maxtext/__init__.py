"""MaxText: launches on TPUs and GPUs, mesh axes, and models.

`launch_config.TPU` and `launch_config.GPU` are the targets."""
