"""Methods side by side at equal cost."""

from pmvit.comparison.run import compare
from pmvit.comparison.table import Compared, Comparison

__all__ = ["Compared", "Comparison", "compare"]
