"""Hosts: every timm architecture, what compression changes in them, and models nobody knows."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import pmvit
from pmvit.hosts import Host, TokenLayout, host_of, register
from pmvit.hosts import host as hosts
from pmvit.hosts.modes import changed
from pmvit.planning import LayerPlan, Plan
from pmvit.runtime.bench.variants import in_place_plan
from scripts.sweep import randomise, try_model
from scripts.sweep_models import Candidate, timm_models
from tests.helpers import small_vit

from timm.models import vision_transformer  # isort: skip


def structure(model: nn.Module) -> tuple[Any, ...]:
    """All that tells two models of random weights apart: kinds of modules, their settings, shapes."""
    settings = (bool, int, float, str, tuple)
    modules = [
        (name, type(module), *sorted((key, repr(v)) for key, v in vars(module).items() if isinstance(v, settings)))
        for name, module in model.named_modules()
    ]
    return (*modules, *((name, *value.shape) for name, value in model.state_dict().items()))


def test_every_sixteenth_architecture_of_the_families(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m scripts.sweep` tries all; here every sixteenth, one of those that are the same at reduced size."""
    different: dict[tuple[Any, ...], Candidate] = {}
    everything = timm_models()
    assert len(everything) > 250
    candidates = everything[::16]
    for candidate in candidates:
        model = candidate.make()
        different.setdefault(structure(model), candidate._replace(make=partial(identity, model)))
    outcomes = [try_model(candidate) for candidate in different.values()]
    failures = {outcome.architecture: outcome.reason for outcome in outcomes if outcome.reason}
    with capsys.disabled():
        print(f"\n{len(candidates)} timm architectures, {len(different)} different, {len(failures)} fail")
    assert not failures
    assert len(different) > 10


def identity(model: nn.Module) -> nn.Module:
    return model


@pytest.mark.parametrize(
    ("name", "arguments", "num_prefix"),
    [
        ("vit_tiny_patch16_224", {}, 1),
        ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}, 0),
        ("vit_tiny_patch16_224", {"reg_tokens": 4}, 5),
        ("deit_tiny_distilled_patch16_224", {}, 2),
    ],
)
def test_prefix_tokens_are_found(name: str, arguments: dict[str, object], num_prefix: int) -> None:
    model = small_vit(name, **arguments)
    assert host_of(model).layout == TokenLayout((6, 6), num_prefix)


def test_a_bias_that_is_not_at_the_centres_would_show() -> None:
    """The reordering check of the sweep can fail: at all tokens, BEiT's position bias breaks it."""
    model: Any = small_vit("beit_base_patch16_224")
    randomise(model)
    images = torch.randn(1, 3, 96, 96)
    moved = pmvit.compress(model, in_place_plan((6, 6), 3))
    with torch.inference_mode():
        assert torch.allclose(moved(images), model(images), atol=1e-5)
        for wrapper, block in zip(moved.blocks, model.blocks, strict=True):
            wrapper.block.attn._get_rel_pos_bias = block.attn._get_rel_pos_bias
        assert not torch.allclose(moved(images), model(images), atol=1e-3)


def test_a_bias_at_the_centres_follows_the_model_to_another_device() -> None:
    moved = pmvit.compress(small_vit("beit_base_patch16_224"), in_place_plan((6, 6), 3)).to("meta")
    assert moved(torch.empty(1, 3, 96, 96, device="meta")).is_meta


@pytest.mark.parametrize(
    "arguments",
    [
        {"block_fn": vision_transformer.ResPostBlock},
        {"block_fn": vision_transformer.ParallelScalingBlock},
        {"block_fn": vision_transformer.DiffParallelScalingBlock, "num_heads": 2},
        {"block_fn": vision_transformer.ParallelThingsBlock},
        {"attn_layer": "diff", "num_heads": 2},
        {"qk_norm": True, "scale_attn_norm": True, "scale_mlp_norm": True},
        {"init_values": 1e-1, "pre_norm": True, "reg_tokens": 2, "no_embed_class": True},
    ],
)
def test_every_kind_of_block(arguments: dict[str, Any]) -> None:
    model = small_vit(**{"embed_dim": 64, "num_heads": 4, **arguments})
    randomise(model)
    images, labels = torch.randn(2, 3, 96, 96), torch.tensor([1, 2])
    scores = pmvit.measure(model, [(images, labels)], method="scored", progress=False)
    moved = pmvit.compress(model, in_place_plan((6, 6), 3))
    with torch.inference_mode():
        assert torch.allclose(moved(images), model(images), rtol=1e-4, atol=1e-4)
        for attention_bias in (True, False):
            plan = pmvit.plan(scores, keep=0.6, attention_bias=attention_bias)
            assert pmvit.compress(model, plan)(images).isfinite().all()


def test_masks_are_reduced_to_the_centres() -> None:
    model = small_vit()
    moved = pmvit.compress(model, in_place_plan((6, 6), 3))
    images = torch.randn(2, 3, 96, 96)
    mask = torch.rand(37, 37) > 0.3
    mask.fill_diagonal_(True)
    with torch.inference_mode():
        for given in (mask, torch.randn(37, 37)):
            assert torch.allclose(moved(images, attn_mask=given), model(images, attn_mask=given), atol=1e-5)
        plan = pmvit.plan(pmvit.measure(model, [], method="scored", scorer="random"), keep=0.5, attention_bias=True)
        assert pmvit.compress(model, plan)(images, attn_mask=mask).isfinite().all()


def test_the_attention_bias_counts_members() -> None:
    """Merging identical tokens with the bias changes nothing: attention sees each of them."""
    model = small_vit(pos_embed="none")
    image = torch.randn(1, 3, 16, 16).tile(1, 1, 6, 6)  # all patches alike
    groups = torch.arange(36) // 3
    layer = LayerPlan(tuple(groups.tolist()), tuple(range(0, 36, 3)), (1 / 3,) * 36)
    with torch.inference_mode():
        expected = model(image)
        for attention_bias, exact in ((True, True), (False, False)):
            plan = Plan((6, 6), 3, dict.fromkeys(range(3), layer), attention_bias=attention_bias)
            assert torch.allclose(pmvit.compress(model, plan)(image), expected, atol=1e-5) == exact


def test_an_unknown_model_gets_the_list_and_the_lines() -> None:
    with pytest.raises(pmvit.PmvitError) as error:
        pmvit.measure(nn.Linear(2, 2), [], method="scored")
    message = str(error.value)
    assert "torch.nn.modules.linear.Linear" in message
    assert "timm plain ViT" in message
    assert "@register" in message


class Foreign(nn.Module):
    """A transformer of nobody's library."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 32, 8, 8)
        self.layers = nn.ModuleList(AttentionBlock() for _ in range(2))
        self.head = nn.Linear(32, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            tokens = layer(tokens)
        logits: torch.Tensor = self.head(tokens.mean(1))
        return logits


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(tokens)[:, None].chunk(3, -1)
        return tokens + torch.nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]


def test_the_example_of_the_error_message_works() -> None:
    before = list(hosts._hosts)
    example = hosts.EXAMPLE.replace("my_library.MyViT", "Foreign").replace("(14, 14)", "(4, 4)")
    example = example.replace("num_prefix=1", "num_prefix=0").replace("encoder.layers", "layers")
    example = example.replace("model.encoder", "model").replace("(3, 224, 224)", "(3, 32, 32)")
    lines = "\n".join(line[4:] for line in example.splitlines())
    try:
        exec(lines, {"Foreign": Foreign})  # noqa: S102  # the very text that users are shown
        torch.manual_seed(0)
        model = Foreign().eval()
        images, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])
        scores = pmvit.measure(model, [(images, labels)], method="scored", progress=False)
        small = pmvit.compress(model, pmvit.plan(scores, keep=0.5, attention_bias=False))
        assert small(images).shape == (4, 5)
        assert pmvit.flops(small).macs < pmvit.flops(model).macs
        with pytest.raises(pmvit.PmvitError, match="has no `describe`: add that method"):
            pmvit.save(small, "nowhere")
        with pytest.raises(pmvit.PmvitError, match="make the plan with attention_bias=False"):
            pmvit.compress(model, pmvit.plan(scores, keep=0.5, attention_bias=True))
    finally:
        hosts._hosts[:] = before


def test_registering_is_a_decorator() -> None:
    before = list(hosts._hosts)
    try:

        @register
        class Mine(Host):
            key = family = "mine"

        assert Mine.family in hosts.supported_families()
    finally:
        hosts._hosts[:] = before


def test_what_was_changed_for_a_while_is_as_it_was() -> None:
    layer: Any = nn.Linear(2, 2)
    weight, layer.note = layer.weight, "its own"
    other = nn.Parameter(torch.zeros(2, 2))
    changes = [(layer, "forward", torch.relu), (layer, "note", ""), (layer, "weight", other)]
    with changed([*changes, (layer.bias, "requires_grad", False)]):
        assert torch.equal(layer(-torch.ones(2)), torch.zeros(2))
        assert layer.weight is other
        assert not layer.bias.requires_grad
    with pytest.raises(AttributeError, match="nowhere"), changed([*changes, (layer, "nowhere", 1)]):
        pass
    assert "forward" not in vars(layer)  # that of its class is back
    assert layer.weight is weight
    assert layer.note == "its own"
    assert layer.bias.requires_grad
