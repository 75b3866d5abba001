"""Which way of planning suits a model, where nobody said."""

from torch import nn

from pmvit.measuring import ScoreConfig
from pmvit.measuring.cost_run import can_measure_merges
from pmvit.planning.plan import Method
from pmvit.planning.planner import PlanConfig


def choose_method(model: nn.Module, planning: PlanConfig, scoring: ScoreConfig | None = None) -> Method:
    """The method that is asked for; if none is, `measured` where merges can be measured, else `scored`.

    Whoever asks for something that only scores have (a share to prune, weights, another loss) asks for scores.
    """
    if planning.method is not None:
        return planning.method
    for_scores = bool(planning.choices_for_scores) or (scoring is not None and scoring != ScoreConfig())
    return "scored" if for_scores or not can_measure_merges(model) else "measured"
