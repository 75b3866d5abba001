"""The report: one HTML file about a compressed model."""
