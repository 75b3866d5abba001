"""Pictures of compressed models, drawn with matplotlib as PNG and SVG."""
