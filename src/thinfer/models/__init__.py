"""One file an architecture, named by its Hugging Face model_type: config map, weight map and graph."""
