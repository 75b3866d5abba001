"""Running models: measuring how fast they are, side by side."""
