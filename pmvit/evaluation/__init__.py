"""How good a model is: accuracy, mean IoU, how far it strays from the original; intervals, titles and tables."""
