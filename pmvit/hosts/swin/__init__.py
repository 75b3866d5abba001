"""What all hosts' Swin models have in common."""
