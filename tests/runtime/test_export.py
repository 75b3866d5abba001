"""Exports: every runtime gives what PyTorch gives, at any batch size, or says why it cannot."""

import copy
import json
import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmvit
from pmvit import _system
from pmvit.data.demo import demo_loader, demo_model
from pmvit.runtime.export import run as export_module
from pmvit.runtime.export.targets import RUNTIMES, Runtime, runtime_called
from tests.helpers import pmvit_here, small_plan, small_vit

FILES = {"onnx": "m.onnx", "openvino": "m.xml", "torch-export": "m.pt2", "torchscript": "m.pt"}


@pytest.fixture(scope="module")
def fashion() -> tuple[nn.Module, nn.Module, Tensor]:
    """The demo's ViT, compressed, and real images for it."""
    model = demo_model()
    small = pmvit.compress(model, small_plan(model, keep=0.6))
    return model, small, demo_loader("test", 64, 64)[0][0]


@pytest.mark.parametrize("to", FILES)
def test_every_runtime_gives_the_same_logits(to: str, fashion: Any, tmp_path: Path) -> None:
    _, small, images = fashion
    result = pmvit.export(small, tmp_path / FILES[to], images=images)
    assert result.runtime == to
    assert result.max_error < 1e-4
    assert result.agreement == 1.0
    run = runtime_called(to).open(result.path, threads=1)
    with torch.inference_mode():
        for count in (1, 5, 64):
            assert torch.allclose(run(images[:count]), small(images[:count]), rtol=0, atol=1e-3)
    beside = {path.name for path in tmp_path.iterdir()}
    assert beside == ({"m.xml", "m.bin"} if to == "openvino" else {FILES[to]})


def test_as_many_images_are_compared_as_are_asked_for(fashion: Any, tmp_path: Path) -> None:
    _, small, images = fashion
    for limit, count in ((None, 8), (3, 3), (40, 40)):
        result = pmvit.export(small, tmp_path / "m.pt2", images=images, limit=limit)
        assert result.images == count
    with pytest.raises(pmvit.PmvitError, match="limit: expected 1 or more, got 0"):
        pmvit.export(small, tmp_path / "m.pt2", images=images, limit=0)


def test_onnx_has_standard_operators_only_and_fixed_batches_are_fixed(fashion: Any, tmp_path: Path) -> None:
    import onnx

    _, small, images = fashion
    path = pmvit.export(small, tmp_path / "m.onnx", images=images).path
    model = onnx.load(path)
    assert {entry.domain for entry in model.opset_import} <= {"", "ai.onnx"}
    assert not model.functions
    assert {node.op_type for node in model.graph.node}.isdisjoint({"Loop", "If", "Scan", "NonZero"})
    fixed = pmvit.export(small, tmp_path / "fixed.onnx", batch=3, images=images).path
    assert [d.dim_value for d in onnx.load(fixed).graph.input[0].type.tensor_type.shape.dim] == [3, 1, 28, 28]


@pytest.mark.parametrize("kind", ["uncompressed", "dense", "tuned", "avg"])
def test_other_models_export_too(kind: str, tmp_path: Path) -> None:
    model = small_vit(global_pool="avg" if kind == "avg" else "token")
    if kind != "uncompressed":
        model = pmvit.compress(model, small_plan(model), learn="dense" if kind == "dense" else "group")
    if kind == "tuned":
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("merge_weights", "reconstruct_weights")):
                    parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    assert pmvit.export(model, tmp_path / ("m.onnx" if kind in ("uncompressed", "dense") else "m.xml")).max_error < 1e-4


def test_compile_has_no_graph_break() -> None:
    small = pmvit.compress(small_vit(), small_plan(small_vit()))
    images = torch.randn(2, 3, 96, 96)
    wanted: tuple[dict[str, Any], ...] = ({"pack": False}, {"pack": True}, {"target": "graph"})
    with torch.inference_mode():
        for model in (small, *(pmvit.optimize_for_inference(small, **options) for options in wanted)):
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            assert torch.allclose(compiled(images), small(images), rtol=0, atol=1e-4)


def test_a_missing_package_is_named(fashion: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(pmvit.PmvitError, match=r"onnxscript .* pip install 'pmvit\[onnx\]'"):
        pmvit.export(fashion[1], tmp_path / "m.onnx")


class _Broken(Runtime):
    name, suffix = "broken", ".brk"

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def write(self, model: nn.Module, path: Path, images: Tensor, any_batch: bool) -> None:
        path.write_bytes(b"half a file")
        if self.fails:
            raise RuntimeError("Check failed at core.cpp:42:\n\n  a long story\n\nno rule for aten::magic\n")

    def open(self, path: Path, threads: int) -> Any:
        return lambda images: torch.zeros(len(images), 10)


@pytest.mark.parametrize(("fails", "message"), [(True, "aten::magic$"), (False, "other logits than PyTorch")])
def test_nothing_is_left_of_a_failure(
    fails: bool, message: str, fashion: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RUNTIMES, "broken", _Broken(fails))
    with pytest.raises(pmvit.PmvitError, match=message):
        pmvit.export(fashion[1], tmp_path / "m.brk")
    assert not list(tmp_path.iterdir())


def test_a_wrong_pass_is_noticed(fashion: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def wrong(model: nn.Module, **options: Any) -> Any:
        ready: Any = pmvit.optimize_for_inference(model, **options)
        ready.head.weight.mul_(-1)
        return ready

    monkeypatch.setattr(export_module, "optimize_for_inference", wrong)
    with pytest.raises(pmvit.PmvitError, match="other logits than PyTorch"):
        pmvit.export(fashion[1], tmp_path / "m.pt")
    assert not list(tmp_path.iterdir())


def test_one_image_is_enough_and_stays_at_home(fashion: Any, tmp_path: Path) -> None:
    _, small, images = fashion
    path = pmvit.export(small, tmp_path / "m.pt2", images=images[:1]).path
    with zipfile.ZipFile(path) as archive:
        content = b"".join(archive.read(name) for name in archive.namelist())
    assert images[0].numpy().tobytes()[1000:1400] not in content
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(pmvit.PmvitError, match="got the folder"):
        pmvit.export(small, tmp_path / "folder.pt")


def test_half_precision_models_are_exported_in_single(fashion: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(fashion[1]).half()
    run = runtime_called("torchscript").open(pmvit.export(model, tmp_path / "m.pt").path, 1)
    with torch.inference_mode():
        assert torch.allclose(run(fashion[2][:4]), model.float()(fashion[2][:4]), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("to", "name"), [("aot-inductor", "m.pt2"), ("executorch", "m.pte"), ("litert", "m.tflite")])
def test_runtimes_that_may_be_missing(to: str, name: str, tmp_path: Path) -> None:
    if to == "aot-inductor" and shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    try:
        RUNTIMES[to].check()
    except pmvit.PmvitError as error:
        pytest.skip(str(error))
    small = pmvit.compress(small_vit(), small_plan(small_vit()))
    assert pmvit.export(small, tmp_path / name, to=to).max_error < 1e-4


def test_wrong_input_is_said(fashion: Any, tmp_path: Path) -> None:
    _, small, images = fashion
    for wrong, message in (
        ({"path": "m.docx"}, "endings"),
        ({"path": "m.pt", "to": "onnx"}, r"ends in \.onnx"),
        ({"path": "m.onnx", "to": "abacus"}, "expected one of onnx"),
        ({"path": "m.onnx", "int8": True}, "calibrated"),
        ({"path": "m.pt", "int8": True, "images": images}, "onnx or openvino"),
        ({"path": "m.onnx", "images": torch.zeros(2, 3, 9, 9)}, "shape"),
        ({"path": "m.onnx", "images": []}, "the loader is empty"),
    ):
        options: dict[str, Any] = dict(wrong)
        with pytest.raises(pmvit.PmvitError, match=message):
            pmvit.export(small, tmp_path / options.pop("path"), **options)
    assert not list(tmp_path.iterdir())


def test_broken_amx_is_avoided_where_it_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_system.VARIABLE, raising=False)
    monkeypatch.setattr(_system, "_announces_amx", lambda: True)
    for probe, expected in (("import os; os.kill(os.getpid(), 4)", True), ("pass", False)):
        monkeypatch.setattr(_system, "PROBE", probe)
        _system.avoid_broken_amx.cache_clear()
        assert _system.avoid_broken_amx() is expected
        assert (os.environ.pop(_system.VARIABLE, None) == _system.WITHOUT_AMX) is expected
    _system.avoid_broken_amx.cache_clear()


def test_the_command_line(fashion: Any, tmp_path: Path) -> None:
    pmvit.save(fashion[1], tmp_path / "out", arguments=None)
    result = pmvit_here("export", tmp_path / "out", "-o", tmp_path / "m.onnx", "--limit", "5", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["agreement"] == 1.0
    assert json.loads(result.stdout)["images"] == 5
    wrong = pmvit_here("export", tmp_path / "out", "-o", tmp_path / "m.foo")
    assert wrong.returncode == 1
    assert "endings" in wrong.stderr
    assert len(wrong.stderr.strip().splitlines()) == 1


def test_built_in_images_are_pictures() -> None:
    images = export_module.built_in_images((3, 64, 48), 5)
    assert images.shape == (5, 3, 64, 48)
    assert images.std() > 0.5
