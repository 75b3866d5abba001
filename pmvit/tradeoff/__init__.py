"""What a plan gives and takes, measured: plans for a speed or a loss, and both over several budgets."""

from pmvit.tradeoff.curves import Curve, CurvePoint, curve
from pmvit.tradeoff.search import check_speed, plan, plan_for

__all__ = ["Curve", "CurvePoint", "check_speed", "curve", "plan", "plan_for"]
