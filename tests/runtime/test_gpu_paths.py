"""What a GPU would wait for: no pass goes through the host, no shape depends on the image, graphs are whole."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pmvit
from pmvit.adaptive import AdaptiveBlock
from tests.helpers import small_vit
from tests.runtime.split_plans import split_plan
from tests.runtime.test_optimize import images
from tests.swins import compressed as compressed_swin

aten = torch.ops.aten
# On a GPU, these wait until all before them is done: the host has to know what came out, or how much.
WAITING = {
    *(aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.allclose),
    *(aten.nonzero, aten.nonzero_static, aten.masked_select, aten.bincount, aten.histc),
    *(aten._unique, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.repeat_interleave),
}


class OnDevice(TorchDispatchMode):
    """Counts operations, and refuses those that wait for the device or leave it."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch has no types there
        self.device, self.count = device, 0
        self.ranked: list[int] = []  # how many values each topk gives

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.count += 1
        if operation.overloadpacket in WAITING:
            raise AssertionError(f"{operation} waits for the device")
        if operation.overloadpacket in (aten.index, aten.index_put) and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in arguments[1]
        ):
            raise AssertionError(f"{operation} with a mask waits for the device")
        result = operation(*arguments, **(keywords or {}))
        if operation.overloadpacket is aten.topk:
            self.ranked.append(result[0].shape[-1])
        for tensor in tree_leaves((arguments, keywords, result)):
            if isinstance(tensor, Tensor) and tensor.device.type != self.device:
                raise AssertionError(f"{operation} leaves the device")
        return result


def adaptive(name: str = "vit_tiny_patch16_224", **options: Any) -> nn.Module:
    vit = small_vit(name, depth=4)
    metric = pmvit.measure(vit, [images(4)], method="adaptive", rank=8, progress=False)
    return pmvit.compress(vit, pmvit.plan(metric, keep=0.6, **options))


def fixed() -> nn.Module:
    return pmvit.compress(small_vit(depth=5), split_plan())


MODELS: dict[str, Any] = {
    "fixed": fixed,
    "fixed, in windows": lambda: compressed_swin()[1],
    "adaptive": lambda: adaptive(multiple_of=8),
    "adaptive, relative positions": lambda: adaptive("beit_base_patch16_224"),
}


class Careless(nn.Module):
    """Asks the host in one of many ways."""

    WAYS: tuple[Any, ...] = (
        lambda x: x * x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x + torch.zeros(x.shape[-1]),
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: x.cpu(),
    )

    def __init__(self, way: int) -> None:
        super().__init__()
        self.way = way

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = self.WAYS[self.way](given)
        return result


@pytest.mark.parametrize("way", range(len(Careless.WAYS)))
def test_the_check_notices_who_asks_the_host(way: int) -> None:
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError, TypeError)), OnDevice("meta"):
        Careless(way)(torch.zeros(2, 3, device="meta"))


@pytest.mark.parametrize("optimised", [None, "eager", "graph"])
@pytest.mark.parametrize("name", MODELS)
def test_a_pass_stays_on_its_device(name: str, optimised: Any) -> None:
    model = MODELS[name]()
    if optimised is not None:
        model = pmvit.optimize_for_inference(model, target=optimised, pack=False)
    size = (112, 112) if "windows" in name else (96, 96)
    model = model.to("meta")
    with torch.inference_mode():
        for batch in (1, 3, 3):
            with OnDevice("meta") as counted:
                assert model(torch.empty(batch, 3, *size, device="meta")).shape == (batch, 7)
            assert counted.count > 50
            assert bool(counted.ranked) == name.startswith("adaptive")
            assert max(counted.ranked, default=0) <= 37  # of all tokens; TensorRT takes 3,840


def test_tokens_come_in_eights() -> None:
    model = adaptive(multiple_of=8)
    seen = []
    for block in model.modules():
        if isinstance(block, AdaptiveBlock):
            block.block.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    with torch.inference_mode():
        model(images(2))
    assert seen
    assert all(count % 8 == 0 for count in seen)
    assert seen == [block.count for block in model.modules() if isinstance(block, AdaptiveBlock)]


@pytest.mark.parametrize(("name", "optimised"), [("fixed", None), ("adaptive", None), ("adaptive", "graph")])
def test_a_compiled_model_is_one_graph(name: str, optimised: Any) -> None:
    model = MODELS[name]()
    if optimised is not None:
        model = pmvit.optimize_for_inference(model, target=optimised, pack=False)
    torch.compiler.reset()
    with torch.inference_mode():
        compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.allclose(compiled(images(2)), model(images(2)), atol=1e-5)
