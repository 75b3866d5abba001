"""Eight bits: they work for any plan and any batch, say what they change, and keep more where they change too much."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import Tensor, nn

import pmvit
from pmvit.data.batches import first_images
from pmvit.data.demo import demo_images, demo_loader, demo_model
from pmvit.runtime.export import run as export_room
from pmvit.runtime.export.int8 import WAYS, Product, most_sensitive, relative_error
from pmvit.runtime.export.run import Exported
from pmvit.runtime.export.targets import RUNTIMES, reason, runtime_called
from tests.helpers import pmvit_here, small_plan

FILES = {"onnx": "m.onnx", "openvino": "m.xml"}
MADE = (("onnx", "measured"), ("onnx", "adaptive"), ("openvino", "adaptive"))  # runtimes, and kinds of plan
Makers = dict[str, nn.Module]


@pytest.fixture(scope="module")
def images() -> Tensor:
    return demo_loader("test", 64, 64)[0][0]


@pytest.fixture(scope="module")
def models(images: Tensor) -> Makers:
    """The demo's ViT, compressed by plans of all kinds."""
    for name in FILES:
        RUNTIMES[name].check()
    model = demo_model()
    some = demo_loader("train", 32, 32)
    costs = pmvit.measure(model, some, progress=False)
    metric = pmvit.measure(model, some, method="adaptive", rank=16, progress=False)
    return {
        "measured": pmvit.compress(model, pmvit.plan(costs, keep=0.6)),
        "adaptive": pmvit.compress(model, pmvit.plan(metric, keep=0.6)),
    }


@pytest.fixture(scope="module")
def exported(
    models: Makers, images: Tensor, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Exported]:
    """Files in eight bits for each runtime and kind of plan."""
    folder = tmp_path_factory.mktemp("int8")
    return {
        (to, kind): pmvit.export(models[kind], folder / f"{to}-{kind}" / FILES[to], images=images, int8=True)
        for to, kind in MADE
    }


@pytest.mark.parametrize(("to", "kind"), MADE)
def test_int8_works_for_any_plan_and_any_batch(
    to: str, kind: str, models: Makers, images: Tensor, exported: dict[tuple[str, str], Exported]
) -> None:
    small, result = models[kind], exported[to, kind]
    assert result.agreement >= export_room.ENOUGH
    assert result.warning is None
    assert 1e-4 < result.max_error < 0.3
    assert result.images == 32
    assert [trial.kept for trial in result.tried] == [False] * (len(result.tried) - 1) + [True]
    weights = sum(parameter.numel() for parameter in small.parameters())
    assert result.megabytes < 2.5 * weights / 1e6  # more than four in float
    run = runtime_called(to).open(result.path, threads=1)
    for count in (1, 3, 16):
        assert run(images[:count]).shape == (count, 10)
    beside = {path.name for path in result.path.parent.iterdir()}
    assert beside == ({"m.xml", "m.bin"} if to == "openvino" else {"m.onnx"})


def test_what_compares_and_merges_tokens_stays_in_float(exported: dict[tuple[str, str], Exported]) -> None:
    import onnx
    import openvino

    graph = onnx.load(exported["onnx", "adaptive"].path).graph
    projection = (128, 16)  # of tokens to the numbers that they are compared by
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    comparing = [node for node in products if shapes.get(node.input[1]) == projection]
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    quantized = [node for node in products if made_by.get(node.input[1]) == "DequantizeLinear"]
    assert comparing
    assert len(quantized) > 20
    found = {"comparing": 0, "merging": 0, "quantized": 0}
    for node in openvino.Core().read_model(exported["openvino", "adaptive"].path).get_ordered_ops():
        if node.get_type_name() == "MatMul":
            sources = [node.input_value(index).get_node() for index in (0, 1)]
            kinds = [source.get_type_name() for source in sources]
            found["quantized"] += kinds[0] == "FakeQuantize"
            if tuple(node.input_value(1).get_partial_shape().to_shape() if kinds[1] == "Constant" else ()) in (
                projection,
                projection[::-1],
            ):
                found["comparing"] += 1
            if kinds[0] == "Convert" and sources[0].input_value(0).get_node().get_type_name() == "Equal":
                found["merging"] += 1
                assert "FakeQuantize" not in kinds
    assert found["comparing"] == len(comparing)
    assert found["merging"]
    assert found["quantized"] > 20


def test_more_stays_in_float_until_enough_is_the_same(
    models: Makers, images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_room, "ENOUGH", 1.1)  # never
    with pytest.warns(UserWarning, match=r"eight bits change the top-1 of .* of 16 images in onnx; kept .* half: "):
        result = pmvit.export(models["measured"], tmp_path / "m.onnx", images=images[:32], int8=True)
    assert [trial.way for trial in result.tried] == [way.title for way in WAYS]
    sizes = [trial.megabytes for trial in result.tried]
    assert sizes == sorted(sizes)  # what stays in float takes its place
    assert sizes[-1] > 1.3 * sizes[0]
    (kept,) = [trial for trial in result.tried if trial.kept]
    assert kept.agreement == result.agreement == max(trial.agreement for trial in result.tried)
    assert kept.megabytes == result.megabytes == pytest.approx(result.path.stat().st_size / 1e6)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_the_most_sensitive_products_are_those_that_eight_bits_change_most() -> None:
    generator = np.random.default_rng(0)
    even = generator.normal(size=(64, 8)).astype(np.float32)
    outlier = even.copy()
    outlier[0, 0] = 300.0  # one number that takes the whole range
    weights = generator.normal(size=(8, 4)).astype(np.float32)
    wide = weights * np.array([1, 1, 1, 1000], dtype=np.float32)  # no matter: each channel has its own range
    products = {name: Product(*parts) for name, parts in {
        "even": (even, weights), "outlier": (outlier, weights), "wide": (even, wide), "fine": (np.round(even), weights)
    }.items()}  # fmt: skip
    assert most_sensitive(products, 1 / 4) == ["outlier"]
    assert most_sensitive(products, 0.0) == []
    assert relative_error(products["even"]) < 1e-2 < 0.1 < relative_error(products["outlier"])
    widest = relative_error(Product(even, weights[:, 3:]))  # beside which the others hardly count
    assert relative_error(products["wide"]) == pytest.approx(widest, rel=2e-2)


def test_the_last_lines_of_an_error_are_shown() -> None:
    assert reason(RuntimeError("one line")) == "RuntimeError: one line"
    assert reason(RuntimeError("first\n\n  second  line\n")) == "RuntimeError: first second line"
    assert reason(RuntimeError("")) == "RuntimeError: "
    said = reason(RuntimeError("Exception from core.cpp:1:\n" + "noise\n" * 200 + "the cause"))
    assert said.startswith("RuntimeError: Exception from core.cpp:1: ... ")
    assert said.endswith(" noise the cause")
    assert len(reason(RuntimeError("x" * 1000))) < 350


def test_the_command_line_says_what_was_tried(models: Makers, tmp_path: Path) -> None:
    pmvit.save(models["measured"], tmp_path / "out")
    (tmp_path / "images").mkdir()
    for number, image in enumerate(demo_images("test", 48)[0].numpy()):
        Image.fromarray(image).save(tmp_path / "images" / f"{number}.png")
    words = ("export", "out", "-o", "model.onnx", "--int8", "--data", "images")
    result = pmvit_here(*words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "eight bits, all products with weights: same top-1 on" in result.stdout
    assert "(kept)" in result.stdout


@pytest.mark.data
def test_int8_of_a_real_model(vit_tiny: nn.Module, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pmvit.data.opening import open_loader

    monkeypatch.setattr(export_room, "WAYS", WAYS[:2])  # each takes seconds
    loader = open_loader(vit_tiny, data / "imagenet/val", labels=False, batch_size=32, workers=0, shuffle=True)
    shown = first_images(loader, 32)
    small = pmvit.compress(vit_tiny, small_plan(vit_tiny, keep=0.9))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = pmvit.export(small, tmp_path / "m.xml", images=shown, int8=True)
    assert result.images == 16
    assert result.agreement >= max(0.8, result.tried[0].agreement)
    assert any("eight bits change" in str(one.message) for one in said) == (result.agreement < export_room.ENOUGH)
