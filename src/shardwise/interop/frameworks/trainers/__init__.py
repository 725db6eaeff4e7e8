"""Trainers on top of transformers, whose launches are read and not written: Axolotl, LLaMA-Factory, OpenRLHF and verl.

Each maps its own options; `trainer_fields` has what they share (sharding, number formats, batches), `adapter_options` their LoRA,
which training scripts of Accelerate and DeepSpeed have too (TRL).
"""
