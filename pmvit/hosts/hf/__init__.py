"""What we know of the models of Hugging Face transformers."""
