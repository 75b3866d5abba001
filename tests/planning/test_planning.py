"""Algorithms 1 and 2, by hand and by property; plans as files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pmvit
from pmvit.config import PAPER, PlanOptions, ScoreConfig
from pmvit.config.planning import Scope, Weights
from pmvit.measuring import Scores
from pmvit.measuring.flops import BlockCost, ModelCost
from pmvit.planning import LayerPlan, Plan
from pmvit.planning.budget import predicted_macs
from pmvit.planning.grouping import group_layer, smooth, weigh
from pmvit.planning.ranking import comparable, partition
from pmvit.prune_merge import PRUNED


def make_scores(values: Tensor, grid: tuple[int, int]) -> Scores:
    cost = ModelCost(1000, tuple(BlockCost(10_000, 5_000, 0, 8) for _ in values))
    return Scores(values.double(), grid, 1, cost, ScoreConfig(), 1, 1, "test", "nothing")


@pytest.fixture
def scores() -> Scores:
    generator = torch.Generator().manual_seed(3)
    return make_scores(torch.rand(5, 42, generator=generator) + 0.01, (6, 7))


def layer_of(kept: list[int], pruned: list[int], grid: tuple[int, int], **options: Any) -> LayerPlan:
    masks = torch.zeros(2, grid[0] * grid[1], dtype=torch.bool)
    masks[0, kept] = True
    masks[1, pruned] = True
    values = options.pop("values", torch.ones(grid[0] * grid[1]))
    return group_layer(values, masks[0], masks[1], grid, options.get("grouping", "grid"), options.get("weights", "sum"))


# The two thresholds


@given(
    st.integers(1, 5),
    st.integers(2, 30),
    st.floats(0.05, 1.0),
    st.floats(0, 1),
    st.sampled_from(["global", "local"]),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_counts_are_exact(layers: int, tokens: int, keep: float, rest: float, scope: Scope, ties: bool) -> None:
    prune = rest * (1 - keep) * 0.999
    values = torch.rand(layers, tokens, generator=torch.Generator().manual_seed(tokens)) + 0.01
    if ties:
        values = (values * 3).ceil()
    made = pmvit.plan(make_scores(values, (1, tokens)), keep=keep, prune=prune, scope=scope)
    kept = [layer.num_kept for layer in made.layers.values()]
    pruned = [layer.num_pruned for layer in made.layers.values()]
    assert min(kept) >= 1
    if scope == "global":
        assert sum(kept) == max(round(keep * (layers * tokens)), layers)
        assert sum(pruned) == min(round(prune * (layers * tokens)), layers * tokens - sum(kept))
    else:
        assert kept == [max(round(keep * tokens), 1)] * layers
        assert pruned == [min(round(prune * tokens), tokens - kept[0])] * layers


def test_thresholds_by_hand() -> None:
    values = torch.tensor([[9.0, 1.0, 5.0, 3.0], [8.0, 2.0, 7.0, 6.0]])
    kept, pruned = partition(values, keep=0.5, prune=0.25)
    assert kept.tolist() == [[True, False, False, False], [True, False, True, True]]
    assert pruned.tolist() == [[False, True, False, False], [False, True, False, False]]


def test_ties_go_by_position() -> None:
    kept, pruned = partition(torch.ones(2, 4), keep=0.5, prune=0.25)
    assert kept.tolist() == [[True, True, True, False], [True, False, False, False]]  # layer 1 keeps one in exchange
    assert pruned.tolist() == [[False] * 4, [False, False, True, True]]


def test_a_layer_that_would_keep_nothing_keeps_its_best() -> None:
    values = torch.tensor([[9.0, 8.0, 7.0], [0.1, 0.3, 0.2]])
    kept, pruned = partition(values, keep=0.5, prune=1 / 6)
    assert kept.tolist() == [[True, True, False], [False, True, False]]
    assert pruned.tolist() == [[False, False, False], [True, False, False]]


def test_layers_are_made_comparable() -> None:
    values = torch.tensor([[3.0, 4.0], [30.0, 40.0]], dtype=torch.float64)
    got = comparable(values, [0, 4], normalize=True, decay=0.025)
    assert torch.allclose(got, torch.tensor([[0.6, 0.8], [0.54, 0.72]], dtype=torch.float64))
    assert torch.equal(comparable(values, [0, 4], normalize=False, decay=0.0), values)


def test_the_last_layers_of_deep_models_are_not_turned_around() -> None:
    values = torch.tensor([[3.0, 2.0, 1.0]] * 56)
    ranked = comparable(values, range(56), normalize=True, decay=0.025)
    assert (ranked[:, 0] > ranked[:, 1]).all()
    assert (ranked[:, 2] > 0).all()


# Grouping, on a 3 x 5 grid:  0  1  2  3  4 /  5  6  7  8  9 / 10 11 12 13 14


def test_row_grouping_by_hand() -> None:
    layer = layer_of(kept=[1, 4, 6], pruned=[9], grid=(3, 5), grouping="row")
    # row 0: 0 and 2 join 1, 3 joins 4; row 1 joins 6; row 2 has no kept token: each joins the nearest, 13 the first
    assert layer.groups == (0, 0, 0, 1, 1, 2, 2, 2, 2, PRUNED, 2, 2, 2, 1, 1)


def test_the_boundary_in_a_row_is_the_midpoint() -> None:
    layer = layer_of(kept=[0, 4], pruned=[], grid=(1, 5), grouping="row")
    assert layer.groups == (0, 0, 0, 1, 1)  # token 2 is as far from both; the first has it


def test_segment_grouping_is_algorithm_1() -> None:
    layer = layer_of(kept=[2, 3, 8], pruned=[5], grid=(3, 5), grouping="segment")
    assert layer.groups == (0, 0, 0, 1, 2, PRUNED, 2, 2, 2, 2, 2, 2, 2, 2, 2)


def test_grid_grouping_by_hand() -> None:
    layer = layer_of(kept=[1, 13], pruned=[4], grid=(3, 5), grouping="grid")
    assert layer.groups == (0, 0, 0, 0, PRUNED, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1)


@given(st.integers(0, 10_000), st.sampled_from(["row", "grid", "segment"]))
@settings(max_examples=60, deadline=None)
def test_grouping_is_the_nearest_by_brute_force(seed: int, grouping: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    height, width = 4, 6
    order = torch.randperm(24, generator=generator).tolist()
    kept, pruned = sorted(order[:5]), order[5:8]
    layer = layer_of(kept, pruned, (height, width), grouping=grouping)

    def distance(token: int, centre: int) -> int:
        return (token // width - centre // width) ** 2 + (token % width - centre % width) ** 2

    for token, group in enumerate(layer.groups):
        if token in pruned:
            assert group == PRUNED
            continue
        candidates = kept
        if grouping == "row":
            candidates = [centre for centre in kept if centre // width == token // width] or kept
        if grouping == "segment":
            candidates = [next((centre for centre in kept if centre >= token), kept[-1])]
        best = min(candidates, key=lambda centre: (distance(token, centre), centre))
        assert layer.centres[group] == best


# Weights


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("normalize", [0.6, 0.8]),
        ("max", [0.75, 1.0]),
        ("mean", [3 / 3.5, 4 / 3.5]),
        ("sum", [3 / 7, 4 / 7]),
        ("ones", [1.0, 1.0]),
        ("average", [0.5, 0.5]),
    ],
)
def test_weight_rules_by_hand(rule: Weights, expected: list[float]) -> None:
    values = torch.tensor([3.0, 4.0, 5.0, 9.0], dtype=torch.float64)
    weights = weigh(values, torch.tensor([0, 0, 1, PRUNED]), (2, 2), rule)
    alone = 5.0 / 5.0
    assert torch.allclose(weights, torch.tensor([*expected, alone, 0.0], dtype=torch.float64))


def test_gaussian_weights_are_smoothed_and_normalised() -> None:
    values = torch.zeros(25, dtype=torch.float64)
    values[12] = 1.0
    smoothed = smooth(values, (5, 5)).view(5, 5)
    assert smoothed.sum().item() == pytest.approx(1)
    assert (smoothed[2, 1] / smoothed[2, 2]).item() == pytest.approx(torch.tensor(-0.5).exp().item())
    weights = weigh(values, torch.zeros(25, dtype=torch.long), (5, 5), "gaussian")
    assert weights.norm().item() == pytest.approx(1)


def test_a_group_without_scores_is_weighed_evenly() -> None:
    for rule in ("normalize", "max", "mean", "sum", "gaussian"):
        weights = weigh(torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.long), (2, 2), rule)
        assert weights.isfinite().all()
        assert (weights == weights[0]).all()
        assert weights[0] > 0


# Budgets and options


def test_layers_can_be_skipped(scores: Scores) -> None:
    made = pmvit.plan(scores, keep=0.5, skip=(0, -1))
    assert sorted(made.layers) == [1, 2, 3]
    assert sum(layer.num_kept for layer in made.layers.values()) == round(0.5 * 3 * 42)


@pytest.mark.data
@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
def test_flops_budgets_are_met_on_the_real_graph(deit_tiny: nn.Module, deit_scores: Scores, share: float) -> None:
    original = pmvit.flops(deit_tiny).macs
    budgets: list[PlanOptions] = [{"flops_share": share}, {"gflops": share * original / 1e9}]
    for budget in budgets:
        made = pmvit.plan(deit_scores, **budget)
        counted = pmvit.flops(pmvit.compress(deit_tiny, made)).macs
        assert counted == predicted_macs(deit_scores, made)
        one_token_more = 12 * 2 * 192 * 192 * 12
        assert share * original - one_token_more < counted <= share * original


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected one of keep, gflops, flops_share, speedup, max_drop; got none"),
        ({"keep": 0.5, "gflops": 1.0}, "got keep and gflops"),
        ({"keep": 0.0}, "keep: expected a share above 0"),
        ({"keep": 60}, "keep: expected a share above 0 and up to 1, got 60"),
        ({"keep": 0.5, "prune": 1.0}, "prune: expected a share from 0"),
        ({"keep": 0.8, "prune": 0.3}, "keep \\+ prune to be at most 1"),
        ({"keep": 0.5, "grouping": "columns"}, "grouping: expected one of grid, row, segment"),
        ({"keep": 0.5, "weights": "gauss"}, "weights: expected one of sum, average"),
        ({"keep": 0.5, "reconstruct": "svd"}, "reconstruct: expected one of residual, pinv"),
        ({"keep": 0.5, "skip": (7,)}, "skip: expected blocks from -5 to 4, got 7"),
        ({"keep": 0.5, "skip": range(5)}, "all 5 blocks are skipped"),
        ({"gflops": 9.0}, "there is nothing to compress"),
        ({"flops_share": 0.001}, "what one token a block costs"),
        ({"speedup": 2.0}, "speedup: it is measured, not computed: pass model="),
        ({"max_drop": 2.0}, "max_drop: it is measured, not computed: pass model="),
        ({"max_drop": 0.0}, "max_drop: expected a finite number above 0"),
        ({"speedup": 0.0}, "speedup: expected a finite number above 0"),
        ({"gflops": float("nan")}, "gflops: expected a finite number above 0"),
    ],
)
def test_options_that_do_not_fit_are_named(scores: Scores, options: dict[str, Any], message: str) -> None:
    with pytest.raises(pmvit.PmvitError, match=message):
        pmvit.plan(scores, **options)


# Plans as text and files


@pytest.mark.parametrize("options", [{}, PAPER, {"grouping": "segment", "weights": "gaussian", "prune": 0.3}])
def test_a_plan_survives_its_file(scores: Scores, tmp_path: Path, options: dict[str, Any]) -> None:
    made = pmvit.plan(scores, keep=0.4, **options)
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_what_is_pruned_by_default_is_what_keep_leaves(scores: Scores) -> None:
    assert pmvit.plan(scores, keep=1.0).keep == 1
    assert sum(layer.num_pruned for layer in pmvit.plan(scores, keep=0.95).layers.values()) == 210 - 200
    assert sum(layer.num_pruned for layer in pmvit.plan(scores, keep=0.5).layers.values()) == 21


def edited(made: Plan, **changes: Any) -> str:
    """The plan's JSON with one thing changed, by a function of its name."""
    document = json.loads(made.to_json())
    for path, value in changes.items():
        target = document
        *parents, last = path.split("__")
        for name in parents:
            target = target[int(name) if name.isdecimal() and isinstance(target, list) else name]
        target[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "expected version 1 of pmvit-plan, got 2"),
        ({"format": "other"}, "is it another file"),
        ({"colour": "blue"}, "unknown field 'colour'"),
        ({"grid": [6, 8]}, "expected 48 tokens in groups or pruned, got 42"),
        ({"grid": [6, 6]}, "expected tokens from 0 to 35"),
        ({"grid": "6x7"}, "grid: expected a positive whole number for each axis"),
        ({"depth": 2}, "block 2: expected a block from 0 to 1"),
        ({"depth": "many"}, "depth: expected a whole number"),
        ({"reconstruct": "magic"}, "reconstruct: expected residual or pinv"),
        ({"attention_bias": 1}, "attention_bias: expected true or false"),
        ({"layers": []}, "layers: expected an object"),
        ({"layers__0__groups__0__members": [1, 1], "layers__0__groups__0__weights": [1, 1]}, "must not overlap"),
        ({"layers__0__groups__0__weights": []}, "members but 0 weights"),
        ({"layers__0__groups__0__weights": ["a"]}, "expected numbers as weights"),
        ({"layers__0__groups__0__weights": [float("nan")]}, "the weight of token .* is nan"),
        ({"layers__0__groups__0__weights": [0.0]}, "all its weights are zero"),
        ({"layers__0__groups__0__weights": [1e200]}, r"too large or too small to compute with .* inf"),
        ({"layers__0__groups__0__weights": [1e39]}, "too large or too small"),
        ({"layers__0__groups__0__weights": [1e-30]}, "too large or too small"),
        ({"depth": 10**12}, "depth: expected a whole number up to"),
        ({"grid": [10**9, 10**9]}, "expected 1000000000000000000 tokens in groups or pruned"),
        ({"layers__00": {}}, "layers: expected an object with block numbers"),
        ({"layers__0__groups__0__centre": 41}, "its centre 41 is not one of its members"),
        ({"layers__0__groups__0__size": 1}, "unknown field 'size'"),
        ({"layers__0__pruned": []}, "is in neither"),
        ({"layers__0__pruned": None}, "pruned: expected a list, got NoneType"),
        ({"layers__0__groups__0__members": 3}, "members: expected a list, got int"),
        ({"made_by": 3}, "made_by: expected an object"),
    ],
)
def test_a_plan_that_is_not_whole_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    values = torch.rand(5, 42, generator=torch.Generator().manual_seed(0)) + 0.01
    values[0, 1] = 9  # token 1 is kept, alone, and the first group of block 0
    values[0, 0] = 0  # token 0 is pruned
    made = pmvit.plan(make_scores(values, (6, 7)), keep=0.5, prune=0.5)
    assert made.layers[0].members()[0] == [1]
    (tmp_path / "plan.json").write_text(edited(made, **changes))
    with pytest.raises(pmvit.PmvitError, match=message):
        Plan.load(tmp_path / "plan.json")


def test_a_file_that_breaks_off_is_refused(scores: Scores, tmp_path: Path) -> None:
    text = pmvit.plan(scores, keep=0.5).to_json()
    (tmp_path / "plan.json").write_text(text[:-200])
    with pytest.raises(pmvit.PmvitError, match="breaks off or is malformed"):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(pmvit.PmvitError, match="there is none"):
        Plan.load(tmp_path / "other.json")


def test_print_shows_the_table_and_the_grids(scores: Scores) -> None:
    made = pmvit.plan(scores, keep=0.5, prune=0.2, skip=(1,))
    text = str(made)
    assert "not compressed" in text
    for index, layer in made.layers.items():
        row = [str(index), str(layer.num_kept), str(layer.num_merged), str(layer.num_pruned)]
        assert any(line.split()[:4] == row for line in text.splitlines())
    drawing = made.draw()
    symbols = {"█": "num_kept", "▒": "num_merged", "·": "num_pruned"}
    for symbol, count in symbols.items():
        in_legend = 1
        assert drawing.count(symbol) == sum(getattr(layer, count) for layer in made.layers.values()) + in_legend
    assert max(len(line) for line in made.draw(columns=30).splitlines()) <= 30


def test_an_all_kept_plan_is_the_identity() -> None:
    made = Plan.keep_all((2, 3), 4)
    assert all(layer.is_identity for layer in made.layers.values())
    assert made.keep == 1
    moved = replace(made.layers[0], groups=(1, 0, 2, 3, 4, 5), centres=(1, 0, 2, 3, 4, 5))
    assert not moved.is_identity
