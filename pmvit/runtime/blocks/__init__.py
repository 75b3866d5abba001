"""Plain transformer blocks, rewritten for inference."""
