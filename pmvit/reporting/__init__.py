"""Looking at compressed models."""
