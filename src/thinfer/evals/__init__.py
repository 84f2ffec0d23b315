"""Quality: perplexity, and how far a model's distribution is from another's."""
