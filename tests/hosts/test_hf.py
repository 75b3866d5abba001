"""Models of Hugging Face transformers: every family, scores, hidden states, saving, loading, training, heads."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import pmvit
from pmvit.config.measuring import Loss
from pmvit.evaluation.classification import Evaluation
from pmvit.hosts import TokenLayout, host_of
from pmvit.hosts.outputs import as_tensor, predict
from pmvit.loading import create_model, num_classes_of, open_loader
from pmvit.runtime.bench.variants import variant
from scripts.sweep import randomise, try_model
from scripts.sweep_models import hf_models, reduced_hf
from tests.helpers import small_plan
from tests.hosts.layouts import check_same_as_timm, explicit_scores, hugging_face_vit

transformers = pytest.importorskip("transformers")

LABELS = {"num_labels": 7}
BIAS = {"use_relative_position_bias": True, "layer_scale_init_value": 0.1}
YOLOS = {"image_size": [96, 80], "num_detection_tokens": 5, "use_mid_position_embeddings": True}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", LABELS),
    "deit": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", LABELS),
    "beit": ("BeitForImageClassification", "BeitConfig", {**BIAS, **LABELS}),
    "data2vec": ("Data2VecVisionForImageClassification", "Data2VecVisionConfig", {**BIAS, **LABELS}),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", LABELS),
    "registers": ("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", LABELS),
    "dinov3": ("DINOv3ViTModel", "DINOv3ViTConfig", {"num_register_tokens": 2}),
    "clip": ("CLIPVisionModelWithProjection", "CLIPVisionConfig", {}),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", {}),
    "mae": ("ViTMAEModel", "ViTMAEConfig", {"mask_ratio": 0.0}),
    "yolos": ("YolosForObjectDetection", "YolosConfig", {**YOLOS, **LABELS}),
}
OTHERS = ("CLIPModel", "SiglipModel", "Dinov2Backbone", "BeitForSemanticSegmentation", "DPTForSemanticSegmentation")


def make(family: str, **more: Any) -> Any:
    torch.manual_seed(0)
    model, config, changes = FAMILIES[family]
    made: Any = reduced_hf(model, config, {**changes, **more})
    randomise(made)
    return made


def vit(**more: Any) -> Any:
    return make("vit", **more)


def images_for(model: nn.Module, count: int = 3) -> Tensor:
    size = host_of(model).input_size()
    return torch.randn(count, *size, generator=torch.Generator().manual_seed(1), dtype=next(model.parameters()).dtype)


TRIED = [c for c in hf_models() if c.name.split()[0] in {*(row[0] for row in FAMILIES.values()), *OTHERS}]


@pytest.mark.parametrize("candidate", TRIED, ids=lambda candidate: candidate.name)
def test_what_the_sweep_checks(candidate: Any) -> None:
    assert try_model(candidate).reason == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_explicit_attention(family: str) -> None:
    """Eq. 9 by hand, on the maps that the library itself returns with `eager` attention; some are float32 in it."""
    model = make(family, attn_implementation="eager").double()
    images = images_for(model)
    host = host_of(model)
    layout = host.layout
    has_labels = host.outputs().num_classes is not None
    loss: Loss = "labels" if has_labels else "predicted" if host.outputs().gives_logits else "embedding"
    labels = torch.tensor([0, 3, 5])
    scores = pmvit.measure(model, [(images, labels)], method="scored", loss=loss, progress=False)
    assert model.config._attn_implementation == "eager"
    more = {"noise": torch.arange(36.0).expand(3, -1)} if family == "mae" else {}
    output = model(images, output_attentions=True, **more)
    tensor = as_tensor(output)
    if loss == "embedding":
        value = 0.5 * (tensor - tensor.detach().mean(0)).square().sum()
    else:
        flat = tensor.flatten(0, -2)
        value = F.cross_entropy(flat, labels if has_labels else flat.argmax(-1), reduction="sum")
    before = 1 if family == "yolos" else layout.num_prefix  # the others of YOLOS stand at the end
    expected = explicit_scores(value, list(output.attentions), before, layout.num_patches)
    assert (scores.values - expected).abs().max() < 1e-5 * expected.max()


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_have_all_tokens(family: str) -> None:
    model = make(family)
    images = images_for(model)
    layout = host_of(model).layout
    same, small = (pmvit.compress(model, plan) for plan in (_in_place(model), small_plan(model)))
    with torch.no_grad():
        expected = model(images, output_hidden_states=True, **_noise(family)).hidden_states
        for compressed in (same, small):
            states = compressed(images, output_hidden_states=True, **_noise(family)).hidden_states
            assert [state.shape for state in states] == [state.shape for state in expected]
            assert states[0].shape[1] == layout.num_tokens
            assert torch.allclose(states[0], expected[0], atol=1e-6)
            close = [torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(states, expected, strict=True)]
            assert all(close) == (compressed is same)
        assert predict(small, images).shape == predict(model, images).shape


def _noise(family: str) -> dict[str, Tensor]:
    return {"noise": torch.arange(36.0).expand(3, -1)} if family == "mae" else {}


def _in_place(model: nn.Module) -> pmvit.Plan:
    from pmvit.runtime.bench.variants import in_place_plan

    host = host_of(model)
    return in_place_plan(host.layout.grid, len(host.block_names()))


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_models_come_back(family: str, tmp_path: Path) -> None:
    model = make(family)
    small = pmvit.compress(model, small_plan(model))
    pmvit.save(small, tmp_path / "saved")
    loaded = pmvit.load(tmp_path / "saved")
    images = images_for(model)
    assert type(loaded) is type(model)
    with torch.no_grad():
        assert torch.equal(predict(loaded, images), predict(small, images))
        assert torch.equal(predict(pmvit.decompress(loaded), images), predict(model, images))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_either_attention_gives_the_same(implementation: str) -> None:
    model = vit()
    small = pmvit.compress(model, small_plan(model, attention_bias=True))
    images = images_for(model)
    with torch.no_grad():
        expected = small(images).logits
        small.set_attn_implementation(implementation)
        assert torch.allclose(small(images).logits, expected, atol=1e-5)


def test_flash_attention_is_told_that_it_takes_no_bias() -> None:
    """Nothing else depends on the implementation: scores go through sdpa, and masks of padding are reduced."""
    model = vit()
    plan = small_plan(model, attention_bias=True)
    small = pmvit.compress(model, plan)
    small.config._attn_implementation = "flash_attention_2"
    wrapper = small.vit.layers[0]
    with pytest.raises(pmvit.PmvitError, match="takes no bias: make the plan with attention_bias=False"):
        wrapper.block_arguments((None,), {})
    plain = pmvit.compress(model, small_plan(model, attention_bias=False))
    padding = torch.rand(2, 37) > 0.5
    reduced = plain.vit.layers[0].block_arguments((padding,), {})
    assert torch.equal(reduced["attention_mask"], padding[:, plain.vit.layers[0].centres])
    model.config._attn_implementation = "flash_attention_2"
    with host_of(model).observed():
        assert model.vit.layers[0].attention.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "flash_attention_2"


def test_masks_are_reduced_to_the_centres() -> None:
    model = vit()
    moved = pmvit.compress(model, _in_place(model))
    images = images_for(model)
    mask = torch.rand(3, 37) > 0.3
    mask[:, 0] = True
    with torch.no_grad():
        assert torch.allclose(
            moved(images, attention_mask=mask).logits, model(images, attention_mask=mask).logits, atol=1e-4
        )
        assert not torch.allclose(model(images, attention_mask=mask).logits, model(images).logits, atol=1e-2)


def test_a_model_that_was_evaluated_can_be_trained() -> None:
    """transformers keeps tables of position indices, which inference mode would spoil for training."""
    model = make("beit", image_size=80)
    images = images_for(model)
    pmvit.evaluate(model, [images], reference=model, progress=False)
    model(images).logits.sum().backward()
    assert model.beit.layers[0].relative_position_bias.relative_position_bias_table.grad.any()


def test_detection_tokens_are_never_merged() -> None:
    model = make("yolos")
    assert host_of(model).layout == TokenLayout((6, 5), 1 + 5, num_suffix=5)
    assert pmvit.compress(model, small_plan(model)).vit.encoder.layer[0].token_mask[:6].all()


def test_mae_has_to_see_all_patches() -> None:
    with pytest.raises(pmvit.PmvitError, match=r"set config\.mask_ratio = 0"):
        pmvit.measure(make("mae", mask_ratio=0.5), [torch.randn(2, 3, 96, 96)], method="scored", loss="embedding")
    model = make("mae")
    small = pmvit.compress(model, small_plan(model))
    images = images_for(model)
    with torch.no_grad():  # a compressed one keeps the order of the patches, whoever calls it
        assert torch.equal(small(images).last_hidden_state, small(images).last_hidden_state)
    pmvit.decompress(small)
    assert small.embeddings.random_masking.__name__ == "random_masking"


def test_models_without_classes_say_so() -> None:
    model = make("clip")
    images = images_for(model)
    with pytest.raises(pmvit.PmvitError, match='use loss="embedding"'):
        pmvit.measure(model, [(images, torch.tensor([0, 1, 2]))], method="scored", progress=False)
    with pytest.raises(pmvit.PmvitError, match="pass the uncompressed original as reference="):
        pmvit.evaluate(model, [images], progress=False)
    detector = make("yolos")
    with pytest.raises(pmvit.PmvitError, match="expected labels of shape"):
        pmvit.measure(detector, [(images_for(detector), torch.tensor([0, 1, 2]))], method="scored", progress=False)
    result = pmvit.evaluate(pmvit.compress(model, small_plan(model)), [images], reference=model, progress=False)
    assert result.top1 is None
    assert result.cosine is not None
    assert 0 < result.cosine < 1
    assert pmvit.evaluate(model, [images], reference=model, progress=False).cosine == pytest.approx(1, abs=1e-6)


def test_segmentation_agrees_pixel_by_pixel() -> None:
    changes = {**LABELS, **BIAS, "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}
    model: Any = reduced_hf("BeitForSemanticSegmentation", "BeitConfig", changes)
    assert len(host_of(model).block_names()) == 3  # it reads nothing of the fourth
    images = images_for(model)
    with torch.no_grad():
        logits = model(images).logits
        assert torch.equal(predict(model, images), logits.permute(0, 2, 3, 1))
    result = pmvit.evaluate(model, [images], reference=model, progress=False)
    assert result.agreement == 1
    scores = pmvit.measure(model, [images], method="scored", loss="predicted", progress=False)
    assert scores.values.shape == (3, 36)


def test_a_folder_of_transformers(tmp_path: Path, pictures: Path) -> None:
    """Load by folder, prepare images as its processor says, compress, save, load."""
    model = vit()
    model.save_pretrained(tmp_path / "hub")
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"shortest_edge": 120},
        "crop_size": {"height": 96, "width": 96},
        "do_center_crop": True,
        "resample": 2,
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6],
    }
    (tmp_path / "hub/preprocessor_config.json").write_text(json.dumps(processor))
    for name in (str(tmp_path / "hub"), f"hf:{tmp_path / 'hub'}"):
        loaded = create_model(name)
        assert type(loaded) is type(model)
        assert num_classes_of(loaded) == 7
        assert host_of(loaded).data_config() == {
            "input_size": [3, 96, 96],
            "interpolation": "bilinear",
            "mean": [0.1, 0.2, 0.3],
            "std": [0.4, 0.5, 0.6],
            "crop_pct": 0.8,
            "crop_mode": "center",
        }
    batches = list(open_loader(loaded, pictures, batch_size=16, workers=0))
    scores = pmvit.measure(loaded, batches, method="scored", progress=False)
    small = pmvit.compress(loaded, pmvit.plan(scores, keep=0.6))
    pmvit.save(small, tmp_path / "small")
    again = pmvit.load(tmp_path / "small")
    assert host_of(again).data_config() == host_of(loaded).data_config()
    assert pmvit.evaluate(again, batches, reference=loaded, progress=False).agreement is not None


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    model = vit()
    model.save_pretrained(tmp_path / "whole")
    (tmp_path / "whole/model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "whole/pytorch_model.bin")  # never unpickled
    with pytest.raises(pmvit.PmvitError, match="weights in safetensors"):
        create_model(str(tmp_path / "whole"))
    with pytest.raises(pmvit.PmvitError, match="got trust_remote_code"):
        create_model(f"hf:{tmp_path / 'whole'}", trust_remote_code=True)
    with pytest.raises(pmvit.PmvitError, match="leave them out"):
        create_model(f"hf:{tmp_path / 'whole'}", weights="other.safetensors")
    config = json.loads((tmp_path / "whole/config.json").read_text())
    (tmp_path / "whole/config.json").write_text(json.dumps({**config, "architectures": ["os.system"]}))
    with pytest.raises(pmvit.PmvitError, match=r"expected one of transformers' models, got 'os\.system'"):
        create_model(str(tmp_path / "whole"))


def test_dinov2_takes_the_size_of_its_processor(tmp_path: Path) -> None:
    """Its configuration names the size of its position embedding, which fits any image."""
    make("dinov2").save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"shortest_edge": 80}, "crop_size": 64}))
    model = create_model(str(tmp_path))
    assert host_of(model).layout == TokenLayout((4, 4), 1)
    small = pmvit.compress(model, small_plan(model))
    assert predict(small, images_for(model)).shape == (3, 7)
    pmvit.save(small, tmp_path / "saved")
    assert host_of(pmvit.load(tmp_path / "saved")).layout.grid == (4, 4)


def test_the_trainer_of_transformers_takes_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    small = pmvit.compress(vit(), small_plan(vit()))
    before = copy.deepcopy(small.state_dict())
    data = [{"pixel_values": torch.randn(3, 96, 96), "labels": index} for index in range(4)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
    )
    transformers.Trainer(model=small, args=arguments, train_dataset=data).train()
    assert isinstance(small, transformers.PreTrainedModel)
    changed = {name for name, value in small.state_dict().items() if not torch.equal(value, before[name])}
    assert any("merge_weights" in name for name in changed)
    assert any(".block.attention" in name for name in changed)
    small.save_pretrained(tmp_path / "theirs", save_original_format=False)
    small.load_state_dict(load_file(tmp_path / "theirs/model.safetensors"))  # with the names of the compressed model


def test_embeddings_are_tuned_towards_the_original(tmp_path: Path, pictures: Path) -> None:
    model = make("clip")
    small = pmvit.compress(model, small_plan(model))
    options: dict[str, Any] = {
        "epochs": 1,
        "batch_size": 16,
        "workers": 0,
        "progress": False,
        "output": tmp_path / "run",
    }
    with pytest.raises(pmvit.PmvitError, match="tune it with labels=False"):
        pmvit.finetune(small, teacher=model, train=pictures, val=pictures, **options)
    options["output"] = tmp_path / "other"
    tuned = pmvit.finetune(small, teacher=model, train=pictures, val=pictures, labels=False, lr=1e-3, **options)
    assert isinstance(tuned.best, Evaluation)
    assert tuned.best.cosine is not None


@pytest.mark.parametrize("family", ["vit", "dinov2"])
def test_optimised_exported_and_benchmarked(family: str, tmp_path: Path) -> None:
    model = make(family)
    small = pmvit.compress(model, small_plan(model))
    images = images_for(model)
    with torch.no_grad():
        assert torch.allclose(predict(pmvit.optimize_for_inference(small), images), predict(small, images), atol=1e-4)
    assert pmvit.flops(small).macs < pmvit.flops(model).macs
    assert pmvit.export(small, tmp_path / "model.pt2").max_error < 1e-5
    if family == "vit":
        pytest.importorskip("onnxruntime")
        assert pmvit.export(small, tmp_path / "model.onnx").max_error < 1e-5
    rows = pmvit.benchmark(small, batches=[2], rounds=2, runtimes=["eager"], progress=False).rows
    assert all(row.failure is None for row in rows if row.variant != "tome")


def test_nobody_needs_transformers() -> None:
    """`import pmvit` does not import it, and a missing one is one line."""
    code = (
        "import sys, pmvit, pmvit.loading, pmvit.hosts\n"
        "assert not {'transformers', 'segmentation_models_pytorch'} & set(sys.modules)\n"
        "sys.modules['transformers'] = None\n"
        "try: pmvit.loading.create_model('hf:owner/name')\n"
        "except pmvit.PmvitError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'pmvit[hf]'" in result.stdout


@pytest.mark.data
def test_the_real_vit_tiny_is_the_same_in_the_layout_of_transformers(
    vit_tiny: nn.Module, real_images: Tensor, vit_tiny_plan: pmvit.Plan
) -> None:
    check_same_as_timm(hugging_face_vit(vit_tiny), vit_tiny, vit_tiny_plan, real_images)


def test_the_bound_leaves_all_tokens_where_a_pyramid_reads_them() -> None:
    torch.manual_seed(0)
    model: Any = reduced_hf("Dinov2Backbone", "Dinov2Config", {"out_features": ["stage1", "stage2"]})
    small = pmvit.compress(model, small_plan(model))
    images = images_for(model)
    with torch.no_grad():
        expected, got = model(images).feature_maps, variant("bound", small, "eager")(images).feature_maps
    assert [part.shape for part in got] == [part.shape for part in expected]
