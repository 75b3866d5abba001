"""Eq. 9 through the values is Eq. 9 through the attention map; accumulation, resuming, errors."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import pmvit
from pmvit.config.measuring import Scorer
from pmvit.hosts import host_of
from pmvit.measuring import Scores
from pmvit.measuring.scores import PARTIAL_FORMAT
from tests.helpers import small_vit

Batches = list[tuple[Tensor, Tensor]]


def explicit_scores(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """All scorers from attention maps that are really there: fused attention off, maps caught at the dropout."""
    model = copy.deepcopy(model)
    maps: list[Tensor] = []
    inputs: list[Tensor] = []

    def keep(store: list[Tensor], tensor: Tensor) -> None:
        tensor.retain_grad()
        store.append(tensor)

    def product(tensor: Tensor) -> Tensor:
        assert tensor.grad is not None
        return tensor * tensor.grad

    modules: list[Any] = list(model.modules())
    for module in modules:
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
        if hasattr(module, "attn_drop"):
            module.attn_drop.register_forward_hook(lambda _, args, __: keep(maps, args[0]))
    for block in model.get_submodule("blocks").children():
        block.register_forward_pre_hook(lambda _, args: keep(inputs, args[0]))
    F.cross_entropy(model(images), labels, reduction="sum").backward()
    prefix = host_of(model).layout.num_prefix
    weighted = [product(a).mean(1) for a in maps]
    result = {
        "grad_attn": torch.stack([w.sum(1) for w in weighted]),
        "grad_class_attn": torch.stack([w[:, 0] for w in weighted]),
        "attn": torch.stack([a.mean(1).sum(1) for a in maps]),
        "class_attn": torch.stack([a.mean(1)[:, 0] for a in maps]),
        "grad": torch.stack([product(z).mean(-1) for z in inputs]),
    }
    return {name: values[:, :, prefix:].detach() for name, values in result.items()}


@pytest.mark.data
def test_values_give_equation_9_on_a_real_model(deit_tiny: nn.Module, train_batches: Batches) -> None:
    model = copy.deepcopy(deit_tiny).double()
    images, labels = train_batches[0][0][:4].double(), train_batches[0][1][:4]
    expected = explicit_scores(model, images, labels)["grad_attn"].mean(1).abs()
    with torch.no_grad():
        got = pmvit.measure(model, [(images, labels)], method="scored", abs_per_sample=False, progress=False).values
    assert ((got - expected).abs().amax(1) / expected.amax(1)).max() < 1e-12


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vit_tiny_patch16_224", {}),
        ("vit_tiny_patch16_224", {"qk_norm": True, "init_values": 0.1}),
        ("beit_base_patch16_224", {"global_pool": "token"}),
        ("eva02_tiny_patch14_224", {"img_size": 84, "global_pool": "token"}),
        ("vit_relpos_small_patch16_224", {"class_token": True, "global_pool": "token"}),
        ("vit_relpos_small_patch16_224", {}),
        ("deit_tiny_distilled_patch16_224", {}),
    ],
)
@pytest.mark.parametrize("scorer", ["grad_attn", "attn", "class_attn", "grad_class_attn", "grad"])
def test_every_scorer_is_its_formula(name: str, arguments: dict[str, Any], scorer: Scorer) -> None:
    model = small_vit(name, **arguments).double()
    if "class" in scorer and host_of(model).layout.num_prefix == 0:
        with pytest.raises(pmvit.PmvitError, match="needs a class token"):
            pmvit.measure(model, [], method="scored", scorer=scorer)
        with pytest.raises(pmvit.PmvitError, match="needs a class token"):
            pmvit.measure(
                small_vit(class_token=False, reg_tokens=2, global_pool="avg"), [], method="scored", scorer=scorer
            )
        return
    images = torch.randn(3, *host_of(model).input_size(), dtype=torch.float64)
    labels = torch.tensor([0, 3, 6])
    per_image = explicit_scores(model, images, labels)[scorer]
    for abs_per_sample in (False, True):
        expected = per_image.abs().mean(1) if abs_per_sample else per_image.mean(1).abs()
        got = pmvit.measure(
            model, [(images, labels)], method="scored", scorer=scorer, abs_per_sample=abs_per_sample, progress=False
        ).values
        assert torch.allclose(got, expected, rtol=1e-9, atol=expected.max().item() * 1e-12)


def test_iterations_are_averaged(small_model: nn.Module, small_batches: Batches) -> None:
    singly = [pmvit.measure(small_model, [batch], method="scored", progress=False).values for batch in small_batches]
    together = pmvit.measure(small_model, small_batches, method="scored", progress=False)
    assert torch.allclose(together.values, torch.stack(singly).mean(0))
    assert (together.iterations, together.images) == (3, 12)
    first_two = pmvit.measure(small_model, small_batches, method="scored", iterations=2, progress=False)
    assert torch.allclose(first_two.values, torch.stack(singly[:2]).mean(0))


def test_the_model_is_left_as_it_was(small_model: Any, small_batches: Batches) -> None:
    small_model.train()
    small_model.blocks[1].eval()
    small_model.blocks[0].mlp.fc1.weight.requires_grad_(False)
    small_model.blocks[2].attn.fused_attn = False
    small_model.set_grad_checkpointing(True)
    modes = [module.training for module in small_model.modules()]
    wanted = [parameter.requires_grad for parameter in small_model.parameters()]
    weights = copy.deepcopy(small_model.state_dict())
    scores = pmvit.measure(small_model, small_batches, method="scored", progress=False)
    assert [module.training for module in small_model.modules()] == modes
    assert [parameter.requires_grad for parameter in small_model.parameters()] == wanted
    assert [block.attn.fused_attn for block in small_model.blocks] == [True, True, False]
    assert small_model.grad_checkpointing
    assert all(parameter.grad is None for parameter in small_model.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in small_model.state_dict().items())
    assert not any(block._forward_pre_hooks or block._forward_hooks for block in small_model.blocks)
    small_model.set_grad_checkpointing(False)
    assert torch.equal(scores.values, pmvit.measure(small_model, small_batches, method="scored", progress=False).values)


def test_labels_can_be_the_models_own(small_model: nn.Module, small_batches: Batches) -> None:
    with torch.no_grad():
        predicted = [(images, small_model(images).argmax(1)) for images, _ in small_batches]
    images_alone = [images for images, _ in small_batches]
    expected = pmvit.measure(small_model, predicted, method="scored", progress=False).values
    got = pmvit.measure(small_model, images_alone, method="scored", loss="predicted", progress=False).values
    assert torch.equal(got, expected)
    entropy = pmvit.measure(small_model, images_alone, method="scored", loss="entropy", progress=False).values
    assert not torch.allclose(entropy, expected)
    with pytest.raises(pmvit.PmvitError, match=r'got images alone: use loss="predicted"'):
        pmvit.measure(small_model, images_alone, method="scored", progress=False)


def test_an_interrupted_run_goes_on(small_model: nn.Module, small_batches: Batches, tmp_path: Path) -> None:
    def interrupted() -> Iterator[tuple[Tensor, Tensor]]:
        yield from small_batches[:2]
        raise KeyboardInterrupt

    partial = tmp_path / "partial.json"
    with pytest.raises(KeyboardInterrupt):
        pmvit.measure(small_model, interrupted(), method="scored", checkpoint=partial, progress=False)
    assert Scores.load(partial, PARTIAL_FORMAT).iterations == 2

    def changed_where_done() -> Iterator[tuple[Tensor, Tensor]]:
        yield from [(torch.zeros_like(images), labels) for images, labels in small_batches[:2]]
        yield small_batches[2]

    resumed = pmvit.measure(small_model, changed_where_done(), method="scored", checkpoint=partial, progress=False)
    assert torch.equal(
        resumed.values, pmvit.measure(small_model, small_batches, method="scored", progress=False).values
    )
    assert resumed.iterations == 3

    other = small_vit()
    with torch.no_grad():
        other.get_parameter("blocks.0.mlp.fc1.weight").add_(1)
    with pytest.raises(pmvit.PmvitError, match="partial scores of other weights"):
        pmvit.measure(other, interrupted(), method="scored", checkpoint=partial, progress=False)
    with pytest.raises(pmvit.PmvitError, match="partial scores of other configuration"):
        pmvit.measure(small_model, interrupted(), method="scored", scorer="grad", checkpoint=partial, progress=False)
    with pytest.raises(pmvit.PmvitError, match="partial scores of other data"):
        pmvit.measure(small_model, small_batches, method="scored", checkpoint=partial, progress=False)


def test_scores_survive_a_file(small_model: nn.Module, small_batches: Batches, tmp_path: Path) -> None:
    scores = pmvit.measure(small_model, small_batches, method="scored", progress=False)
    scores.save(tmp_path / "scores.json")
    loaded = Scores.load(tmp_path / "scores.json")
    assert torch.equal(loaded.values, scores.values)
    assert (loaded.cost, loaded.config, loaded.grid) == (scores.cost, scores.config, scores.grid)
    text = (tmp_path / "scores.json").read_text()
    text = re.sub(r',\s*"sha256": "\w+"', "", text)  # as somebody edits it
    for broken, message in [
        (text[: len(text) // 2], "breaks off"),
        (text.replace("pmvit-scores", "pmvit-plan"), "is it another file"),
        (text.replace('"version": 1', '"version": 7'), "expected version 1"),
        (text.replace('"grid": [6, 6]', '"grid": [6, 5]'), "expected scores for 3 blocks of 6 x 5 tokens"),
        (text.replace('"images"', '"pictures"'), "the field 'images' is missing"),
        (text.replace('"values": [[', '"values": [[NaN, '), "blocks of 6 x 6 tokens, got 3 of 36, 37"),
        (re.sub(r'"values": \[\[[^,]+', '"values": [[NaN', text), "expected finite scores"),
        (text.replace('"num_prefix": 1', '"num_prefix": "1"'), "num_prefix: expected a whole number, got '1'"),
        (text.replace('"linear": ', '"linear": 0.5'), "linear: expected a whole number"),
    ]:
        (tmp_path / "broken.json").write_text(broken)
        with pytest.raises(pmvit.PmvitError, match=message):
            Scores.load(tmp_path / "broken.json")


def test_bad_scores_name_the_layer(small_model: nn.Module, small_batches: Batches) -> None:
    broken = copy.deepcopy(small_model)
    with torch.no_grad():
        broken.get_parameter("blocks.1.attn.proj.weight").zero_()
    with pytest.raises(pmvit.PmvitError, match="block 1: all scores are zero"):
        pmvit.measure(broken, small_batches, method="scored", progress=False)
    with torch.no_grad():
        broken.get_parameter("blocks.2.attn.qkv.weight")[0, 0] = float("nan")
    with pytest.raises(pmvit.PmvitError, match="block 0: the scores are not finite"):
        pmvit.measure(broken, small_batches, method="scored", progress=False)


def test_input_that_does_not_fit_is_named(small_model: nn.Module, small_batches: Batches) -> None:
    images, labels = small_batches[0]
    mistakes: list[tuple[list[Any], dict[str, Any], str]] = [
        ([], {}, "the loader is empty"),
        ([(images, labels + 7)], {}, "expected labels below 7"),
        ([{"picture": images}], {}, "expected batches of images"),
        ([], {"scorer": "gradient"}, "scorer: expected one of grad_attn"),
        ([], {"iterations": 0}, "iterations: expected 1 or more"),
    ]
    for batches, options, message in mistakes:
        with pytest.raises(pmvit.PmvitError, match=message):
            pmvit.measure(small_model, batches, method="scored", progress=False, **options)
    small = pmvit.compress(
        small_model, pmvit.plan(pmvit.measure(small_model, [], method="scored", scorer="random"), keep=0.5)
    )
    with pytest.raises(pmvit.PmvitError, match="expected an uncompressed model to measure"):
        pmvit.measure(small, small_batches, method="scored", progress=False)


def test_random_scores_depend_on_the_seed_alone(small_model: nn.Module) -> None:
    draws = [pmvit.measure(small_model, [], method="scored", scorer="random", seed=seed).values for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def _score_half(rank: int, rendezvous: str, output: str, batches: Batches) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    half = slice(2 * rank, 2 * rank + 2)
    for abs_per_sample in (False, True):
        mine = [(images[half], labels[half]) for images, labels in batches]
        scores = pmvit.measure(small_vit(), mine, method="scored", abs_per_sample=abs_per_sample, progress=False)
        scores.save(f"{output}/{rank}-{abs_per_sample}.json")
    torch.distributed.destroy_process_group()


def test_two_processes_find_what_one_finds(small_model: nn.Module, small_batches: Batches, tmp_path: Path) -> None:
    spawn(_score_half, (str(tmp_path / "rendezvous"), str(tmp_path), small_batches), nprocs=2)
    for abs_per_sample in (False, True):
        alone = pmvit.measure(
            small_model, small_batches, method="scored", abs_per_sample=abs_per_sample, progress=False
        )
        for rank in range(2):
            scores = Scores.load(tmp_path / f"{rank}-{abs_per_sample}.json")
            assert torch.allclose(scores.values, alone.values, rtol=1e-4)
            assert scores.images == alone.images
            assert pmvit.plan(scores, keep=0.5).layers[0].groups == pmvit.plan(alone, keep=0.5).layers[0].groups
