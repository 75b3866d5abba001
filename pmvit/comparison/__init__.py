"""Methods side by side at equal cost."""

from pmvit.comparison.run import compare
from pmvit.comparison.table import Comparison, ComparisonRow

__all__ = ["Comparison", "ComparisonRow", "compare"]
