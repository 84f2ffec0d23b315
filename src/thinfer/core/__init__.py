"""Frozen value types that every room shares: configuration, graph, requests, artifacts, selectors."""
