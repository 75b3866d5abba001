"""Plans: what they are, and how scores become one."""

from pmvit.planning.method import choose_method
from pmvit.planning.plan import LayerPlan, Plan
from pmvit.planning.planner import PAPER, PlanConfig, plan, predicted_macs

__all__ = ["PAPER", "LayerPlan", "Plan", "PlanConfig", "choose_method", "plan", "predicted_macs"]
