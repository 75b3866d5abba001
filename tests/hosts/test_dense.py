"""Decoders that read the grid: feature maps of timm, DPT of segmentation_models_pytorch, EoMT of transformers."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pmvit
from pmvit.config.inference import Target
from pmvit.data.opening import open_loader
from pmvit.evaluation.segmentation import evaluate_segmentation
from pmvit.hosts import host_of
from pmvit.hosts.outputs import logits_of, parts_of, predict
from pmvit.loading import create_model
from pmvit.prune_merge import PruneMerge
from pmvit.runtime.bench.variants import in_place_plan, variant
from pmvit.runtime.optimize import optimize_for_inference
from pmvit.runtime.transitions import Stage
from scripts.sweep import difference, try_model
from scripts.sweep_models import candidates
from tests.helpers import small_plan, small_vit
from tests.hosts.dense_models import VIT, dpt, eomt, features, images_for, masks_for
from tests.segmenters import small_segmenter

smp = pytest.importorskip("segmentation_models_pytorch")
transformers = pytest.importorskip("transformers")

KINDS = {  # the others are the same to a host; `python -m scripts.sweep` tries all
    "hf eomt": ("EomtForUniversalSegmentation", "EomtDinov3ForUniversalSegmentation"),
    "timm features": ("vit_relpos_small_patch16_224", "beit_base_patch16_224", "vit_small_patch16_dinov3"),
    "smp dpt": ("vit_base_patch16_siglip_224", "vit_small_patch16_dinov3"),
}
TRIED = [candidate for candidate in candidates() if candidate.name in KINDS.get(candidate.family, ())]
MAKERS = {"features": features, "dpt": dpt, "eomt": eomt}


@pytest.mark.parametrize("candidate", TRIED, ids=lambda candidate: f"{candidate.family} {candidate.name}")
def test_what_the_sweep_checks(candidate: Any) -> None:
    assert try_model(candidate).reason == ""


@pytest.mark.parametrize("norm", [False, True])
def test_intermediates_of_a_compressed_model(norm: bool) -> None:
    """timm reads tokens between the blocks of a compressed model as between those of the original."""
    model: Any = small_vit(img_size=(64, 96), reg_tokens=2)
    images = images_for(model)
    same, small = (pmvit.compress(model, plan) for plan in (in_place_plan((4, 6), 3), small_plan(model)))
    reads: list[Callable[[Any], list[Tensor]]] = [
        lambda m: [part for pair in m.get_intermediate_layers(images, 2, True, True, norm) for part in pair],
        lambda m: m.forward_intermediates(images, [0, 2], norm=norm, intermediates_only=True),
        lambda m: m.forward_intermediates(images, 2, norm=norm, output_fmt="NLC", stop_early=True)[1],
    ]
    shapes = [[(2, 48, 4, 6), (2, 3, 48)] * 2, [(2, 48, 4, 6)] * 2, [(2, 24, 48)] * 2]
    with torch.inference_mode():
        for read, expected_shapes in zip(reads, shapes, strict=True):
            expected = read(model)
            assert [tuple(part.shape) for part in expected] == expected_shapes
            assert all(difference(a, b) < 1e-5 for a, b in zip(read(same), expected, strict=True))
            assert [tuple(part.shape) for part in read(small)] == expected_shapes
            assert all(difference(a, b) > 1e-3 for a, b in zip(read(small), expected, strict=True))


def test_feature_maps() -> None:
    model = features()
    images = images_for(model)
    small = pmvit.compress(model, small_plan(model))
    with torch.inference_mode():
        expected = model(images)
        assert [tuple(part.shape) for part in small(images)] == [(2, 48, 4, 6)] * 2
        assert type(small) is type(model)
        same = pmvit.compress(model, in_place_plan((4, 6), 4))(images)
        assert all(difference(a, b) < 1e-5 for a, b in zip(same, expected, strict=True))
        assert all(difference(a, b) > 1e-2 for a, b in zip(small(images), expected, strict=True))
    assert host_of(model).reading().spans == [
        ["model.blocks.0", "model.blocks.1"],
        ["model.blocks.2", "model.blocks.3"],
    ]
    result = pmvit.evaluate(small, [images], reference=model, progress=False)
    assert result.cosine is not None
    assert 0 < result.cosine < 1
    with pytest.raises(pmvit.PmvitError, match='use loss="embedding"'):
        pmvit.measure(model, [(images, torch.tensor([0, 1]))], method="scored", progress=False)


@pytest.mark.data
def test_feature_maps_of_real_images(data: Path, vit_tiny: nn.Module, real_images: Tensor) -> None:
    """The tokens of the classifier, in place; and Eq. 9 says which of them the maps can spare."""
    weights = data / "weights" / f"{VIT}.safetensors"
    model = create_model(VIT, weights, features_only=True, out_indices=(2, 5, 8, 11))
    images = real_images[:4]
    plans = [
        in_place_plan((14, 14), 12),
        pmvit.plan(pmvit.measure(model, [images], method="scored", loss="embedding", progress=False), keep=0.7),
        small_plan(model, keep=0.7),
    ]
    classifier: Any = vit_tiny
    with torch.inference_mode():
        expected = classifier.forward_intermediates(images, [2, 5, 8, 11], intermediates_only=True)
        assert all(difference(a, b) < 1e-5 for a, b in zip(model(images), expected, strict=True))
        similar = torch.tensor(
            [
                [_cosine(a, b) for a, b in zip(made(images), expected, strict=True)]
                for made in (pmvit.compress(model, plan) for plan in plans)
            ]
        )
    assert [part.shape for part in expected] == [(4, 192, 14, 14)] * 4
    assert similar[0].min() > 1 - 1e-5
    assert (similar[1] > similar[2] + 0.2)[2:].all()
    assert plans[1].layers.keys() == set(range(2, 12))


def _cosine(first: Tensor, second: Tensor) -> float:
    return float(F.cosine_similarity(first.flatten(1), second.flatten(1)).mean())


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("target", ["eager", "graph", "onnx"])
def test_passes_are_exact(kind: str, target: Target) -> None:
    """What the decoder reads between the blocks is all there, whatever travels inside a run.

    EoMT's logarithms of small shares tell how a CPU rounds: where float32 shows a change, float64 must show none.
    """
    model = MAKERS[kind]()
    images = images_for(model)
    small = pmvit.compress(model, small_plan(model, skip=(0,)))
    for made in (model, small):
        ready = optimize_for_inference(made, target=target)
        with torch.inference_mode():
            error = difference(predict(ready, images), predict(made, images))
            if kind == "eomt" and 1e-5 <= error < 1e-4:
                precise = copy.deepcopy(made).double()
                exact = optimize_for_inference(precise, target=target)
                error = difference(predict(exact, images.double()), predict(precise, images.double()))
            assert error < 1e-5
    assert any(isinstance(module, Stage) for module in ready.modules())
    assert not any(isinstance(module, PruneMerge) for module in ready.modules()) or kind == "eomt"


@pytest.mark.parametrize("kind", MAKERS)
def test_saved_models_come_back(kind: str, tmp_path: Path) -> None:
    model = MAKERS[kind]()
    images = images_for(model)
    small = pmvit.compress(model, small_plan(model))
    pmvit.save(small, tmp_path / "saved")
    loaded = pmvit.load(tmp_path / "saved")
    pmvit.save(loaded, tmp_path / "again.safetensors")
    assert type(loaded) is type(model)
    assert host_of(loaded).data_config() == host_of(model).data_config()
    with torch.inference_mode():
        for got in (loaded, pmvit.load(tmp_path / "again.safetensors")):
            assert torch.equal(predict(got, images), predict(small, images))
        assert torch.equal(predict(pmvit.decompress(loaded), images), predict(model, images))


@pytest.mark.parametrize("kind", ["features", "dpt"])
def test_exported_files_give_the_same(kind: str, tmp_path: Path) -> None:
    """`export` compares the numbers; here, that maps stay apart and have their shapes."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model = features(depth=2, out_indices=(0, 1)) if kind == "features" else dpt()
    small = pmvit.compress(model, small_plan(model))
    images = images_for(model, 3)
    assert pmvit.export(small, tmp_path / "small.onnx").max_error < 1e-4
    outputs = onnxruntime.InferenceSession(tmp_path / "small.onnx").run(None, {"images": images.numpy()})
    with torch.inference_mode():
        parts = parts_of(host_of(small).call(images))
    expected = [parts] if isinstance(parts, Tensor) else list(parts)
    assert len(outputs) == (2 if kind == "features" else 1)
    for got, wanted in zip(map(torch.from_numpy, outputs), expected, strict=True):
        assert got.shape == wanted.shape
        assert difference(got, wanted) < 1e-4


@pytest.mark.parametrize("kind", [*MAKERS, "segmenter"])
def test_what_is_benchmarked_reads_the_grid(kind: str) -> None:
    """Also where tokens are sliced away: the decoder gets as many as it expects."""
    model = small_segmenter() if kind == "segmenter" else MAKERS[kind]()
    images = images_for(model)
    if kind == "eomt":  # logarithms of small shares tell how a CPU rounds
        model, images = model.double(), images.double()
    small = pmvit.compress(model, small_plan(model))
    with torch.inference_mode():
        expected = predict(model, images)
        for name in ("original-optimized", "bound", "direct"):
            got = predict(variant(name, small, "eager"), images)
            assert got.shape == expected.shape
            assert (difference(got, expected) < 1e-5) == (name == "original-optimized")


def test_blocks_that_nothing_reads_are_left_out() -> None:
    model = dpt(encoder_depth=2, encoder_output_indices=[1, -2], decoder_intermediate_channels=(8, 8))
    host = host_of(model)
    assert [len(names) for names in host.reading().spans] == [2, 3]
    scores = pmvit.measure(model, [(images_for(model), masks_for(model))], method="scored", progress=False)
    assert len(scores.values) == 5


def test_scores_of_masks() -> None:
    """One logit a pixel is scored by binary cross-entropy: as two, the first of which is always 0."""
    model = dpt(classes=1)
    images, masks = images_for(model), masks_for(model, 2)
    assert host_of(model).outputs().pixel_classes == 2
    both = dpt(classes=2)
    both.load_state_dict({**both.state_dict(), **{k: v for k, v in model.state_dict().items() if ".head.4" not in k}})
    with torch.no_grad():
        for wide, narrow in zip(
            both.segmentation_head.head[-1].parameters(), model.segmentation_head.head[-1].parameters(), strict=True
        ):
            wide[0], wide[1] = 0.0, narrow[0]
    logits = model(images)[:, 0]
    assert torch.equal(logits_of(logits[:, None])[..., 1], logits)
    loss = F.binary_cross_entropy_with_logits(logits, masks.float(), reduction="sum")
    flat = logits_of(logits[:, None]).flatten(0, -2)
    assert torch.allclose(F.cross_entropy(flat, masks.flatten(), reduction="sum"), loss)
    masks[:, :10] = 255
    one, two = (pmvit.measure(m, [(images, masks)], method="scored", progress=False).values for m in (model, both))
    assert one.min() > 0
    assert torch.allclose(one, two, rtol=1e-3)
    with pytest.raises(pmvit.PmvitError, match="expected labels below 2"):
        pmvit.measure(model, [(images, masks_for(model, 3))], method="scored", progress=False)


def test_segmentation_is_evaluated() -> None:
    model = dpt(classes=1)
    images = images_for(model)
    with torch.inference_mode():
        masks = (model(images)[:, 0] > 0).long()
    small = pmvit.compress(model, small_plan(model))
    result = evaluate_segmentation(small, [(images, masks)], reference=model, progress=False)
    assert result.reference_miou == 1
    assert result.miou is not None
    assert result.miou < 1
    assert result.pixel_accuracy == result.agreement
    assert result.gflops < (result.reference_gflops or 0)


def test_other_heads_of_dpt(tmp_path: Path) -> None:
    """A second output is left out; a head without logits is one of features; what cannot be made again is said."""
    aux = dpt(aux_params={"classes": 4, "dropout": 0.0})
    images = images_for(aux)
    small = pmvit.compress(aux, small_plan(aux))
    with torch.inference_mode():
        masks, labels = small(images)
        assert labels.shape == (2, 4)
        assert torch.equal(predict(small, images), masks.movedim(1, -1))
    pmvit.save(small, tmp_path / "aux")
    with torch.inference_mode():
        assert torch.equal(pmvit.load(tmp_path / "aux")(images)[1], labels)
    closed = dpt(activation="softmax2d")
    assert host_of(closed).outputs().pixel_classes is None
    with pytest.raises(pmvit.PmvitError, match='use loss="embedding"'):
        pmvit.measure(closed, [(images, masks_for(closed))], method="scored", progress=False)
    aux.classification_head[-2] = nn.Linear(48, 5)
    with pytest.raises(pmvit.PmvitError, match=r"does not make this model again \(first difference: classif"):
        pmvit.save(aux, tmp_path / "other")


def test_a_folder_of_segmentation_models_pytorch(tmp_path: Path) -> None:
    model = dpt()
    model.save_pretrained(tmp_path / "dpt")
    loaded = create_model(str(tmp_path / "dpt"))
    images = images_for(model)
    with torch.inference_mode():
        assert torch.equal(predict(loaded, images), predict(model, images))
    config = json.loads((tmp_path / "dpt/config.json").read_text())
    for changes, reason in (
        ({"_model_class": "Unet"}, "expected a DPT of segmentation_models_pytorch, got Unet"),
        ({"encoder_name": "tu-hf-hub:somebody/vit"}, "expected tu- and one of timm's architectures"),
        ({"decoder_readout": "sum"}, "segmentation_models_pytorch cannot make DPT"),
    ):
        (tmp_path / "dpt/config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(pmvit.PmvitError, match=reason):
            create_model(str(tmp_path / "dpt"))


def test_dpt_on_another_encoder_is_not_known() -> None:
    with torch.device("meta"):
        model = smp.DPT("tu-swin_tiny_patch4_window7_224", encoder_weights=None, decoder_readout="ignore")
    with pytest.raises(pmvit.PmvitError, match=r"no host knows a segmentation_models_pytorch.*DPT"):
        pmvit.measure(model, [], method="scored")


def test_the_package_is_needed_only_to_make_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dpt()
    pmvit.save(model, tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    with pytest.raises(pmvit.PmvitError, match=r"pip install 'pmvit\[smp\]'"):
        pmvit.load(tmp_path / "saved")


def test_images_with_masks_are_opened(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(2):
        for folder, mode in (("images", "RGB"), ("masks", "L")):
            (tmp_path / folder).mkdir(exist_ok=True)
            Image.new(mode, (120, 90), number).save(tmp_path / folder / f"{number}.png")
    model = dpt()
    images, labels = next(iter(open_loader(model, tmp_path, batch_size=2, workers=0, first_label=0)))
    assert images.shape == (2, 3, 64, 96)
    assert sorted(labels.flatten(1)[:, 0].tolist()) == [0, 1]
