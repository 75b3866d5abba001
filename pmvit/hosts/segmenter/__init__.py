"""Segmenter: a vision transformer of timm that labels every pixel."""
