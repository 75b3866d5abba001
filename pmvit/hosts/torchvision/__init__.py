"""What we know of torchvision's models."""
