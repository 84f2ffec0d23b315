"""Refinements: better masks, or better values, for a pruned matrix of the same sparsity; one file each."""
