"""Weight pruning: which weights a model can do without, found offline, one file a method (needs PyTorch)."""
