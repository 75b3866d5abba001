"""What we know of timm's models."""
