"""Write the files of every format that pmvit has, as `tests/fixtures`, so that later versions can be held to them.

    python -m scripts.make_fixtures -o tests/fixtures

The fixtures that are kept were written once, by version 0.1.0, and are not to be written again when the code changes:
`tests/test_fixtures.py` sees that they are still read. A new format gets new files beside them.

Everything is small: narrow blocks on 6 x 6 patches of 4 x 4 pixels. Paths in the files are relative to a folder that
holds `saved_original`, `saved_model` and `pictures` (`write_pictures`). What was left out: `curves.png` of the runs.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image
from torch import Tensor, nn

import pmvit
from pmvit import methods
from pmvit.hosts import adapter_for, supported_families
from pmvit.outputs import predict

import timm  # isort: skip  # after pmvit, which lets torchvision import

Batches = list[tuple[Tensor, Tensor]]
SIDE, CLASSES, OUTPUTS = 24, 3, 16
NARROW: dict[str, Any] = {"patch_size": 4, "embed_dim": 8, "depth": 3, "num_heads": 2}
PAPER: dict[str, Any] = {"grouping": "row", "weights": "normalize", "reconstruct": "pinv", "attention_bias": False}
FINETUNE: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 6,
    "lr": 1e-3,
    "ema": 0.9,
    "token_alpha": 0.5,
    "token_blocks": (1,),
    "freeze_matrices_after": 1,
    "workers": 0,
    "checkpoint_every": 2,
    "keep_checkpoints": 2,
}
COMMAND: dict[str, Any] = {  # what `pmvit finetune` keeps to resume, with relative paths
    "model": "saved_model",
    "weights": None,
    "model_arg": None,
    "data_arg": None,
    "data": "pictures/train",
    "val": "pictures/val",
    "teacher": None,
    "epoch_images": None,
    "segmenter": {},
    "first_label": None,
}
TUNING = ("--epochs", "1", "--batch-size", "6", "--lr", "1e-3", "--workers", "0", "--keep-checkpoints", "1")
RUN = ("run", "saved_original", "--data", "pictures", "-o", "run", "--keep", "0.6", *TUNING)


def write_pictures(folder: Path) -> Path:
    """The images of the runs: 24 to train on and 6 to validate on, of three classes, the same on every machine."""
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 24), ("val", 6)):
        for number in range(count):
            label = number % CLASSES
            pixels = torch.randint(0, 128, (SIDE, SIDE, 3), generator=generator, dtype=torch.uint8)
            pixels[..., label] += 100
            place = folder / part / f"class{label}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.numpy()).save(place / f"{number:02d}.png")
    return folder


def batches() -> Batches:
    """What is scored and priced: three batches of noise with labels."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, SIDE, SIDE, generator=generator), torch.randint(CLASSES, (4,), generator=generator))
        for _ in range(3)
    ]


def image_for(model: nn.Module) -> Tensor:
    """The image whose output is kept."""
    return torch.randn(1, *adapter_for(model).input_size(model), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def outputs_of(model: nn.Module) -> list[float]:
    """Some numbers of what a model, in float32, makes of its image."""
    output = predict(model.float().eval(), image_for(model)).flatten()
    return [float(value) for value in output[:: max(1, len(output) // OUTPUTS)][:OUTPUTS]]


def tensors_of(model: nn.Module) -> dict[str, list[Any]]:
    """Type, shape and SHA-256 of the bytes of every tensor."""
    return {
        name: [str(value.dtype).removeprefix("torch."), list(value.shape), _sha256(_bytes(value))]
        for name, value in model.state_dict().items()
    }


def facts_of_plan(plan: pmvit.Plan) -> dict[str, Any]:
    """What a plan says, whatever it is written as."""
    layers = {str(index): asdict(layer) for index, layer in sorted(plan.layers.items())}
    facts = {name: value for name, value in asdict(plan).items() if name != "layers"}
    facts["layers"] = _sha256(json.dumps(layers, sort_keys=True).encode())
    result: dict[str, Any] = json.loads(json.dumps(facts))
    return result


def _bytes(value: Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# --- the models ---


def randomised(model: nn.Module) -> Any:
    """The model with weights of which none is zero, large enough for its tokens to matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.5 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise + (parameter.dim() == 1 and name.endswith("weight")))
    return model.eval()


def perturbed(model: nn.Module) -> Any:
    """A compressed model with matrices that cannot be made of its plan alone, as after fine-tuning."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("merge_weights", "reconstruct_weights")):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model


def small_vit() -> Any:
    """One of timm's, with three blocks."""
    settings = {"img_size": SIDE, "num_classes": CLASSES, **NARROW}
    return randomised(timm.create_model("vit_tiny_patch16_224", **settings))


def small_swin() -> Any:
    settings = {"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2)}
    return randomised(timm.create_model("swin_tiny_patch4_window7_224", num_classes=CLASSES, **settings))


def small_features() -> Any:
    settings = {"img_size": SIDE, "out_indices": (1, 2), **NARROW}
    return randomised(timm.create_model("vit_tiny_patch16_224", features_only=True, **settings))


def small_segmenter() -> Any:
    return randomised(pmvit.create_segmenter(classes=CLASSES, image_size=(16, SIDE), **NARROW))


def small_dpt() -> Any:
    import segmentation_models_pytorch as smp

    encoder = {"img_size": 96, "embed_dim": 8, "num_heads": 2}  # it always has twelve blocks
    decoder = {"decoder_intermediate_channels": (4, 4, 4, 4), "decoder_fusion_channels": 4, "classes": CLASSES}
    model = smp.DPT("tu-vit_tiny_patch16_224", encoder_weights=None, **encoder, **decoder)
    return randomised(model).bfloat16()  # and so a type that is not float32 is kept as well


def small_hf() -> Any:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=SIDE,
        patch_size=4,
        num_labels=CLASSES,
    )
    return randomised(transformers.ViTForImageClassification(config))


def small_hf_swin() -> Any:
    import transformers

    config = transformers.SwinConfig(
        embed_dim=8, depths=[2, 2], num_heads=[1, 2], window_size=4, image_size=32, patch_size=4, num_labels=CLASSES
    )
    return randomised(transformers.SwinForImageClassification(config))


def small_torchvision() -> Any:
    from torchvision.models import VisionTransformer

    return randomised(VisionTransformer(SIDE, 4, 3, 2, 8, 16, num_classes=CLASSES))


def small_torchvision_swin() -> Any:
    from torchvision.models import swin_transformer

    model: Any = swin_transformer.SwinTransformer([4, 4], 8, [2, 2], [1, 2], [4, 4], num_classes=CLASSES)
    model.image_size = (32, 32)
    return randomised(model)


FAMILIES: dict[str, Callable[[], Any]] = {
    "saved_swin": small_swin,
    "saved_features": small_features,
    "saved_segmenter": small_segmenter,
    "saved_dpt": small_dpt,
    "saved_hf": small_hf,
    "saved_hf_swin": small_hf_swin,
    "saved_torchvision": small_torchvision,
    "saved_torchvision_swin": small_torchvision_swin,
}


# --- the files ---


def write_documents(folder: Path, model: nn.Module) -> None:
    """Scores, partial scores, prices and plans; the plans with MLP groups and for windows, too."""
    scores, prices = (
        pmvit.score(model, batches(), progress=False),
        pmvit.measure_merge_costs(model, batches(), progress=False),
    )
    swin = pmvit.score(small_swin(), [], scorer="random")
    scores.save(folder / "scores.json")
    swin.save(folder / "scores_swin.json")
    prices.save(folder / "prices.json")
    pmvit.score(model, batches()[:2], checkpoint=folder / "scores.json.partial", progress=False)
    pmvit.plan(scores, keep=0.5, prune=0.1).save(folder / "plan.json")
    pmvit.plan(prices, keep=0.6).save(folder / "plan_split.json")
    pmvit.plan(swin, keep=0.6, prune=0.1).save(folder / "plan_swin.json")


def write_models(folder: Path, model: nn.Module) -> None:
    """One saved model of each kind and of each family."""
    pmvit.save(model, folder / "saved_original")
    split = pmvit.Plan.load(folder / "plan_split.json")
    pmvit.save(perturbed(pmvit.compress(model, split)), folder / "saved_model")
    paper = pmvit.plan(pmvit.Scores.load(folder / "scores.json"), keep=0.5, prune=0.1, **PAPER)
    pmvit.save(perturbed(pmvit.compress(model, paper, learn="dense")), folder / "saved_model.safetensors")
    pmvit.save(methods.compress(model, "tome", r=6), folder / "saved_method")
    for name, make in FAMILIES.items():
        host = make()
        plan = pmvit.plan(pmvit.score(host, [], scorer="random"), keep=0.6, prune=0.1)
        pmvit.save(perturbed(pmvit.compress(host, plan)), folder / name)


class Interrupting:
    """Images to validate on, at the end of which somebody presses Ctrl-C."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader
        signal.raise_signal(signal.SIGINT)


def write_finetune(folder: Path, model: Path) -> dict[str, list[float]]:
    """A run that was stopped after its first epoch; what was measured in one that was not."""
    from pmvit.loading import open_validation
    from pmvit.training.signals import StoppedError

    images: dict[str, Any] = {"train": COMMAND["data"], "command": COMMAND, "progress": False, **FINETUNE}
    small = pmvit.load(model)
    validation = Interrupting(open_validation(small, COMMAND["val"], labels=True, workers=0))
    with suppress(StoppedError):
        pmvit.finetune(small, val=validation, output=folder, **images)
        raise RuntimeError("expected the run to stop after its first epoch")
    pmvit.finetune(pmvit.load(model), val=COMMAND["val"], output="whole", **images)
    return measured_in(Path("whole"))


def measured_in(run: Path) -> dict[str, list[float]]:
    """The loss of each step, and what validation found after each epoch, of the moving average of the weights."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    names = ("loss", "cross_entropy")
    return {name: [line[name] for line in lines if name in line] for name in names}


def write_report(path: Path, saved: Path, original: nn.Module) -> None:
    """What a report of a saved model keeps beside its page, without the speeds of a machine."""
    from pmvit.evaluation.paired import evaluate_pair
    from pmvit.fingerprint import fingerprint
    from pmvit.report.facts import collect
    from pmvit.report.measured import Measured

    facts = collect(saved, None)
    evaluation = asdict(evaluate_pair(facts.model, original, batches(), progress=False))
    of = {"model": facts.checksum, "original": fingerprint(original), "compared_with": facts.original_title}
    Measured({**of, "data": "noise", "limit": None}, evaluation, None, []).write(path)


def expected(folder: Path, measured: dict[str, list[float]]) -> dict[str, Any]:
    """What is to be read from the files."""
    plans = {path.name: facts_of_plan(pmvit.Plan.load(path)) for path in sorted(folder.glob("plan*.json"))}
    models = {path.name: expected_of_model(path) for path in sorted(folder.glob("saved_*"))}
    if missing := set(supported_families()) - {entry["family"] for entry in models.values()}:
        raise RuntimeError(f"expected a model of every family; there is none of {', '.join(missing)}")
    return {"finetune": measured, "plans": plans, "models": models}


def expected_of_model(path: Path) -> dict[str, Any]:
    """What is to be read from a saved model, whose compression has to be seen in what it puts out."""
    model, original = pmvit.load(path), pmvit.load(path)
    if is_compressed := path.name != "saved_original":
        original = pmvit.decompress(original)
    family, plan = adapter_for(original).family, plan_of(model)
    tensors, outputs = tensors_of(model), outputs_of(model)
    change = max(abs(one - other) for one, other in zip(outputs, outputs_of(original), strict=True))
    if is_compressed and change < 0.001:
        raise RuntimeError(f"{path}: expected another output than that of the original; it differs by {change}")
    facts = None if plan is None else facts_of_plan(plan)
    return {"family": family, "outputs": outputs, "plan": facts, "tensors": tensors}


def plan_of(model: Any) -> pmvit.Plan | None:
    """The plan that a model was compressed by, if it was one."""
    return model.compression.plan if hasattr(model, "compression") else None


def dumped(value: Any, depth: int = 4) -> str:
    """JSON with a line for each entry down to a depth: one for each tensor."""
    if not isinstance(value, dict) or depth == 0:
        return json.dumps(value)
    return (
        "{\n" + ",\n".join(f"{json.dumps(name)}: {dumped(entry, depth - 1)}" for name, entry in value.items()) + "\n}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    output: Path = parser.parse_args().output.absolute()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from pmvit.cli import main as pmvit_command

    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        folder = Path()
        write_pictures(folder / "pictures")
        model = small_vit()
        write_documents(folder, model)
        write_models(folder, model)
        measured = write_finetune(Path("finetune"), folder / "saved_model")
        with patch.object(sys, "argv", ["pmvit", *RUN]), suppress(SystemExit):
            pmvit_command()
        write_report(folder / "report.json", folder / "saved_model", model)
        (folder / "expected.json").write_text(dumped(expected(folder, measured)) + "\n", encoding="utf-8")
        for left_out in ("pictures", "whole"):
            shutil.rmtree(left_out)
        for curves in folder.rglob("curves.png"):
            curves.unlink()
        shutil.copytree(folder, output, dirs_exist_ok=True)
        os.chdir(output)  # out of the folder that goes


if __name__ == "__main__":
    main()
