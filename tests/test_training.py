"""Fine-tuning: the loss, the matrices, the loop and its files."""

import copy
import json
import math
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import pmvit
from pmvit.compress import read_tensors
from pmvit.data.demo import demo_images
from pmvit.planning import Plan
from pmvit.training import PRESETS, FinetuneConfig
from pmvit.training.checkpoint import Checkpoint, Checkpoints, join_tensors, select, split_tensors
from pmvit.training.loss import divergence, finetune_loss, token_distance
from pmvit.training.matrices import matrix_parameters, parameter_groups
from pmvit.training.metrics import read_metrics
from tests.conftest import small_vit

Batches = list[tuple[Tensor, Tensor]]
QUIET: dict[str, Any] = {"progress": False, "workers": 0, "checkpoint_every": 1, "keep_checkpoints": 100}


def small_plan(model: nn.Module, keep: float = 0.5, **options: Any) -> Plan:
    scores = pmvit.score(model, [], scorer="random")
    return pmvit.plan(scores, keep=keep, prune=0.1, **options)


def compressed(**options: Any) -> nn.Module:
    model = small_vit()
    learn = options.pop("learn", "group")
    return pmvit.compress(model, small_plan(model, **options), learn=learn)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """64 images in 7 class folders, coloured by class so that there is something to learn."""
    return make_pictures(tmp_path / "pictures")


def make_pictures(folder: Path, count: int = 64) -> Path:
    images, _ = demo_images("train", count)
    for number, image in enumerate(images):
        label = number % 7
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        colours = torch.stack([image, image.roll(label, 0), 255 - image], dim=-1)
        picture = Image.fromarray(colours.numpy()).resize((110, 96))
        picture.save(folder / str(label) / f"{number}.png")
    return folder


# --- the loss ---


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


# --- the matrices ---


def states(output: Path) -> dict[int, dict[str, Tensor]]:
    """The model's tensors after every step."""
    checkpoints = Checkpoints(output / "checkpoints", 100)
    return {step: select(read_tensors(checkpoints.path(step)), "model/") for step in checkpoints.steps()}


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
    wrapped = [module for module in model.modules() if isinstance(module, pmvit.PruneMerge)]
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
        assert id(model.norm.weight) in exempt


# --- the loop ---


def test_tuning_comes_nearer_to_the_teacher_and_leaves_it_alone(small_batches: Batches, tmp_path: Path) -> None:
    teacher = small_vit()
    model = pmvit.compress(teacher, small_plan(teacher))
    teacher.train()
    before = copy.deepcopy(teacher.state_dict())
    start = pmvit.evaluate(model, small_batches, reference=teacher, progress=False).kl
    result = pmvit.finetune(
        model, teacher=teacher, train=small_batches, val=small_batches, output=tmp_path, epochs=12, lr=1e-3,
        labels=False, **QUIET,
    )  # fmt: skip
    assert result.last is not None
    assert result.last.kl is not None
    assert start is not None
    assert result.last.kl < 0.5 * start
    assert teacher.training
    assert not model.training
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
    names = read_tensors(Checkpoints(tmp_path / "checkpoints", 1).path(36))
    assert {name.split("/")[0] for name in names} == {"model", "optimizer"}
    assert set(select(names, "model/")) == set(model.state_dict())


def test_the_default_teacher_is_the_model_uncompressed(small_batches: Batches) -> None:
    teacher = small_vit()
    options: dict[str, Any] = {"train": small_batches, "epochs": 1, "lr": 1e-3, "progress": False}
    named, unnamed = (pmvit.compress(teacher, small_plan(teacher)) for _ in range(2))
    pmvit.finetune(named, teacher=teacher, **options)
    pmvit.finetune(unnamed, **options)
    assert same(named.state_dict(), unnamed.state_dict())
    alone = pmvit.compress(teacher, small_plan(teacher))
    pmvit.finetune(alone, alpha=0.0, **options)
    assert not same(named.state_dict(), alone.state_dict())
    ignored = pmvit.compress(teacher, small_plan(teacher))
    pmvit.finetune(ignored, alpha=0.0, teacher=small_vit(num_classes=3), **options)  # is not even asked
    assert same(alone.state_dict(), ignored.state_dict())


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_token_distillation_brings_the_token_maps_nearer(small_batches: Batches, tmp_path: Path) -> None:
    tokens = {}
    for weight in (0.0, 5.0):
        teacher = small_vit()
        model = pmvit.compress(teacher, small_plan(teacher))
        pmvit.finetune(
            model, teacher=teacher, train=small_batches, epochs=10, lr=1e-3, token_alpha=weight, token_blocks=(1, 2),
            progress=False,
        )  # fmt: skip
        with torch.inference_mode():
            maps = [host.forward_features(small_batches[0][0]) for host in (model, teacher)]
        tokens[weight] = token_distance(*maps)
    assert tokens[5.0] < 0.8 * tokens[0.0]


def test_accumulated_passes_make_the_same_step(pictures: Path) -> None:
    ends = []
    for accumulate in (1, 4):
        model = compressed()
        pmvit.finetune(
            model, train=pictures, epochs=1, batch_size=16, accumulate=accumulate, optimizer="sgd", lr=0.1, workers=0,
            progress=False,
        )  # fmt: skip
        ends.append(model.state_dict())
    worst = max((ends[0][name] - ends[1][name]).abs().max() for name in ends[0])
    assert worst < 1e-4
    assert not same(ends[0], small_vit().state_dict())


def test_output_is_what_compress_saves(pictures: Path, tmp_path: Path) -> None:
    model = compressed()
    options: dict[str, Any] = {"epochs": 2, "batch_size": 16, "ema": 0.9, "mixup": 0.5, "cutmix": 0.5, "lr": 1e-3}
    result = pmvit.finetune(model, train=pictures, val=pictures, output=tmp_path / "out", **QUIET, **options)
    images = torch.randn(2, 3, 96, 96)
    with torch.inference_mode():
        assert torch.equal(pmvit.load(tmp_path / "out" / "last")(images), model(images))
        pmvit.load(tmp_path / "out")(images)
    best = max(line["top1"] for line in read_metrics(tmp_path / "out") if line.get("kind") == "epoch")
    assert result.best is not None
    assert result.best.top1 == best
    assert pmvit.evaluate(pmvit.load(tmp_path / "out"), val_of(model, pictures), progress=False).top1 == best
    with Image.open(tmp_path / "out" / "curves.png") as curves:
        curves.load()
        assert curves.width > 800
    record = json.loads((tmp_path / "out" / "finetune.json").read_text())
    assert record["config"]["ema"] == 0.9
    assert record["result"]["steps"] == 8


def val_of(model: nn.Module, folder: Path) -> Any:
    from pmvit.data.folder import image_folder
    from pmvit.models import adapter_for

    return image_folder(folder, adapter_for(model).data_config(model), num_classes=7, workers=0)


def test_an_uncompressed_model_is_tuned_without_a_teacher(small_batches: Batches) -> None:
    model = small_vit()
    before = pmvit.evaluate(model, small_batches, progress=False).cross_entropy
    result = pmvit.finetune(model, train=small_batches, val=small_batches, epochs=8, lr=1e-3, progress=False)
    assert result.last is not None
    assert result.last.cross_entropy is not None
    assert before is not None
    assert result.last.cross_entropy < 0.7 * before


def test_tensorboard_gets_the_numbers(small_batches: Batches, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pmvit.finetune(compressed(), train=small_batches, output=tmp_path, epochs=1, log_with="tensorboard", **QUIET)
    events = EventAccumulator(str(next(tmp_path.rglob("events.*")).parent)).Reload()
    logged = [event.value for event in events.Scalars("loss")]
    assert logged == pytest.approx([line["loss"] for line in read_metrics(tmp_path)], rel=1e-5)


# --- what goes wrong ---


def test_divergence_names_step_images_and_checkpoint(pictures: Path, tmp_path: Path) -> None:
    model = compressed()
    options: dict[str, Any] = {"epochs": 1, "batch_size": 16, "lr": 1e30, "clip": 0.0, "output": tmp_path / "out"}
    with pytest.raises(pmvit.PmvitError, match=r"diverged at step 2 \(epoch 1\)") as error:
        pmvit.finetune(model, train=pictures, **QUIET, **options)
    message = str(error.value)
    assert message.count(".png") == 8
    assert "and 8 more" in message
    assert "step-00000001.safetensors" in message
    assert "Lower lr" in message


def test_a_broken_batch_never_reaches_the_weights(small_batches: Batches, tmp_path: Path) -> None:
    images, labels = small_batches[1]
    poisoned = [small_batches[0], (images * math.nan, labels), small_batches[2]]
    with pytest.raises(pmvit.PmvitError, match=r"step 2 .* on batch 1 of epoch 1; the last good checkpoint is"):
        pmvit.finetune(compressed(), train=poisoned, epochs=1, output=tmp_path, **QUIET)
    (state,) = states(tmp_path).values()
    assert all(torch.isfinite(value).all() for value in state.values())


class _Filling:
    """Batches of two epochs; before the second one, files may not grow any more."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.epochs = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        if self.epochs == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        return iter(self.batches)


def test_a_full_disk_leaves_the_checkpoint_before(small_batches: Batches, tmp_path: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    options = {**QUIET, "checkpoint_every": 100}
    try:
        with pytest.raises(pmvit.PmvitError, match=r"checkpoint of step 6 .*/step-00000003.safetensors, is whole"):
            pmvit.finetune(compressed(), train=_Filling(small_batches), epochs=3, output=tmp_path, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003.safetensors"]
    resumed, alone = compressed(), compressed()
    pmvit.finetune(resumed, train=small_batches, epochs=3, output=tmp_path, resume=True, **options)
    pmvit.finetune(alone, train=small_batches, epochs=3, progress=False)
    assert same(resumed.state_dict(), alone.state_dict())


def test_a_run_is_only_resumed_as_itself(small_batches: Batches, tmp_path: Path) -> None:
    options: dict[str, Any] = {"train": small_batches, "output": tmp_path, "epochs": 1, **QUIET}
    first = pmvit.finetune(compressed(), **options)
    with pytest.raises(pmvit.PmvitError, match="holds a fine-tuning run already"):
        pmvit.finetune(compressed(), **options)
    with pytest.raises(pmvit.PmvitError, match=r"lr = 0.0001, not 0.5"):
        pmvit.finetune(compressed(), **options, resume=True, lr=0.5)
    with pytest.raises(pmvit.PmvitError, match="another plan"):
        pmvit.finetune(compressed(keep=0.4), **options, resume=True)
    with pytest.raises(pmvit.PmvitError, match="another teacher"):
        pmvit.finetune(compressed(), teacher=small_vit(depth=4), **options, resume=True)
    again = compressed()
    assert pmvit.finetune(again, **options, resume=True) == first  # it had come to its end
    assert same(again.state_dict(), pmvit.load(tmp_path / "last").state_dict())


def test_wrong_input_is_said_before_anything_is_written(pictures: Path, small_batches: Batches, tmp_path: Path) -> None:
    options: dict[str, Any] = {"output": tmp_path / "out", "progress": False}
    for wrong, message in (
        ({"batch_size": 65}, "expected at least 65 images"),
        ({"batch_size": 16, "teacher": small_vit(num_classes=5)}, "teacher with outputs of shape"),
        ({"token_alpha": 1.0, "token_blocks": (9,), "batch_size": 16}, r"blocks of 0 \.\.\. 2, got 9"),
        ({"train": iter(small_batches)}, "loader with a length"),
        ({"train": small_batches, "accumulate": 4, "batch_size": 4}, "expected 4 batches or more"),
        ({"log_with": "nothing", "batch_size": 16}, "accelerate cannot be set up"),
    ):
        with pytest.raises(pmvit.PmvitError, match=message):
            pmvit.finetune(compressed(), **{"train": pictures, **options, **wrong})
        assert not list(tmp_path.rglob("*.safetensors"))


def test_a_folder_without_classes_needs_no_labels(pictures: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in pictures.rglob("*.png"):
        (flat / path.name).write_bytes(path.read_bytes())
    with pytest.raises(pmvit.PmvitError, match="labels=False"):
        pmvit.finetune(compressed(), train=flat, batch_size=16, epochs=1, progress=False, workers=0)
    result = pmvit.finetune(
        compressed(), train=flat, val=flat, batch_size=16, epochs=2, labels=False, progress=False, workers=0
    )
    assert result.last is not None
    assert result.last.top1 is None
    assert result.last.kl is not None


class _Ends:
    """Validation images that are there for one epoch, and then fail."""

    def __init__(self, batches: Batches) -> None:
        self.batches: list[Batches] = [batches]

    def __iter__(self) -> Iterator[Any]:
        if not self.batches:
            raise FileNotFoundError("no more")
        return iter(self.batches.pop())


@pytest.mark.parametrize("optimizer", ["lamb", "adafactorbv", "sgd", "lookahead_adamw"])
def test_any_optimizer_of_timm_is_resumed(optimizer: str, small_batches: Batches, tmp_path: Path) -> None:
    options: dict[str, Any] = {"train": small_batches, "epochs": 2, "lr": 1e-3, "optimizer": optimizer}
    stopped, resumed, alone = compressed(), compressed(), compressed()
    with pytest.raises(FileNotFoundError):
        pmvit.finetune(stopped, val=_Ends(small_batches), output=tmp_path, **QUIET, **options)
    assert Checkpoints(tmp_path / "checkpoints", 1).steps() == [1, 2, 3, 4, 5]
    (tmp_path / "checkpoints" / "step-00000005.safetensors").write_bytes(b"damaged")
    pmvit.finetune(resumed, output=tmp_path, resume=True, **QUIET, **options)
    pmvit.finetune(alone, progress=False, **options)
    assert same(resumed.state_dict(), alone.state_dict())


def test_any_nested_state_survives() -> None:
    state = {"state": {0: {"Q": [torch.ones(2), torch.zeros(1)], "step": 3, "dtype": torch.bfloat16, "none": None}},
             "param_groups": [{"step": torch.tensor(2.0), "betas": (0.9, 0.99), "name": "x", "on": True}]}  # fmt: skip
    tensors: dict[str, Tensor] = {}
    data = json.loads(json.dumps(split_tensors(state, tensors)))
    assert len(tensors) == 3
    again = join_tensors(data, tensors)
    assert again["state"][0]["dtype"] is torch.bfloat16
    assert again["param_groups"][0]["betas"] == (0.9, 0.99)
    assert all(torch.equal(a, b) for a, b in zip(again["state"][0]["Q"], state["state"][0]["Q"], strict=True))
    assert again["param_groups"][0]["step"] == 2
    with pytest.raises(pmvit.PmvitError, match="keeps a set"):
        split_tensors({"a": {1, 2}}, {})


def test_a_run_is_not_resumed_with_other_steps(small_batches: Batches, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 2, "output": tmp_path, **QUIET}
    with pytest.raises(FileNotFoundError):
        pmvit.finetune(compressed(), train=small_batches, val=_Ends(small_batches), **options)
    with pytest.raises(pmvit.PmvitError, match="had 3 steps an epoch, and would now have 2"):
        pmvit.finetune(compressed(), train=small_batches[:2], resume=True, **options)


def test_validation_without_labels_looks_at_the_teacher(pictures: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in pictures.rglob("*.png"):
        (flat / path.name).write_bytes(path.read_bytes())
    options: dict[str, Any] = {"batch_size": 16, "epochs": 2, "progress": False, "workers": 0}
    result = pmvit.finetune(compressed(), train=pictures, val=flat, output=tmp_path / "out", **options)
    assert result.best is not None
    assert result.best.top1 is None
    assert result.best.kl is not None


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda images, labels: (images, labels - 9), {}, "got -"),
        (lambda images, labels: (images, labels + 9), {"mixup": 0.5}, "expected labels below 7"),
        (lambda images, labels: (images[:3], labels[:3]), {"cutmix": 0.5}, "got 3, an odd number"),
    ],
)
def test_batches_that_do_not_fit(
    change: Callable[..., Any], options: dict[str, Any], message: str, small_batches: Batches
) -> None:
    with pytest.raises(pmvit.PmvitError, match=message):
        pmvit.finetune(compressed(), train=[change(*batch) for batch in small_batches], progress=False, **options)


def test_checkpoints_round_trip_and_only_the_last_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    shared = torch.arange(4.0)
    for step in (5, 10, 100):
        checkpoints.write(step, Checkpoint({"a": shared, "b": shared, "c": shared[:2]}, {"step": step, "x": None}))
    assert checkpoints.steps() == [10, 100]
    tensors, state = checkpoints.read(tmp_path / "step-00000100.safetensors")
    assert state == {"step": 100, "x": None}
    assert torch.equal(tensors["b"], shared)
    assert torch.equal(tensors["c"], shared[:2])
    broken = tmp_path / "step-00000200.safetensors"
    broken.write_bytes((tmp_path / "step-00000100.safetensors").read_bytes()[:-8])
    with pytest.raises(pmvit.PmvitError, match="whole safetensors file"):
        checkpoints.read(broken)


# --- configuration ---


def test_presets_are_the_papers() -> None:
    alphas = {name: FinetuneConfig.preset(name).alpha for name in PRESETS}
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
        FinetuneConfig.preset("quick", epoch=3)


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
