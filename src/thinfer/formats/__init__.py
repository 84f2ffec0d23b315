"""Checkpoints: open, list and decode GGUF files and Hugging Face folders."""
