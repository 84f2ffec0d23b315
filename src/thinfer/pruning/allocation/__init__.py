"""Allocations: how much of the sparsity each matrix takes; one file each."""
