"""Structured pruning: whole heads, neurons, channels and layers go, and a smaller ordinary model remains."""
