"""Train, prune, train again: the classic pipeline for any PyTorch module, and lottery tickets."""
