"""Swin of transformers and torchvision: scores against explicit attention, saving, passes, what the library expects."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import pmvit
from pmvit.hosts import host_of
from pmvit.hosts.outputs import predict
from scripts.sweep import randomise, try_model
from scripts.sweep_models import Candidate
from scripts.sweep_swin import makers

pytest.importorskip("transformers")

FOUND = {f"{family}: {name}": make for family, name, make in makers(7) if not family.startswith("swin")}
CLASSIFIERS = [name for name in FOUND if "Classification" in name or name.startswith("torchvision")]


def make(name: str) -> Any:
    torch.manual_seed(0)
    model = FOUND[name]()
    randomise(model)
    return model


def images_for(model: nn.Module) -> Tensor:
    size = host_of(model).input_size()
    return torch.randn(2, *size, generator=torch.Generator().manual_seed(1), dtype=next(model.parameters()).dtype)


def small_of(model: nn.Module, **options: Any) -> Any:
    return pmvit.compress(
        model, pmvit.plan(pmvit.measure(model, [], method="scored", scorer="random"), keep=0.6, **options)
    )


class AttentionMaps(TorchFunctionMode):
    """Keeps what every softmax of attention gives, and its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        if function in (F.softmax, torch.softmax, Tensor.softmax) and result.dim() == 4:
            result.retain_grad()
            self.found.append(result)
        return result


@pytest.mark.parametrize("name", FOUND)
def test_what_the_sweep_checks(name: str) -> None:
    assert try_model(Candidate("swin", name, FOUND[name])).reason == ""


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_are_those_of_explicit_attention(name: str) -> None:
    model = make(name)
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    images, labels = images_for(model), torch.tensor([1, 2])
    with AttentionMaps() as maps:
        F.cross_entropy(predict(model, images), labels, reduction="sum").backward()
    scores = pmvit.measure(model, [(images, labels)], method="scored", progress=False)
    assert len(maps.found) == len(scores.grids) == 4
    for index, attention in enumerate(maps.found):
        assert attention.grad is not None
        signed = (attention * attention.grad).sum(2).mean(1)
        windows, grid = scores.windows[index], scores.grids[index]
        assert windows is not None
        expected = windows.to_grid(signed, grid).abs().mean(0)
        assert torch.allclose(scores.of(index).float(), expected, rtol=1e-3, atol=1e-5 * float(expected.max()))


@pytest.mark.parametrize("name", [name for name in FOUND if "Swin" in name or "padded" in name])
def test_saved_models_come_back_to_the_bit(name: str, tmp_path: Path) -> None:
    small = small_of(make(name))
    pmvit.save(small, tmp_path / "saved")
    loaded = pmvit.load(tmp_path / "saved")
    with torch.inference_mode():
        assert torch.equal(predict(loaded, images_for(small)), predict(small, images_for(small)))
    assert type(loaded) is type(small)


@pytest.mark.parametrize("name", FOUND)
def test_passes_are_exact(name: str) -> None:
    small = small_of(make(name), prune=0.1)
    images = images_for(small)
    with torch.inference_mode():
        expected = predict(small, images)
        for target in ("eager", "graph", "onnx"):
            got = predict(pmvit.optimize_for_inference(small, target=target), images)
            assert float((got - expected).abs().max() / expected.abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("name", "to"), [("hf swin: SwinForImageClassification padded", "m.pt2"), ("torchvision swin: swin_v2", "m.xml")]
)
def test_export(name: str, to: str, tmp_path: Path) -> None:
    assert pmvit.export(small_of(make(name)), tmp_path / to).max_error < 1e-3


@pytest.mark.parametrize(
    "name", [name for name in FOUND if "hf" in name and "Backbone" not in name and "UperNet" not in name]
)
def test_hidden_states_have_all_tokens(name: str) -> None:
    model = make(name)
    small = small_of(model)
    with torch.no_grad():
        expected = model(images_for(model), output_hidden_states=True)
        got = small(images_for(model), output_hidden_states=True)
    for states in ("hidden_states", "reshaped_hidden_states"):
        assert [state.shape for state in got[states]] == [state.shape for state in expected[states]]
    assert not torch.allclose(got["hidden_states"][-1], expected["hidden_states"][-1], atol=1e-3)
    assert isinstance(small, type(model))
