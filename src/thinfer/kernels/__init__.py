"""One file an op: its equation, shapes, NumPy reference, test cases and native binding."""
