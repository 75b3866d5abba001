"""Plans: what they are, and how scores or merge costs become one."""

from pmvit.planning.adaptive import AdaptivePlan
from pmvit.planning.budget import predicted_macs
from pmvit.planning.plan import LayerPlan, Plan
from pmvit.planning.planner import AnyPlan, plan, plan_by, read_plan

__all__ = ["AdaptivePlan", "AnyPlan", "LayerPlan", "Plan", "plan", "plan_by", "predicted_macs", "read_plan"]
