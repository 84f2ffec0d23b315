"""Measuring: prefill and decode speed, kernels, other engines on the same file, and the demo's table."""
