"""Adaptive plans: the step against its definition, and what a model with one must keep true."""

import copy
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pmvit
from pmvit.adaptive import AdaptiveBlock, MergeStep, choose, merge_chosen, places_after, who_may_join
from pmvit.config import MetricConfig
from pmvit.errors import PmvitError, PmvitWarning
from pmvit.measuring import TokenMetric
from pmvit.measuring.flops import flops, model_cost
from pmvit.planning.adaptive import AdaptivePlan
from tests.helpers import pmvit_here, small_vit


def metric_of(model: nn.Module, **options: Any) -> TokenMetric:
    torch.manual_seed(0)
    images = [torch.randn(4, 3, 64, 64)]
    found: TokenMetric = pmvit.measure(model, images, method="adaptive", rank=16, progress=False, **options)
    return found


@pytest.fixture(scope="module")
def model() -> Any:
    return small_vit(img_size=64, depth=4)


@pytest.fixture(scope="module")
def metric(model: nn.Module) -> TokenMetric:
    return metric_of(model)


def merge_by_definition(tokens: Tensor, sizes: Tensor, choice: Any, image: int) -> tuple[Tensor, Tensor]:
    """One image, one group after the other."""
    kept, joins = choice.kept[image].tolist(), choice.order[image, choice.kept.shape[1] :].tolist()
    members = {token: [token] for token in kept}
    for token, centre in zip(joins, choice.into[image].tolist(), strict=True):
        members[kept[centre]].append(token)
    rows, counts = [], []
    for group in members.values():
        of_group, patches = tokens[image, group], sizes[image, group]
        mean = (of_group * patches).sum(0) / patches.sum()
        length = (of_group.norm(dim=-1, keepdim=True) * patches).sum() / patches.sum()
        rows.append(mean * length / mean.norm())
        counts.append(patches.sum())
    return torch.stack(rows), torch.stack(counts)


@given(st.integers(2, 24), st.integers(0, 3), st.data())
@settings(max_examples=40, deadline=None)
def test_a_step_does_what_its_definition_says(count: int, num_prefix: int, data: st.DataObject) -> None:
    r = data.draw(st.integers(1, count - 1))
    generator = torch.Generator().manual_seed(count * 100 + r)
    tokens = torch.randn(2, num_prefix + count, 5, generator=generator, dtype=torch.float64)
    sizes = torch.randint(1, 5, (2, num_prefix + count, 1), generator=generator).double()
    choice = choose(tokens, sizes, *who_may_join(num_prefix, count), r, num_prefix)
    merged, new_sizes = merge_chosen(tokens, sizes, choice)
    assert choice.kept[:, :num_prefix].tolist() == [list(range(num_prefix))] * 2
    for image in range(2):
        assert sorted(choice.order[image].tolist()) == list(range(num_prefix + count))
        expected, counts = merge_by_definition(tokens, sizes, choice, image)
        assert torch.allclose(merged[image], expected, atol=1e-9)
        assert torch.equal(new_sizes[image, :, 0], counts)
        # The r for which joining the nearest before them is cheapest; they join the nearest before them that stays.
        distances = torch.cdist(tokens[image], tokens[image]).square()
        cheapest = {
            i: float(sizes[image, i].sqrt() * distances[i, num_prefix:i].min())
            for i in range(num_prefix + 1, num_prefix + count)
        }
        gone = sorted(cheapest, key=lambda i: cheapest[i])[:r]
        kept, joins = choice.kept[image].tolist(), choice.order[image, -r:].tolist()
        assert sorted(gone) == sorted(joins)
        assert kept[num_prefix:] == sorted(kept[num_prefix:], key=lambda i: -cheapest.get(i, torch.inf))
        for token, into in zip(joins, choice.into[image].tolist(), strict=True):
            before = [place for place in kept[num_prefix:] if place < token]
            assert kept[into] == before[int(distances[token, before].argmin())]
    assert torch.equal(new_sizes.sum(1), sizes.sum(1))
    # Every token finds its group.
    places = places_after(choice)
    assert torch.equal(places.gather(1, choice.kept), torch.arange(num_prefix + count - r).expand(2, -1))
    assert torch.equal(places.gather(1, choice.order[:, -r:]), choice.into)


def test_a_step_leaves_a_token(metric: TokenMetric) -> None:
    step = MergeStep(metric.projections[1], 16, 12, 1)
    tokens, sizes, choice = step(torch.randn(2, 17, 48), None, 16)
    assert tokens.shape == (2, 5, 48)
    assert choice.kept.shape == (2, 5)
    assert sizes.sum(1).flatten().tolist() == [17, 17]
    with pytest.raises(ValueError, match="leaves a token"):
        MergeStep(metric.projections[1], 4, 4, 1)


def test_tokens_that_are_alike_merge_without_loss() -> None:
    model: Any = small_vit(img_size=64, depth=4)
    with torch.no_grad():
        model.pos_embed.zero_()
    metric = metric_of(model, size_weight=1.0)
    plan = AdaptivePlan((0, 9, 3, 0), metric)
    small = pmvit.compress(model, plan)
    images = torch.randn(2, 3, 1, 1).expand(-1, -1, 64, 64).contiguous()
    with torch.inference_mode():
        assert torch.allclose(small(images), model(images), atol=1e-5)


def test_an_image_chooses_for_itself(model: Any, metric: TokenMetric) -> None:
    small = pmvit.compress(model, AdaptivePlan((0, 5, 3, 0), metric))
    images = torch.randn(5, 3, 64, 64)
    with torch.inference_mode():
        together = small(images)
        alone = torch.cat([small(image[None]) for image in images])
        reversed_order = small(images.flip(0)).flip(0)
    assert torch.allclose(alone, together, atol=1e-5)
    assert torch.allclose(reversed_order, together, atol=1e-5)


def test_blocks_run_on_as_many_tokens_as_planned(model: Any, metric: TokenMetric) -> None:
    plan = AdaptivePlan((0, 5, 0, 9), metric)
    small: Any = pmvit.compress(model, plan)
    seen: list[int] = []
    for block in small.blocks:
        inside = block.block if isinstance(block, AdaptiveBlock) else block
        inside.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].shape[1]))
    with torch.inference_mode():
        out = small.forward_features(torch.randn(2, 3, 64, 64))
    assert seen == [1 + count for count in plan.tokens] == [17, 12, 12, 3]
    assert out.shape[1] == 17  # every token has its place again
    assert not isinstance(small.blocks[0], AdaptiveBlock)
    assert flops(small).macs == pytest.approx(metric.macs(plan.merges), rel=1e-9)


def test_groups_receive_one_update(model: Any, metric: TokenMetric) -> None:
    """What sets tokens of a group apart stays as it was."""
    small: Any = pmvit.compress(model, AdaptivePlan((0, 8, 0, 0), metric))
    inputs: list[Tensor] = []
    small.blocks[1].register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    with torch.inference_mode():
        outputs = small.forward_intermediates(torch.randn(2, 3, 64, 64), output_fmt="NLC", intermediates_only=True)
    updates = outputs[-1] - inputs[0][:, 1:]
    alike = (updates[0][:, None] - updates[0]).abs().amax(-1) < 1e-4
    assert (1 / alike.sum(1)).sum() == pytest.approx(8)


def test_threads_do_not_see_each_others_groups(model: Any, metric: TokenMetric) -> None:
    small = pmvit.compress(model, AdaptivePlan((0, 5, 3, 0), metric))
    images = torch.randn(8, 4, 3, 64, 64)
    with torch.inference_mode():
        expected = [small(batch) for batch in images]
    found: dict[int, Tensor] = {}

    def run(number: int) -> None:
        with torch.inference_mode():
            for _ in range(5):
                found[number] = small(images[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(images))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[number], expected[number]) for number in range(len(images)))


def test_gradients_pass_through_merges_and_checkpointing_is_refused(model: Any, metric: TokenMetric) -> None:
    small: Any = pmvit.compress(model, AdaptivePlan((4, 4, 0, 0), metric)).train()
    images = torch.randn(2, 3, 64, 64)
    small(images).sum().backward()
    assert all(parameter.grad is not None and torch.isfinite(parameter.grad).all() for parameter in small.parameters())
    small.set_grad_checkpointing(True)
    with pytest.raises(RuntimeError, match="set_grad_checkpointing"):
        small(images).sum().backward()


def test_decompress_gives_the_very_same_objects(model: Any, metric: TokenMetric) -> None:
    again: Any = small_vit(img_size=64, depth=4)
    before = list(again.blocks)
    pmvit.compress(again, AdaptivePlan((0, 5, 3, 0), metric), inplace=True)
    assert pmvit.decompress(again) is again
    assert all(block is other for block, other in zip(again.blocks, before, strict=True))


@pytest.mark.parametrize("target", ["eager", "graph", "onnx"])
@pytest.mark.parametrize("tokens", ["head", "all"])
def test_passes_are_exact(model: Any, metric: TokenMetric, target: Any, tokens: Any) -> None:
    small: Any = pmvit.compress(model, AdaptivePlan((0, 5, 3, 1), metric))
    fast: Any = pmvit.optimize_for_inference(small, target=target, tokens=tokens)
    images = torch.randn(3, 3, 64, 64)
    with torch.inference_mode():
        assert torch.allclose(fast(images), small(images), atol=1e-5)
        if tokens == "all":
            assert torch.allclose(fast.forward_features(images), small.forward_features(images), atol=1e-4)


def test_the_last_mlp_runs_on_what_is_read(model: Any, metric: TokenMetric) -> None:
    """Of the patches it gets the mean; the class token has what it would have."""
    small: Any = pmvit.compress(model, AdaptivePlan((0, 5, 3, 0), metric))
    whole: Any = copy.deepcopy(small)
    last = whole.blocks[-1].block
    last.norm2, last.mlp = last.norm2.norm, last.mlp.mlp
    images, seen = torch.randn(3, 3, 64, 64), []
    small.blocks[-1].block.mlp.mlp.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    with torch.inference_mode():
        assert torch.allclose(small(images), whole(images), atol=1e-5)
    assert seen == [2]
    pooled = timm.create_model("vit_tiny_patch16_224", global_pool="avg", img_size=64, depth=2, num_classes=3)
    assert not metric_of(pooled).spares_last_mlp


def test_tokens_are_compared_in_float32(metric: TokenMetric) -> None:
    """Where tokens are far from 0, half precision could not tell their distances apart."""
    tokens = (torch.randn(2, 17, 48) + 50).half()
    step = MergeStep(metric.projections[1].half().float(), 16, 6, 1)
    expected = step(tokens.float(), None, 16)[2]
    found = step.half()(tokens, None, 16)[2]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_graphs_are_whole(model: Any, metric: TokenMetric) -> None:
    small = pmvit.compress(model, AdaptivePlan((0, 5, 3, 0), metric)).eval()
    images = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        expected: Tensor = small(images)
        compiled: Any = torch.compile(small, fullgraph=True, backend="eager")
        assert torch.allclose(compiled(images), expected, atol=1e-5)
        exported: Any = torch.export.export(small, (images,)).module()
        assert torch.allclose(exported(images), expected, atol=1e-5)
        traced: Any = torch.jit.trace(small, images)
        assert torch.allclose(traced(images), expected, atol=1e-5)


def test_saved_models_come_back_and_take_other_budgets(model: Any, metric: TokenMetric, tmp_path: Path) -> None:
    plan = pmvit.plan(metric, keep=0.7)
    small = pmvit.compress(model, plan)
    images = torch.randn(2, 3, 64, 64)
    for target in (tmp_path / "folder", tmp_path / "file.safetensors"):
        pmvit.save(small, target)
        again = pmvit.load(target)
        with torch.inference_mode():
            assert torch.equal(again(images), small(images))
        faster = pmvit.load(target, keep=0.5)
        with torch.inference_mode():
            assert torch.equal(faster(images), pmvit.compress(model, plan.at(keep=0.5))(images))
    written = pmvit_here("export", tmp_path / "folder", "--keep", 0.5, "-o", tmp_path / "faster.pt2")
    assert written.returncode == 0, written.stderr
    exported: Any = torch.export.load(tmp_path / "faster.pt2").module()
    assert torch.allclose(exported(images), faster(images), atol=1e-5)


def test_metrics_and_plans_are_files(metric: TokenMetric, tmp_path: Path) -> None:
    metric.save(tmp_path / "metric.safetensors")
    again = TokenMetric.load(tmp_path / "metric.safetensors")
    assert torch.equal(again.projections, metric.projections)
    assert (again.cost, again.config) == (metric.cost, metric.config)
    plan = pmvit.plan(again, flops_share=0.7)
    plan.save(tmp_path / "plan.safetensors")
    for thing in (metric, plan):
        with pytest.raises(PmvitError, match=r"a name that ends in \.safetensors"):
            thing.save(tmp_path / "plan.json")
    assert AdaptivePlan.load(tmp_path / "plan.safetensors").merges == plan.merges
    assert str(plan.merges[1] or "-") in str(plan)


def test_metrics_of_earlier_versions_are_read(metric: TokenMetric) -> None:
    """They chose in rounds; the first counted the last MLP on all groups, had schedules, and other words."""
    document = json.loads(metric.to_json())
    config = document["config"]
    for version, rounds in ((3, {"matchings": 2}), (2, {})):
        written = {**document, "version": version, "config": {**config, **rounds}}
        with pytest.warns(PmvitWarning, match="other tokens merge than when it was saved"):
            read = TokenMetric.from_json(json.dumps(written), metric.projections)
        assert read.config == metric.config
    document.pop("spares_last_mlp")
    config |= {"numbers": config.pop("rank"), "trial_images": 512, "isolation": 0}
    document |= {"version": 1, "skip": [], "schedules": [[0.6, [0, 5, 3, 0], 0.1]]}
    with pytest.warns(PmvitWarning):
        old = TokenMetric.from_json(json.dumps(document), metric.projections)
    assert old.config == metric.config
    config["isolation"] = 8
    with pytest.warns(PmvitWarning), pytest.raises(PmvitError, match="measure it again"):
        TokenMetric.from_json(json.dumps(document), metric.projections)
    merges = (0, 5, 3, 0)
    spared = 7 * metric.cost.blocks[-1].mlp // 17  # of 16 patches, 8 are left, and now one
    assert old.macs(merges) - metric.macs(merges) == spared


@pytest.mark.parametrize("budget", [{"keep": 0.6}, {"flops_share": 0.7}, {"keep": 0.3}])
@pytest.mark.parametrize("multiple_of", [1, 4])
def test_budgets_are_kept(metric: TokenMetric, budget: dict[str, float], multiple_of: int) -> None:
    plan = pmvit.plan(metric, multiple_of=multiple_of, **budget)  # type: ignore[call-overload]
    if "keep" in budget:
        assert budget["keep"] - 0.2 < plan.keep <= budget["keep"]
    else:
        assert metric.macs(plan.merges) <= budget["flops_share"] * metric.cost.macs
    changed = [tokens + 1 for tokens, r in zip(plan.tokens, plan.merges, strict=True) if r]
    assert all(tokens % multiple_of == 0 for tokens in changed)


@pytest.mark.parametrize("share", [0.79, 0.68, 0.58, 0.5, 0.3])
def test_budgets_are_used(share: float, metric: TokenMetric) -> None:
    """But for what one merge saves: counts of a span differ by one, where equal ones would leave more unused."""
    cost = model_cost(timm.create_model("vit_tiny_patch16_224"))
    large = replace(metric, grid=(14, 14), cost=cost, projections=torch.zeros(12, 192, 64))
    budget = cost.outside + share * (cost.macs - cost.outside)
    plan = pmvit.plan(large, gflops=budget / 1e9)
    counts = [r for r in plan.merges if r]
    assert 0.997 * budget < large.macs(plan.merges) <= budget
    assert max(counts) - min(counts) <= 1
    for index, r in enumerate(plan.merges):
        if r == max(counts):
            assert large.macs((*plan.merges[:index], r - 1, *plan.merges[index + 1 :])) > budget


def test_what_does_not_fit_is_one_line(model: Any, metric: TokenMetric) -> None:
    other = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4, embed_dim=96, num_heads=3, num_classes=10)
    with pytest.raises(PmvitError, match="embedding dimension of"):
        pmvit.compress(other, AdaptivePlan((0, 5, 3, 0), metric))
    deeper = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=5, embed_dim=48, num_heads=3, num_classes=10)
    with pytest.raises(PmvitError, match="5 blocks"):
        pmvit.compress(deeper, AdaptivePlan((0, 5, 3, 0), metric))
    with pytest.raises(PmvitError, match="leaves a token"):
        AdaptivePlan((0, 8, 8, 0), metric)
    with pytest.raises(PmvitError, match="one number for each"):
        AdaptivePlan((0, 8), metric)
    with pytest.raises(PmvitError, match="leaves a token"):
        pmvit.plan(metric, keep=0.01)
    with pytest.raises(PmvitError, match="skip: expected blocks from -4 to 3, got 4"):
        pmvit.plan(metric, keep=0.5, skip=(4,))
    with pytest.raises(PmvitError, match="makes plans from merge costs"):
        pmvit.plan(metric, keep=0.5, method="measured")
    broken = metric.projections.clone()
    broken[0, 0, 0] = torch.nan
    with pytest.raises(PmvitError, match="finite projections"):
        TokenMetric.from_json(metric.to_json(), broken)


def test_the_metric_is_the_second_moment_of_differences_of_gradients(model: Any) -> None:
    from pmvit.measuring.probe import probe

    torch.manual_seed(0)
    images = torch.randn(4, 3, 64, 64)
    metric = pmvit.measure(model, [images], method="adaptive", rank=48, progress=False)
    tokens: list[Tensor] = []
    handle = model.blocks[2].register_forward_pre_hook(lambda _, arguments: tokens.append(arguments[0]))
    logits = model(images)
    handle.remove()
    direction = probe(logits, True, torch.Generator().manual_seed(MetricConfig.seed))
    gradient = torch.autograd.grad((direction * logits).sum(), tokens[0])[0][:, 1:].unflatten(1, (4, 4))
    pairs = [gradient[:, row, column] - gradient[:, row, column + 1] for row in range(4) for column in range(3)]
    pairs += [gradient[:, row, column] - gradient[:, row + 1, column] for row in range(3) for column in range(4)]
    moment = sum((pair.T @ pair for pair in pairs), torch.zeros(48, 48)) / (2 * 4 * 24)
    root = metric.projections[2]
    assert torch.allclose(root @ root.T, moment, atol=1e-5 * float(moment.norm()))


def test_calibration_and_fine_tuning_work_on_top(model: Any, metric: TokenMetric) -> None:
    """Biases are corrected by running blocks again, which have to find the groups of the block before them."""
    images = torch.randn(16, 3, 64, 64)
    small = pmvit.compress(model, AdaptivePlan((0, 8, 0, 4), metric))
    with torch.inference_mode():
        reference, before = model(images), small(images)
    pmvit.calibrate(small, [images], teacher=model, distill=False, progress=False)
    with torch.inference_mode():
        after = small(images)
    assert (after - reference).square().mean() < (before - reference).square().mean()
    pmvit.calibrate(small, [images], teacher=model, epochs=1, progress=False)
    with torch.inference_mode():
        assert torch.isfinite(small(images)).all()
