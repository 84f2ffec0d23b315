"""The engine: plans, packs and runs a model's graph on executors, and turns prompts into tokens."""
