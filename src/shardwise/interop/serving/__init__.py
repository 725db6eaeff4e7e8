"""Launches of serving engines: vLLM, SGLang and TensorRT-LLM, read from command lines, files and manifests, and written.

`serving_launch.ServingLaunch` is the value in the middle, `engine.Engine` describes an engine: its options, how they map to a
launch, and what it cannot run. `engine_commands` finds the engine's command in scripts, container commands and Kubernetes
manifests; `read_serving` reads it, `export_serving` writes a deployment as a folder. Nothing that is read is run.
"""
