"""A plan against a run of it: every term predicted beside measured. Pure data to data; nothing here needs PyTorch."""
