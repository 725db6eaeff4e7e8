"""MaxText: launches on TPUs and GPUs (`launch_config.TPU` and `launch_config.GPU`), mesh axes, and models."""
