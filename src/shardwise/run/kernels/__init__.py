"""The executor in PyTorch."""
