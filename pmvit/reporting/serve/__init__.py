"""A local page on which a compressed model and its original can be tried."""
