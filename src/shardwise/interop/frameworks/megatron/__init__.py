"""Megatron-LM and Megatron Bridge: launches of both, and the weight names of Megatron-Core.

`launch_script.TARGET` and `bridge_recipe.TARGET` are the targets; Bridge has Megatron-LM's options under other names.
"""
