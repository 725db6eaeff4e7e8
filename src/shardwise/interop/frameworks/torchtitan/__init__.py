"""torchtitan: launches of two releases, and the weight names of its models.

`launch_flags.TARGET` is the target for 0.3.0, `launch_toml.TARGET` that for 0.2.2.
"""
