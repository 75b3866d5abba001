"""The parts of fine-tuning: the loss, the matrices and the configuration."""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pmvit
from pmvit.config import PRESETS, FinetuneConfig
from pmvit.prune_merge import PruneMerge
from pmvit.runtime.chain import maps_of
from pmvit.training.learner import matrix_parameters, parameter_groups
from pmvit.training.loss import divergence, finetune_loss, token_distance
from pmvit.training.metrics import read_metrics
from tests.helpers import QUIET, Batches, compressed, states


def test_loss_is_equation_11() -> None:
    torch.manual_seed(0)
    logits, taught = torch.randn(5, 7), torch.randn(5, 7)
    labels = torch.randint(0, 7, (5,))
    config = FinetuneConfig(alpha=0.4)
    p, q = logits.softmax(-1), taught.softmax(-1)
    cross_entropy = -p[torch.arange(5), labels].log().mean()
    kl = (q * (q / p).log()).sum(-1).mean()
    parts = finetune_loss(config, logits, labels, taught)
    assert torch.allclose(parts["loss"], cross_entropy + 0.4 * kl, atol=1e-6)
    assert set(finetune_loss(config, logits, labels)) == {"loss", "ce"}
    alone = finetune_loss(FinetuneConfig(alpha=0.4, labels=False), logits, None, taught)
    assert torch.allclose(alone["loss"], kl, atol=1e-6)
    assert set(alone) == {"loss", "kl"}


def test_mixed_and_smoothed_labels() -> None:
    logits = torch.randn(4, 7)
    labels = torch.tensor([0, 1, 2, 3])
    smoothed = finetune_loss(FinetuneConfig(label_smoothing=0.2), logits, labels)["ce"]
    target = F.one_hot(labels, 7) * 0.8 + 0.2 / 7
    assert torch.allclose(smoothed, -(target * logits.log_softmax(-1)).sum(-1).mean(), atol=1e-6)
    # Mixup has smoothed its distributions already: no second smoothing.
    assert torch.allclose(finetune_loss(FinetuneConfig(label_smoothing=0.2), logits, target)["ce"], smoothed, atol=1e-6)


def test_temperature_keeps_the_size_of_the_gradient() -> None:
    logits, taught = torch.randn(3, 10, requires_grad=True), torch.randn(3, 10)
    assert divergence(taught, taught, 3.0).abs() < 1e-6
    sizes = []
    for temperature in (50.0, 500.0):
        (gradient,) = torch.autograd.grad(divergence(logits, taught, temperature), logits)
        sizes.append(gradient.norm())
    assert torch.allclose(sizes[0], sizes[1], rtol=0.05)


def test_token_distance_looks_at_directions() -> None:
    torch.manual_seed(0)
    tokens = torch.randn(2, 50, 64)
    assert token_distance(tokens, 3 * tokens + 1).abs() < 1e-3
    assert torch.allclose(token_distance(tokens, torch.randn(2, 50, 64)), torch.tensor(2.0), atol=0.1)


def test_loss_asks_for_labels_it_needs() -> None:
    with pytest.raises(pmvit.PmvitError, match="labels=False"):
        finetune_loss(FinetuneConfig(), torch.randn(2, 7), None)
    with pytest.raises(pmvit.PmvitError, match="expected labels below 7"):
        finetune_loss(FinetuneConfig(), torch.randn(2, 7), torch.tensor([1, 7]))


def is_matrix(name: str) -> bool:
    """M and R that the loss depends on: the head reads the class token alone, so not R of the last block."""
    return name.endswith(("merge_weights", "reconstruct_weights")) and name != "blocks.2.reconstruct_weights"


def moved(before: dict[str, Tensor], after: dict[str, Tensor], which: Callable[[str], bool]) -> list[bool]:
    return [not torch.equal(before[name], after[name]) for name in before if which(name)]


@pytest.mark.parametrize(("schedule", "learnable"), [("frozen", 0), ("learnable", 3), ("learnable+frozen", 1)])
@pytest.mark.parametrize("reconstruct", ["residual", "pinv"])
def test_matrices_learn_as_scheduled(
    schedule: str, learnable: int, reconstruct: str, small_batches: Batches, tmp_path: Path
) -> None:
    model = compressed(reconstruct=reconstruct)
    wrapped = [module for module in model.modules() if isinstance(module, PruneMerge)]
    support = [(module.merge_matrix() != 0, module.reconstruct_matrix() != 0) for module in wrapped]
    options = {**QUIET, "epochs": 3, "lr": 0.01, "warmup_epochs": 0, "matrices": schedule}
    pmvit.finetune(model, train=small_batches, output=tmp_path, freeze_matrices_after=1, **options)
    after = states(tmp_path)
    assert sorted(after) == list(range(1, 10))
    for step in range(2, 10):
        epoch = (step - 1) // 3
        assert all(moved(after[step - 1], after[step], is_matrix)) == (epoch < learnable)
        assert any(moved(after[step - 1], after[step], is_matrix)) == (epoch < learnable)
        assert any(moved(after[step - 1], after[step], lambda name: "_weights" not in name))
    for module, (merge, back) in zip(wrapped, support, strict=True):
        assert torch.equal(module.merge_matrix() != 0, merge)
        assert torch.equal(module.reconstruct_matrix() != 0, back)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_token_alone_in_its_group_keeps_its_weight(small_batches: Batches) -> None:
    model = compressed()
    pmvit.finetune(model, train=small_batches, epochs=2, lr=0.01, matrices="learnable", progress=False)
    for module in model.modules():
        if isinstance(module, PruneMerge):
            assert 0 < module.merge_shared.sum() < module.merge_shared.numel()
            for weights, is_shared in (
                (module.merge_weights, module.merge_shared),
                (module.reconstruct_weights, module.reconstruct_shared),
            ):
                assert (weights[~is_shared] == 1).all()
            assert (module.merge_weights[module.merge_shared] != 1).all()
            table = len(maps_of(module).enter)
            assert table <= 37 + module.num_groups - int(
                (~module.merge_shared).sum()
            )  # at most a row more a real group


def test_dense_matrices_fill(small_batches: Batches) -> None:
    model = compressed(learn="dense")
    before = [(weights != 0).sum() for weights in matrix_parameters(model)]
    pmvit.finetune(model, train=small_batches, epochs=1, lr=0.01, progress=False)
    after = [(weights != 0).sum() for weights in matrix_parameters(model)]
    filled = [bool(now > then) for now, then in zip(after, before, strict=True)]
    assert filled == [True] * 5 + [False]  # R of the last block has no gradient: the head reads the class token alone


def test_every_group_follows_the_schedule(small_batches: Batches, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "epochs": 4,
        "lr": 0.01,
        "min_lr": 0.001,
        "matrix_lr_factor": 3.0,
        "matrices": "learnable",
    }
    pmvit.finetune(compressed(), train=small_batches, output=tmp_path, **QUIET, **options)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 13))
    for line in lines:
        share = (line["step"] - 1) / 12
        expected = 0.001 + 0.5 * (0.01 - 0.001) * (1 + math.cos(math.pi * share))
        assert line["lr"] == pytest.approx(expected, rel=1e-6)
        assert line["matrix_lr"] == pytest.approx(3 * expected, rel=1e-6)


def test_parameter_groups_are_whole_and_matrices_do_not_decay() -> None:
    for learn in ("group", "dense"):
        model = compressed(learn=learn)
        groups = {group["name"]: group for group in parameter_groups(model, FinetuneConfig(weight_decay=0.1))}
        assert {name: group["weight_decay"] for name, group in groups.items()} == {
            "weights": 0.1,
            "no decay": 0.0,
            "matrices": 0.0,
        }
        seen = [id(parameter) for group in groups.values() for parameter in group["params"]]
        assert sorted(seen) == sorted(id(parameter) for parameter in model.parameters())
        assert {id(p) for p in groups["matrices"]["params"]} == {id(p) for p in matrix_parameters(model)}
        exempt = {id(p) for p in groups["no decay"]["params"]}
        assert id(model.pos_embed) in exempt
        assert id(model.get_parameter("norm.weight")) in exempt


def test_presets_are_the_papers() -> None:
    alphas = {name: FinetuneConfig.preset(name).alpha for name in PRESETS if FinetuneConfig.preset(name).labels}
    assert alphas == {
        "deit_tiny": 0.4,
        "deit_small": 0.6,
        "mae_base": 0.8,
        "swin_tiny": 0.6,
        "segmenter": 1.0,
        "quick": 1.0,
    }
    for name in ("deit_tiny", "deit_small", "mae_base", "swin_tiny"):
        config = FinetuneConfig.preset(name)
        paper = (config.epochs, config.learnable_epochs, config.batch_size, config.lr, config.weight_decay)
        assert paper == (60, 40, 256, 1e-4, 1e-3)
        assert config.optimizer == "adamw"
        assert config.scheduler == "cosine"
    assert FinetuneConfig.preset("segmenter").epochs == 40
    assert asdict(FinetuneConfig.preset("quick", epochs=3))["epochs"] == 3
    with pytest.raises(pmvit.PmvitError, match="expected one of the presets deit_tiny"):
        FinetuneConfig.preset("deit")
    with pytest.raises(pmvit.PmvitError, match="unknown option 'epoch'"):
        FinetuneConfig.preset("quick", epoch=3)  # type: ignore[call-arg]  # the mistake


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0}, "epochs: expected 1 or more, got 0"),
        ({"alpha": -1}, "alpha: expected 0 or more"),
        ({"ema": 1.0}, "ema: expected a decay"),
        ({"matrices": "thawed"}, "matrices: expected one of"),
        ({"scheduler": "plateau"}, "scheduler: expected one of cosine"),
        ({"crop_scale": (0.9, 0.1)}, "crop_scale: expected two shares"),
        ({"batch_size": 10, "accumulate": 4}, "accumulate divides"),
        ({"labels": False, "mixup": 0.8}, "nothing to mix"),
        ({"mixed_precision": "fp8"}, "mixed_precision: expected one of"),
    ],
)
def test_configuration_says_what_it_expected(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(pmvit.PmvitError, match=message):
        FinetuneConfig(**wrong)
