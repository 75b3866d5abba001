"""Options: each written once, without torch, as the verbs, type checkers and help texts have them."""

import inspect
import subprocess
import sys
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest

import pmvit
from pmvit import config, methods
from pmvit.cli import completion, options
from pmvit.config.training import Preset
from pmvit.hosts.segmenter.model import DecoderKind
from pmvit.measuring import Scores
from pmvit.planning import Plan
from pmvit.runtime.bench.variants import VARIANTS
from pmvit.runtime.export.targets import RUNTIMES
from tests.helpers import small_vit

CONFIGS = [
    config.ScoreConfig,
    config.MergeCostConfig,
    config.MetricConfig,
    config.PlanConfig,
    config.FinetuneConfig,
    config.InferenceConfig,
    config.SpeedConfig,
]
KEYWORDS: dict[Any, tuple[Any, list[type]]] = {
    pmvit.measure: (config.MeasureOptions, [config.ScoreConfig, config.MergeCostConfig, config.MetricConfig]),
    pmvit.plan: (config.TargetOptions, [config.PlanConfig, config.SpeedConfig]),
    pmvit.curve: (config.SpeedOptions, [config.SpeedConfig]),
    pmvit.optimize_for_inference: (config.InferenceOptions, [config.InferenceConfig]),
    pmvit.finetune: (config.FinetuneOptions, [config.FinetuneConfig]),
    pmvit.calibrate: (config.FinetuneOptions, [config.FinetuneConfig]),
}


def test_options_need_no_torch() -> None:
    code = "import sys, pmvit.config; sys.exit(any(name in sys.modules for name in ('torch', 'timm', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "kind", [*CONFIGS, options.ModelOptions, options.ReadingOptions], ids=lambda kind: kind.__name__
)
def test_every_option_is_explained(kind: type) -> None:
    """In the order in which the fields stand, in a sentence that fits a help text."""
    texts = options.attribute_texts(kind)
    assert set(texts) == {field.name for field in fields(kind)}
    assert all(10 < len(text) < 250 and "`" not in text for text in texts.values())


@pytest.mark.parametrize("verb", KEYWORDS, ids=lambda verb: verb.__name__)
def test_keywords_are_the_fields(verb: Any) -> None:
    """What type checkers read of the keywords, and what `help` shows of them."""
    keywords, kinds = KEYWORDS[verb]
    expected: dict[str, Any] = {}
    for kind in kinds:
        expected |= {field.name: field for field in fields(kind) if field.name not in expected}
    hints = get_type_hints(keywords)
    assert set(hints) == set(expected)
    shown = inspect.signature(verb).parameters
    for name, field in expected.items():
        if name != "method":  # which a plan records as what it is made from
            assert hints[name] == field.type, name
        assert name in shown
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_wrong_keywords_are_refused_and_type_checkers_know_them() -> None:
    """mypy, which `make lint` runs over this file, complains of an error that is ignored and is none."""
    model = small_vit()
    scores: Scores = pmvit.measure(model, [], method="scored", scorer="random")
    made: Plan = pmvit.plan(scores, keep=0.6)
    assert isinstance(pmvit.optimize_for_inference(pmvit.compress(model, made)), type(model))
    with pytest.raises(TypeError, match="kep"):
        pmvit.plan(scores, kep=0.6)  # type: ignore[call-overload]
    with pytest.raises(pmvit.PmvitError, match="loss: expected one of"):
        pmvit.measure(model, [], method="scored", loss="entrpy")  # type: ignore[call-overload]


def test_the_front_door_is_small_and_opens_every_room() -> None:
    assert len(pmvit.__all__) <= 28
    for name in pmvit.__all__:
        assert getattr(pmvit, name).__name__ == name
        assert name in dir(pmvit)
    code = "import pmvit.reporting.page, pmvit; assert callable(pmvit.report) and pmvit.reporting.page.report"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="has no attribute 'score'"):
        pmvit.score  # type: ignore[attr-defined]  # noqa: B018  # that is the point
    assert "pmvit.compress(model, pmvit.plan(pmvit.measure(model, loader), keep=0.6))" in (pmvit.__doc__ or "")


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (
            config.ScoreConfig,
            {"loss": "label"},
            "loss: expected one of labels, predicted, .*; got 'label'",
        ),
        (config.ScoreConfig, {"limit": 0}, "limit: expected 1 or more, got 0"),
        (
            config.FinetuneConfig,
            {"mixed_precision": "fp8"},
            "expected one of no, fp16, bf16; got 'fp8'",
        ),
        (config.FinetuneConfig, {"scheduler": None}, "scheduler: expected one of cosine"),
        (config.InferenceConfig, {"form": "dense"}, "form: expected one of segment, gather, matmul, auto; got 'dense'"),
    ],
)
def test_values_that_there_are_not_are_named(kind: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(pmvit.PmvitError, match=message):
        kind(**wrong)


def test_the_paper_is_one_word_away() -> None:
    made = config.PlanConfig.of(method="paper", keep=0.6, grouping="segment")
    assert (made.method, made.reconstruct, made.attention_bias) == ("scored", "pinv", False)
    assert (made.weights, made.grouping) == ("normalize", "segment")


def test_what_is_named_without_loading_it_is_there() -> None:
    """Names that the command line offers, of things that it does not load to offer them."""
    assert set(completion.METHODS) == set(methods.METHODS)
    assert set(get_args(completion.Runtime)) == set(RUNTIMES)
    assert set(completion.VARIANTS) == set(VARIANTS)
    assert set(get_args(Preset)) == set(config.PRESETS)
    decoders = next(field.type for field in fields(options.ModelOptions) if field.name == "decoder")
    assert config.choices(decoders) == get_args(DecoderKind)


def test_help_shows_the_defaults_that_a_verb_has() -> None:
    """`calibrate` has others than `finetune`."""
    own = inspect.signature(pmvit.calibrate).parameters
    expected = vars(config.FinetuneConfig.preset("calibrate"))
    assert {name: own[name].default for name in expected} == expected
    assert own["batch_size"].default != inspect.signature(pmvit.finetune).parameters["batch_size"].default == 256


def test_a_keyword_means_one_thing_in_every_verb() -> None:
    """What counts images is `limit`; `images` and `data` are such, never a number of them."""
    for name in pmvit.__all__:
        verb = getattr(pmvit, name)
        for parameter in inspect.signature(verb).parameters.values() if inspect.isfunction(verb) else ():
            takes = str(parameter.annotation)
            assert parameter.name not in ("images", "data") or "int" not in takes, f"{name}({parameter.name})"
            assert parameter.name != "limit" or "int" in takes, f"{name}({parameter.name})"
