"""Training a plan with PyTorch. Nothing outside `train`, `bench` and `execute` loads it."""
