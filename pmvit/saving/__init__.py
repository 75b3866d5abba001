"""Models on disk: safetensors and JSON, never pickle; with a model card and the commands that made them."""
