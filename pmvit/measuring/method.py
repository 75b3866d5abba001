"""`measure`: the one step from images to what a plan is made from, scores or merge costs."""

import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import nn

from pmvit.config import MeasureOptions, MergeCostConfig, ScoreConfig, with_keywords
from pmvit.config.measuring import PAPER_SCORES, Method
from pmvit.errors import PmvitError
from pmvit.measuring.cost_run import can_measure_merges, measure_merge_costs
from pmvit.measuring.merge_costs import FORMAT, OLD_FORMAT, MergeCosts
from pmvit.measuring.score_run import score
from pmvit.measuring.scores import Scores

if TYPE_CHECKING:
    from typing_extensions import Unpack

MeasureConfig = ScoreConfig | MergeCostConfig


@overload
def measure(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    method: Literal["scored", "paper"],
    checkpoint: str | Path | None = None,
    progress: bool = True,
    **options: "Unpack[MeasureOptions]",
) -> Scores: ...


@overload
def measure(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    method: Literal["measured"],
    progress: bool = True,
    **options: "Unpack[MeasureOptions]",
) -> MergeCosts: ...


@overload
def measure(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    method: Method | None = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    **options: "Unpack[MeasureOptions]",
) -> Scores | MergeCosts: ...


@with_keywords(ScoreConfig, MergeCostConfig)
def measure(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    method: Method | None = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    **options: "Unpack[MeasureOptions]",
) -> Scores | MergeCosts:
    """Measure on images what `plan` has to know of a model. The model is left as it was.

    Merge costs say what merging tokens does to the output: the default, and no labels are read. Scores say how much
    each token matters (Eq. 9): the default where attention stays inside windows (Swin), and wherever an option is given
    that only scores have.

    Args:
        model: An uncompressed model.
        loader: Yields images or `(images, labels)`.
        method: `measured` for merge costs; `scored` for scores; `paper` for scores as the paper's code has them.
        checkpoint: For scores: where partial sums are kept. If the file exists, scoring goes on after its last batch:
            the loader then has to yield the same batches in the same order.
        progress: Show a progress bar.
        options: Fields of `ScoreConfig` or of `MergeCostConfig`.

    Raises:
        PmvitError: If options contradict each other, what is measured is not finite, or the input does not fit.
    """
    config = measure_config(model, method, options)
    return measure_by(config, model, loader, checkpoint=checkpoint, progress=progress)


def measure_config(model: nn.Module, method: Method | None, options: MeasureOptions) -> MeasureConfig:
    """What `measure` measures of a model with these options, and how.

    Raises:
        PmvitError: If some options are for scores alone and others, or the method, for merge costs.
    """
    of_scores, of_costs = ({field.name for field in fields(config)} for config in (ScoreConfig, MergeCostConfig))
    for_scores, for_costs = (
        [name for name in options if name in only] for only in (of_scores - of_costs, of_costs - of_scores)
    )
    if method is None:
        is_measured = bool(for_costs) or (not for_scores and can_measure_merges(model))
        method = "measured" if is_measured else "scored"
    if wrong := for_scores if method == "measured" else for_costs:
        other = "scored" if method == "measured" else "measured"
        raise PmvitError(f"{', '.join(wrong)}: expected with the method {other} alone; got it with {method}")
    given: dict[str, Any] = {**options}
    if method == "measured":
        return MergeCostConfig(**given)
    return ScoreConfig(**{**(PAPER_SCORES if method == "paper" else {}), **given})


def measure_by(
    config: MeasureConfig,
    model: nn.Module,
    loader: Iterable[Any],
    *,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> Scores | MergeCosts:
    """Measure what a configuration is of; see `measure`."""
    if isinstance(config, ScoreConfig):
        return score(model, loader, config, checkpoint=checkpoint, progress=progress)
    if checkpoint is not None:
        raise PmvitError("checkpoint: expected for scores alone; merge costs are measured in one go")
    return measure_merge_costs(model, loader, config, progress=progress)


def read_measured(path: str | Path) -> Scores | MergeCosts:
    """Read what `Scores.save` or `MergeCosts.save` wrote, whichever the file says it is."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))["format"]
    except (OSError, ValueError, TypeError, KeyError):
        found = None  # and what else is wrong with the file, loading it will say
    return MergeCosts.load(path) if found in (FORMAT, OLD_FORMAT) else Scores.load(path)
