"""The PyTorch engine: it trains a plan."""
