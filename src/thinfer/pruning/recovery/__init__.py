"""Recovery: training after pruning that keeps every zero."""
