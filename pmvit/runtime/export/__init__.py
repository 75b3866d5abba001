"""Files for other runtimes, compared with PyTorch before anything is called done."""
