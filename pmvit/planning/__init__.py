"""Plans: what they are, and how scores become one."""

from pmvit.planning.budget import predicted_macs
from pmvit.planning.method import choose_method
from pmvit.planning.plan import LayerPlan, Plan
from pmvit.planning.planner import PAPER, PlanConfig, plan

__all__ = ["PAPER", "LayerPlan", "Plan", "PlanConfig", "choose_method", "plan", "predicted_macs"]
