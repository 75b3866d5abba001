"""Speed and memory of variants of a model, measured side by side."""
