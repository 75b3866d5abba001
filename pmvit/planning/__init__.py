"""Plans: what they are, and how scores or merge costs become one. A plan is data: importing it takes no torch."""

from pmvit.planning.plan import LayerPlan as LayerPlan
from pmvit.planning.plan import Plan as Plan
