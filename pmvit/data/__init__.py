"""Images: where they are (sources, segmentation), how they are prepared (transforms), batches (loaders, training)."""
