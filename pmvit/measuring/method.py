"""`measure`: the one step from images to what a plan is made from: a metric, merge costs or scores."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from torch import nn

from pmvit.config import MeasureOptions, MergeCostConfig, MetricConfig, ScoreConfig, with_keywords
from pmvit.config.measuring import PAPER_SCORES, Measurement, Method
from pmvit.data.opening import ImageData, as_loader, open_loader
from pmvit.errors import PmvitError
from pmvit.files import parse_json, read_text
from pmvit.hosts import host_of
from pmvit.measuring.cost_run import measure_merge_costs
from pmvit.measuring.merge_costs import FORMAT, OLD_FORMAT, MergeCosts
from pmvit.measuring.metric import TokenMetric, is_metric
from pmvit.measuring.metric_run import measure_metric
from pmvit.measuring.probe import measurable
from pmvit.measuring.score_run import score
from pmvit.measuring.scores import Scores

if TYPE_CHECKING:
    from typing_extensions import Unpack

MeasureConfig = ScoreConfig | MergeCostConfig | MetricConfig
Measured = Scores | MergeCosts | TokenMetric


class Kind(NamedTuple):
    """What a plan may be made from.

    Attributes:
        config: How it is measured.
        result: What comes out.
        title: What it is called.
        file: What its file is called, beside the model that is made of it.
    """

    config: type[MeasureConfig]
    result: type[Measured]
    title: str
    file: str


KINDS: dict[Measurement, Kind] = {
    "adaptive": Kind(MetricConfig, TokenMetric, "a metric", "metric.safetensors"),
    "measured": Kind(MergeCostConfig, MergeCosts, "merge costs", "merge_costs.json"),
    "scored": Kind(ScoreConfig, Scores, "scores", "scores.json"),
}


def kind_of(what: MeasureConfig | Measured) -> Measurement:
    """Of which of `KINDS` a measurement, or the configuration of one, is."""
    return next(name for name, kind in KINDS.items() if isinstance(what, (kind.config, kind.result)))


@overload
def measure(
    model: nn.Module,
    loader: ImageData,
    *,
    method: Literal["scored", "paper"],
    checkpoint: str | Path | None = None,
    progress: bool = True,
    **options: "Unpack[MeasureOptions]",
) -> Scores: ...


@overload
def measure(
    model: nn.Module,
    loader: ImageData,
    *,
    method: Literal["measured"],
    progress: bool = True,
    **options: "Unpack[MeasureOptions]",
) -> MergeCosts: ...


@overload
def measure(
    model: nn.Module,
    loader: ImageData | None = None,
    *,
    method: Literal["adaptive"],
    progress: bool = True,
    **options: "Unpack[MeasureOptions]",
) -> TokenMetric: ...


@overload
def measure(
    model: nn.Module,
    loader: ImageData | None = None,
    *,
    method: Method | None = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    **options: "Unpack[MeasureOptions]",
) -> Measured: ...


@with_keywords(ScoreConfig, MergeCostConfig, MetricConfig)
def measure(
    model: nn.Module,
    loader: ImageData | None = None,
    *,
    method: Method | None = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    **options: "Unpack[MeasureOptions]",
) -> Measured:
    """Measure on images what `plan` has to know of a model. The model is left as it was.

    A metric says how much differences of tokens matter, for plans that adapt to the image: the default, and no labels
    are read. Merge costs say what merging tokens does to the output, for fixed plans, without labels, too: the default
    where attention stays inside windows and MLPs do not (SAM). Scores say how much each token matters (Eq. 9): the
    default where whole blocks stay inside windows (Swin). An option that only one of them has chooses it.

    Args:
        model: An uncompressed model.
        loader: Images, as `as_loader` knows them: a path or a word for a dataset, a `Dataset`, a tensor, or what yields
            batches of images or `(images, labels)`. What can be counted is taken in an order that depends on a seed.
            Without, a metric is measured on images that are generated; on images like yours, plans keep more.
        method: `adaptive` for a metric; `measured` for merge costs; `scored` for scores; `paper` for scores as the
            paper's code has them.
        checkpoint: For scores: where partial sums are kept. If the file exists, scoring goes on after its last batch:
            the loader then has to yield the same batches in the same order.
        progress: Show a progress bar.
        options: Fields of `MetricConfig`, `MergeCostConfig` or `ScoreConfig`.

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
    owners = {
        name: [kind for kind, each in KINDS.items() if name in each.config.__dataclass_fields__] for name in options
    }
    kind: Measurement = "scored" if method is None or method == "paper" else method
    if method is None:
        fitting = [each for each in KINDS if all(each in of_name for of_name in owners.values() if of_name)]
        able = measurable(host_of(model))
        kind = next((each for each in fitting if each in able), able[0])
    if wrong := [name for name, of_name in owners.items() if of_name and kind not in of_name]:
        raise PmvitError(
            f"{wrong[0]}: expected with the method {' or '.join(owners[wrong[0]])} alone; got it with {method or kind}"
        )
    given: dict[str, Any] = {**(PAPER_SCORES if method == "paper" else {}), **options}
    return KINDS[kind].config(**given)


def measure_by(
    config: MeasureConfig,
    model: nn.Module,
    loader: ImageData | None,
    *,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> Measured:
    """Measure what a configuration is of; see `measure`."""
    if loader is None:
        check_needs_no_images(config)
        loader = open_loader(model, None, workers=0, shuffle=True, seed=config.seed)
    loader = as_loader(model, loader, labels=isinstance(config, ScoreConfig) and config.needs_labels, shuffle=True)
    if isinstance(config, ScoreConfig):
        return score(model, loader, config, checkpoint=checkpoint, progress=progress)
    if checkpoint is not None:
        raise PmvitError("checkpoint: expected for scores alone; the others are measured in one go")
    if isinstance(config, MetricConfig):
        return measure_metric(model, loader, config, progress=progress)
    return measure_merge_costs(model, loader, config, progress=progress)


def check_needs_no_images(config: MeasureConfig) -> None:
    """Raise `PmvitError` unless generated images can stand for those that a configuration is to be measured on."""
    if not isinstance(config, MetricConfig):
        raise PmvitError(
            f"expected images to measure {KINDS[kind_of(config)].title} on; got none: name some (--data). Without "
            "images there are adaptive plans alone, of models that attend over the whole of one grid"
        )


def read_measured(path: str | Path) -> Measured:
    """Read what `save` of scores, merge costs or a metric wrote, whichever the file says it is."""
    if is_metric(path):
        return TokenMetric.load(path)
    found = parse_json(read_text(Path(path), "a measurement"), str(path))
    found = found.get("format") if isinstance(found, dict) else None  # what is wrong then, loading it will say
    return MergeCosts.load(path) if found in (FORMAT, OLD_FORMAT) else Scores.load(path)
