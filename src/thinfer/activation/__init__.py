"""Activation sparsity: selectors made from observations, at rates found by measurement."""
