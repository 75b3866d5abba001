"""Running models: passes that make them faster, the runtimes they are exported to, and measurements side by side."""
