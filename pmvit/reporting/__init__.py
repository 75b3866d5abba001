"""Pictures of compressed models, a report as one HTML file, and a local page to try a model on."""
