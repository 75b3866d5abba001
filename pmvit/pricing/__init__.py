"""What merging tokens costs, measured: the prices from which plans are made that need no fine-tuning (ours).

In a compressed block every token of a group gets the group's key, value and update in place of its own. If g is the
gradient of the output at such a quantity y of a token, the output moves by `g . (y_group - y)`. Summed over what a
group changes, this is its *error*, a number for each image; half the mean square of all errors is, to second order,
the divergence of the compressed model's predictions from the original's. So the price of a merge is what it adds to
the squared errors, in nats, and prices of different blocks can be compared and added up.

All that the errors of all possible groups of a block depend on is a matrix for each image, `E[i, j] = g_i . y_j`: a
group G has the error `sum of E[i, j] over i, j in G / |G| - sum of E[i, i]`. There are two of them, one of the keys and
one of values and updates together. Where attention and MLP of a block have groups of their own, attention has both,
with its own update, and the MLP has one, of its update. It takes one forward and one backward pass an image and no
labels. What is kept of all images are a few hundred random combinations of their matrices: squared errors add up to
the same over these.
"""

from pmvit.pricing.prices import Merge, PriceConfig, Prices
from pmvit.pricing.run import price

__all__ = ["Merge", "PriceConfig", "Prices", "price"]
