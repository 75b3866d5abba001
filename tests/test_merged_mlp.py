"""MLPs that run on fewer tokens than attention: the formula, the way back, files, costs, learning, mistakes."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmvit
from pmvit.config.training import Learn
from pmvit.merged_mlp import MergedNorm, SpreadMlp
from pmvit.planning import LayerPlan, Plan
from pmvit.planning.budget import predicted_macs
from pmvit.prune_merge import TokenMatrices
from pmvit.training.learner import matrix_parameters, set_learnable
from tests.helpers import small_vit
from tests.swins import small_swin

ALL = LayerPlan.keep_all(36)
PAIRS = LayerPlan(tuple(token // 2 for token in range(36)), tuple(range(0, 36, 2)), (0.5,) * 36)
ROWS = LayerPlan(tuple(token // 6 for token in range(36)), tuple(range(0, 36, 6)), (1 / 6,) * 36)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Attention on all and the MLP on pairs; attention on pairs and the MLP on rows; both on rows."""
    layers = {0: replace(ALL, mlp=PAIRS), 1: replace(PAIRS, mlp=ROWS), 2: ROWS}
    return Plan((6, 6), 3, layers, attention_bias=True)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(1))


def logits(model: nn.Module, images: Tensor) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model.eval()(images)
    return result


def matrices_of(model: nn.Module, norm: str) -> TokenMatrices:
    """M and R of the MLP behind this norm."""
    module = model.get_submodule(norm)
    assert isinstance(module, MergedNorm)
    assert isinstance(module.matrices, TokenMatrices)
    return module.matrices


@pytest.mark.parametrize("learn", ["group", "dense"])
def test_every_token_gets_the_update_of_its_group(plan: Plan, learn: Learn) -> None:
    model = small_vit()
    small = pmvit.compress(model, plan, learn=learn)
    tokens = torch.randn(2, 37, 48, generator=torch.Generator().manual_seed(2))
    block: Any = model.get_submodule("blocks.0")
    with torch.inference_mode():
        attended = tokens + block.attn(block.norm1(tokens))
        means = torch.stack([attended[:, 1 + 2 * pair : 3 + 2 * pair].mean(1) for pair in range(18)], dim=1)
        updates = block.mlp(block.norm2(torch.cat([attended[:, :1], means], dim=1)))
        expected = attended + torch.cat([updates[:, :1], updates[:, 1:].repeat_interleave(2, dim=1)], dim=1)
        assert torch.allclose(small.get_submodule("blocks.0")(tokens), expected, atol=1e-5)


def test_groups_of_groups_weigh_by_their_members() -> None:
    """A group of two and a single token: the MLP sees the mean of three."""
    attention = LayerPlan((0, 0, *range(1, 35)), (0, *range(2, 36)), (0.5, 0.5, *(1.0,) * 34))
    mlp = LayerPlan((0, 0, 0, *range(1, 34)), (1, *range(3, 36)), (*(1 / 3,) * 3, *(1.0,) * 33))
    small = pmvit.compress(small_vit(), Plan((6, 6), 3, {0: replace(attention, mlp=mlp)}))
    matrices = matrices_of(small, "blocks.0.block.norm2")
    assert torch.allclose(matrices.merge_matrix()[0, :3], torch.tensor([2 / 3, 1 / 3, 0]))
    assert torch.equal(matrices.reconstruct_matrix()[:3, 0], torch.tensor([1.0, 1.0, 0.0]))


def test_the_very_same_modules_come_back(plan: Plan, images: Tensor) -> None:
    model = small_vit()
    before, parts = logits(model, images), [(b.norm2, b.mlp) for b in model.get_submodule("blocks").children()]
    pmvit.compress(model, plan, inplace=True)
    assert not torch.allclose(logits(model, images), before, atol=1e-3)
    pmvit.decompress(model)
    assert [(b.norm2, b.mlp) for b in model.get_submodule("blocks").children()] == parts
    assert torch.equal(logits(model, images), before)


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_saved_and_loaded(plan: Plan, images: Tensor, tmp_path: Path, name: str) -> None:
    small = pmvit.compress(small_vit(), plan)
    with torch.no_grad():
        for weights in matrix_parameters(small):
            weights.mul_(1.1)
    pmvit.save(small, tmp_path / name)
    loaded = pmvit.load(tmp_path / name)
    assert torch.equal(logits(loaded, images), logits(small, images))
    assert pmvit.compress(small_vit(), plan).state_dict().keys() == loaded.state_dict().keys()
    copied = copy.deepcopy(loaded)
    matrices_of(copied, "blocks.0.norm2").reconstruct_weights.data.zero_()
    assert not torch.equal(logits(copied, images), logits(loaded, images))  # the copy's MLP reads the copy's weights


def test_costs_are_counted_and_predicted(plan: Plan) -> None:
    model = small_vit()
    merge_costs = pmvit.measure(model, [torch.randn(1, 3, 96, 96)], method="measured", progress=False)
    counted = pmvit.flops(pmvit.compress(model, plan))
    assert counted.macs == predicted_macs(merge_costs, plan)
    without = replace(plan, layers={index: replace(layer, mlp=None) for index, layer in plan.layers.items()})
    whole = pmvit.flops(pmvit.compress(model, without))
    mlp_of_a_token = 2 * 4 * 48 * 48
    products = 2 * (1 + 36) * 48 + 2 * (1 + 18) * 48
    assert whole.macs - counted.macs == (18 + 12) * mlp_of_a_token - products
    assert counted.module_macs - whole.module_macs == products
    assert counted.module_parameters - whole.module_parameters == 2 * (36 + 18)


def test_its_matrices_learn_and_freeze_with_the_others(plan: Plan, images: Tensor) -> None:
    small = pmvit.compress(small_vit(), plan)
    assert len(matrix_parameters(small)) == 2 * 4
    set_learnable(small, True)
    small(images).square().sum().backward()
    matrices = matrices_of(small, "blocks.1.block.norm2")
    assert matrices.merge_weights.grad is not None
    assert matrices.reconstruct_weights.grad is not None
    assert matrices.merge_weights.grad.abs().min() > 0
    assert matrices.reconstruct_weights.grad.abs().min() > 0
    set_learnable(small, False)
    assert not matrices.merge_weights.requires_grad


def test_a_plan_is_the_same_from_its_file(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.keep == pytest.approx((1 + 0.5) / 6 + (0.5 + 1 / 6) / 6 + 1 / 18)
    assert "in the MLP" in str(plan)


def test_mistakes_get_one_line(plan: Plan) -> None:
    crossing = LayerPlan((0, *(token // 2 for token in range(1, 36))), PAIRS.centres, PAIRS.weights)
    with pytest.raises(pmvit.PmvitError, match="block 0, mlp: expected unions of attention's groups; group 0"):
        Plan((6, 6), 3, {0: replace(ROWS, mlp=crossing)})
    with pytest.raises(pmvit.PmvitError, match=r"block 0: .* takes residual reconstruction; got pinv"):
        replace(plan, reconstruct="pinv")
    with pytest.raises(pmvit.PmvitError, match="block 0: expected groups for attention and for the MLP, got a third"):
        Plan((6, 6), 3, {0: replace(ALL, mlp=replace(PAIRS, mlp=ROWS))})
    pruned = LayerPlan((-1, *range(35)), tuple(range(1, 36)), (0.0, *(1.0,) * 35))
    with pytest.raises(pmvit.PmvitError, match="expected no pruned tokens"):
        Plan((6, 6), 3, {0: replace(ALL, mlp=pruned)})
    swin = small_swin()
    scores = pmvit.measure(swin, [], method="scored", scorer="random")
    first = pmvit.plan(scores, keep=1.0)
    split = replace(first.layers[0], mlp=replace(first.layers[0], mlp=None))
    with pytest.raises(pmvit.PmvitError, match='cannot be told apart: make a plan from merge costs with parts="whole"'):
        pmvit.compress(swin, replace(first, layers={**first.layers, 0: split}))


def test_other_image_sizes_are_refused(plan: Plan) -> None:
    small = pmvit.compress(small_vit(), plan)
    with pytest.raises(ValueError, match=r"expected 37 tokens \(36 patches \+ 1 prefix\), got 26: a fixed plan is for"):
        small.get_submodule("blocks.0")(torch.randn(1, 26, 48))


def test_stand_ins_stand_where_the_plan_says(plan: Plan) -> None:
    small = pmvit.compress(small_vit(), plan)
    assert [name for name, module in small.named_modules() if isinstance(module, MergedNorm)] == [
        "blocks.0.norm2",
        "blocks.1.block.norm2",
    ]
    assert sum(isinstance(module, SpreadMlp) for module in small.modules()) == 2
