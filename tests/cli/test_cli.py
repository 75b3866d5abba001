"""The command line, as a user runs it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import pmvit
from pmvit.data.demo import MEAN, STD, demo_images, demo_loader, demo_model
from pmvit.data.opening import open_loader
from pmvit.loading import create_model
from pmvit.measuring import MergeCosts, Scores, TokenMetric
from pmvit.planning import Plan
from tests.helpers import pmvit_command, pmvit_here, tome

ARGUMENTS = ["img_size=28", "patch_size=2", "in_chans=1", "embed_dim=128", "depth=6", "num_heads=4"]
PREPARATION = [f"mean=[{MEAN}]", f"std=[{STD}]", "crop_pct=1.0"]
MODEL_ARGUMENTS = [part for argument in ARGUMENTS for part in ("--model-arg", argument)]
MODEL_ARGUMENTS += [part for argument in PREPARATION for part in ("--data-arg", argument)]
WEIGHTS = Path(pmvit.__file__).parent / "data" / "demo" / "vit.safetensors"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fashion-MNIST as a user has images: one PNG each, in class folders."""
    folder = tmp_path_factory.mktemp("images")
    pictures, labels = demo_images("test", 120)
    for number, (picture, label) in enumerate(zip(pictures, labels.tolist(), strict=True)):
        (folder / str(label)).mkdir(exist_ok=True)
        Image.fromarray(picture.numpy()).save(folder / str(label) / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def compressed(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("models") / "out"
    result = pmvit_command(
        *("compress", "vit_tiny_patch16_224", "--weights", WEIGHTS, *MODEL_ARGUMENTS),
        *("--data", images, "--keep", 0.6, "--prune", 0.1, "-o", output),
    )
    assert result.returncode == 0, result.stderr
    assert "x fewer" in result.stdout
    return output


def test_compress_writes_what_the_library_would_make(compressed: Path, images: Path) -> None:
    expected = {"model.safetensors", "plan.json", "config.json", "README.md", "scores.json", "commands.json"}
    assert {path.name for path in compressed.iterdir()} == expected
    model = demo_model()
    plan = pmvit.plan(Scores.load(compressed / "scores.json"), keep=0.6, prune=0.1)
    assert plan == Plan.load(compressed / "plan.json")
    batch = demo_loader("test", count=4)[0][0]
    with torch.inference_mode():
        assert torch.equal(pmvit.compress(model, plan)(batch), pmvit.load(compressed)(batch))


def test_info_counts_what_the_library_counts(compressed: Path) -> None:
    result = pmvit_here("info", compressed, "--draw")
    assert result.returncode == 0, result.stderr
    for word in ("kept", "merged", "pruned", "GFLOPs (MACs)", "parameters", "merge + reconstruct", "█"):
        assert word in result.stdout
    numbers = json.loads(pmvit_here("info", compressed, "--json").stdout)
    assert numbers["compressed"]["macs"] == pmvit.flops(pmvit.load(compressed)).macs
    assert numbers["original"]["macs"] == pmvit.flops(demo_model()).macs
    assert sum(block["kept"] for block in numbers["blocks"].values()) == round(0.6 * 6 * 196)


def test_evaluate_reports_accuracy_and_broken_images(compressed: Path, images: Path, tmp_path: Path) -> None:
    copy = tmp_path / "images"
    for path in images.rglob("*.png"):
        (copy / path.relative_to(images)).parent.mkdir(parents=True, exist_ok=True)
        (copy / path.relative_to(images)).write_bytes(path.read_bytes())
    broken = sorted(copy.rglob("*.png"))[0]
    broken.write_bytes(broken.read_bytes()[:40])
    result = pmvit_here("evaluate", compressed, "--data", copy, "--json")
    numbers = json.loads(result.stdout)
    assert (numbers["images"], numbers["broken"]) == (119, 1)
    assert list(numbers["broken_files"]) == [str(broken)]
    assert numbers["reference_top1"] > 0.8
    assert 0.5 < numbers["agreement"] < 1
    table = pmvit_here("evaluate", compressed, "--data", copy).stdout
    assert f"{numbers['top1']:.2%}" in table
    assert "1 broken image skipped" in table
    strict = pmvit_here("evaluate", compressed, "--data", copy, "--strict")
    assert strict.returncode == 1
    assert broken.name in strict.stderr


def test_steps_one_by_one_give_the_same(compressed: Path, images: Path, tmp_path: Path) -> None:
    model = ("vit_tiny_patch16_224", "--weights", WEIGHTS, *MODEL_ARGUMENTS)
    steps = [
        ("measure", *model, "--data", images, "--method", "scored", "-o", tmp_path / "scores.json"),
        ("plan", tmp_path / "scores.json", "--keep", 0.6, "--prune", 0.1, "-o", tmp_path / "plan.json"),
        ("compress", *model, "--plan", tmp_path / "plan.json", "-o", tmp_path / "out"),
    ]
    for step in steps:
        result = pmvit_here(*step)
        assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / "plan.json").read_bytes() == (compressed / "plan.json").read_bytes()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (compressed / "model.safetensors").read_bytes()


def test_the_default_in_one_go_or_step_by_step(images: Path, tmp_path: Path) -> None:
    model = ("vit_tiny_patch16_224", "--weights", WEIGHTS, *MODEL_ARGUMENTS)
    measuring = ("measure", *model, "--data", images, "--limit", 40)
    refused = pmvit_here(*measuring, "-o", tmp_path / "metric.json")
    assert refused.returncode == 1
    assert "expected a name that ends in .safetensors" in refused.stderr
    assert "measure" not in refused.stdout  # and nothing was
    steps: list[tuple[Any, ...]] = [
        ("compress", *model, "--data", images, "--limit", 40, "--keep", 0.6, "-o", tmp_path / "once"),
        (*measuring, "-o", tmp_path / "metric.safetensors"),
        ("plan", tmp_path / "metric.safetensors", "--keep", 0.6, "-o", tmp_path / "plan.safetensors"),
        ("compress", *model, "--plan", tmp_path / "plan.safetensors", "-o", tmp_path / "out"),
    ]
    for step in steps:
        result = pmvit_here(*step)
        assert result.returncode == 0, result.stderr
    names = ("adaptive.json", "model.safetensors")
    once, out = ([(tmp_path / folder / name).read_bytes() for name in names] for folder in ("once", "out"))
    assert once == out


def test_compress_needs_no_images(tmp_path: Path) -> None:
    """It measures on images that are generated, says so and writes it down; the library makes the same."""
    model = ("vit_tiny_patch16_224", "--weights", WEIGHTS, *MODEL_ARGUMENTS)
    once = pmvit_here("compress", *model, "--limit", 40, "--keep", 0.6, "-o", tmp_path / "out")
    assert once.returncode == 0, once.stderr
    said = "measured on 40 images: generated images in batches of 64, seed 0. Images of your own keep more (--data)"
    assert said in " ".join(once.stdout.split())
    step = pmvit_here("measure", *model, "--limit", 40, "-o", tmp_path / "metric.safetensors")
    assert said in " ".join(step.stdout.split())
    assert said in " ".join(pmvit_here("info", tmp_path / "out").stdout.split())
    told = json.loads(pmvit_here("info", tmp_path / "out", "--json").stdout)
    assert told["measured_on"] == "generated images in batches of 64, seed 0"
    assert f'"data": "{told["measured_on"]}"' in (tmp_path / "out" / "README.md").read_text()
    here = pmvit.measure(demo_model(), method="adaptive", limit=40, progress=False)
    for written in ("metric.safetensors", "out/metric.safetensors"):
        assert torch.equal(TokenMetric.load(tmp_path / written).projections, here.projections)
    for method, what in (("measured", "merge costs"), ("scored", "scores")):
        refused = pmvit_here("compress", *model, "--method", method, "--keep", 0.6, "-o", tmp_path / "other")
        assert refused.returncode == 1
        assert f"expected images to measure {what} on; got none: name some (--data)" in refused.stderr
    assert not (tmp_path / "other").exists()


def test_a_measured_plan_in_one_go_or_step_by_step(images: Path, tmp_path: Path) -> None:
    model = ("vit_tiny_patch16_224", "--weights", WEIGHTS, *MODEL_ARGUMENTS)
    result = pmvit_here(
        *("compress", *model, "--data", images, "--limit", 40, "--flops-share", 0.7),
        *("--groups", "any", "-o", tmp_path / "out"),
    )
    assert result.returncode == 0, result.stderr
    result = pmvit_here("plan", tmp_path / "out/merge_costs.json", "--flops-share", 0.7, "-o", tmp_path / "plan.json")
    assert result.returncode == 0, result.stderr
    merge_costs = MergeCosts.load(tmp_path / "out/merge_costs.json")
    assert merge_costs.images == 40
    assert merge_costs.config.groups == "any"
    first, second = (Plan.load(tmp_path / name) for name in ("out/plan.json", "plan.json"))
    assert first.layers == second.layers
    assert pmvit.flops(pmvit.load(tmp_path / "out")).macs <= 0.7 * merge_costs.cost.macs


def test_a_single_file_and_foreign_classes(images: Path, tmp_path: Path) -> None:
    """Scores without labels do not care how many class folders there are."""
    few = tmp_path / "images" / "only"
    few.mkdir(parents=True)
    for path in sorted(images.rglob("*.png"))[:8]:
        (few / path.name).write_bytes(path.read_bytes())
    model = ("vit_tiny_patch16_224", "--weights", WEIGHTS, *MODEL_ARGUMENTS, "--model-arg", "act_layer=gelu")
    options = ("--data", tmp_path / "images", "--keep", 0.6, "-o", tmp_path / "small.safetensors")
    with_labels = pmvit_here("compress", *model, *options, "--method", "scored")
    assert "expected 10 class folders" in with_labels.stderr
    result = pmvit_here("compress", *model, *options, "--loss", "predicted")
    assert result.returncode == 0, result.stderr
    beside = {"small.safetensors", "small.scores.json", "small.commands.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"images", *beside}
    assert pmvit.load(tmp_path / "small.safetensors").num_classes == 10


def test_other_methods_have_the_same_verbs(images: Path, tmp_path: Path) -> None:
    model = ("vit_tiny_patch16_224", "--weights", WEIGHTS, *MODEL_ARGUMENTS)
    result = pmvit_here("compress", *model, "--method", "tome", "--r", "9,9,9,9,9,8", "-o", tmp_path / "tome")
    assert result.returncode == 0, result.stderr
    assert "ToMe: r (9, 9, 9, 9, 9, 8)" in result.stdout
    batch = demo_loader("test", count=4)[0][0]
    with torch.inference_mode():
        expected = tome(demo_model(), (9, 9, 9, 9, 9, 8))(batch)
        assert torch.equal(pmvit.load(tmp_path / "tome")(batch), expected)
    numbers = json.loads(pmvit_here("info", tmp_path / "tome", "--json").stdout)
    assert numbers["method"]["name"] == "tome"
    assert numbers["compressed"]["macs"] < numbers["original"]["macs"]
    result = pmvit_here(
        *("compare", *model, "--data", images, "--limit", 16, "--batch-size", 16, "--workers", 0),
        *("--gflops", 0.2, "--runtime", "none"),
        *("--methods", "ps-vit,adaptive", "--measure-data", images),
        *("--with", tmp_path / "tome", "--no-exports"),
        *("-o", tmp_path / "compared"),
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "compared" / "comparison.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["original", "ps-vit", "adaptive", str(tmp_path / "tome")]
    assert [row["evaluation"]["images"] for row in rows] == [16] * 4
    assert [row["gflops"] for row in rows[1:3]] == pytest.approx([0.2, 0.2], rel=0.01)
    assert TokenMetric.load(tmp_path / "compared" / "metric.safetensors").images > 0
    assert "adaptive" in result.stdout
    again = pmvit_here(
        *("compare", *model, "--data", images, "--limit", 16, "--workers", 0, "--gflops", 0.2, "--runtime", "none"),
        *("--methods", "adaptive,measured", "--measured", tmp_path / "compared" / "metric.safetensors", "--no-exports"),
        "--json",
    )
    _, adaptive, measured = json.loads(again.stdout)["rows"]
    assert adaptive["gflops"] == rows[2]["gflops"]
    assert measured["failure"] == "it needs merge costs"


def test_the_paper_is_one_option_away(compressed: Path, tmp_path: Path) -> None:
    scores = compressed / "scores.json"
    result = pmvit_here(
        "plan", scores, "--method", "paper", "--keep", 0.6, "--grouping", "segment", "-o", tmp_path / "p.json"
    )
    assert result.returncode == 0, result.stderr
    plan = Plan.load(tmp_path / "p.json")
    assert plan.reconstruct == "pinv"
    assert not plan.attention_bias
    assert plan.made_by["plan"]["weights"] == "normalize"
    assert plan.made_by["plan"]["grouping"] == "segment"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("info", "nothing"), "expected a folder or a .safetensors file written by pmvit at nothing"),
        (("evaluate", "{out}", "--data", "nothing"), "expected a folder of images at nothing"),
        (("compress", "no_such_vit", "--weights", "w.pth", "--data", "x", "--keep", "0.5", "-o", "y"), "weights file"),
        (
            ("compress", "vit_tiny_patch16_224", "--data", "x", "--plan", "p", "-o", "y"),
            "expected one of --data, --measured and --plan, or none of them; got several",
        ),
        (("compress", "vit_tiny_patch16_224", "-o", "y"), "expected one of keep, gflops"),
        (("compress", "vit_tiny_patch16_224", "--max-drop", "1", "-o", "y"), "--max-drop: expected --val"),
        (
            ("compress", "vit_tiny_patch16_224", "--keep", "0.5", "--workers", "3", "-o", "y"),
            "--workers: no files are read without --data",
        ),
        (("compress", "{out}", "--plan", "{out}/plan.json", "-o", "y"), "compressed already"),
        (
            ("compress", "{out}", "--plan", "p", "--keep", "0.5", "-o", "y"),
            "--keep: --plan says what to keep already",
        ),
        (("info", "[/nothing]"), "written by pmvit at [/nothing]; there is none"),
        (
            ("compress", "{out}", "--measured", "s", "--loss", "entropy", "--keep", "0.5", "-o", "y"),
            "--loss: nothing is measured beside --measured or --plan",
        ),
        (
            (
                "compress",
                "{out}",
                "--data",
                "x",
                "--method",
                "measured",
                "--loss",
                "entropy",
                "--keep",
                "0.5",
                "-o",
                "y",
            ),
            "loss: expected with the method scored alone",
        ),
        (
            ("compress", "{out}", "--data", "x", "--keep", "0.5", "-o", "{out}/plan.json"),
            "expected a folder, a new name",
        ),
        (("compress", "{out}", "--plan", "p", "--batch-size", "3", "-o", "y"), "--batch-size: nothing is measured"),
        (
            ("compress", "{out}", "--method", "tome", "--learn", "dense", "-o", "y"),
            "--learn: for Prune and Merge",
        ),
        (("info", "{out}", "--draw", "--json"), "--draw: expected for a fixed plan, and without --json"),
        (("benchmark", "{out}", "--overhead", "--runtime", "eager"), "--runtime: not beside --overhead"),
        (("calibrate", "{out}", "--data", "x", "--biases-only", "--lr", "1", "-o", "y"), "--lr: expected without"),
        (("plan", "{out}/config.json", "--keep", "0.5", "-o", "y"), "is it another file"),
        (
            ("compress", "{out}", "--method", "tome", "--data", "x", "-o", "y"),
            "needs no images, measurements or plan",
        ),
        (("compress", "{out}", "--plan", "p", "--r", "3", "-o", "y"), "--r: for --method tome and the like alone"),
    ],
)
def test_mistakes_get_one_line(compressed: Path, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    filled = [argument.format(out=compressed) for argument in arguments]
    result = pmvit_here(*filled, cwd=tmp_path)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "y").exists()


def listen_to_interrupts() -> None:
    """A test run in the background ignores SIGINT and would hand that on to the command."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="module")
def few(images: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Scores]:
    """A third of the images, and what scoring them one by one gives if nothing comes between."""
    folder = tmp_path_factory.mktemp("few")
    for path in sorted(images.rglob("*.png"))[::3]:
        (folder / path.parent.name).mkdir(exist_ok=True)
        (folder / path.parent.name / path.name).symlink_to(path)
    model = demo_model()
    loader = open_loader(model, folder, batch_size=1, workers=0, shuffle=True)
    return folder, pmvit.measure(model, loader, method="scored", progress=False)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_interrupted_compression_goes_on(few: Any, tmp_path: Path, sent: signal.Signals, code: int) -> None:
    images, unbroken = few
    output = tmp_path / "out"
    command = ["compress", "vit_tiny_patch16_224", "--weights", WEIGHTS, *MODEL_ARGUMENTS, "--data", images]
    command += ["--method", "scored", "--keep", 0.6, "--batch-size", 1, "--workers", 0, "-o", output]
    often = "import pmvit.measuring.score_run as r, pmvit.cli; r.SECONDS_BETWEEN_CHECKPOINTS = 0; pmvit.cli.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", often, *map(str, command)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listen_to_interrupts,
    )
    deadline = time.monotonic() + 120
    while not (output / "scores.json.partial").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(sent)
    stopped = process.communicate(timeout=60)[1]
    assert process.returncode == code, stopped
    if sent == signal.SIGINT:
        assert "the same command goes on from the last batch" in stopped
    done = Scores.load(output / "scores.json.partial", "pmvit-partial-scores").iterations
    assert 0 < done < unbroken.iterations
    result = pmvit_here(*command)
    assert result.returncode == 0, result.stderr
    assert not (output / "scores.json.partial").exists()
    resumed = Scores.load(output / "scores.json")
    assert resumed.iterations == unbroken.iterations == 40
    assert torch.equal(resumed.values, unbroken.values)


@pytest.mark.data
def test_the_commands_of_the_readme_on_real_data(data: Path, tmp_path: Path) -> None:
    few = tmp_path / "images"
    for label in range(0, 1000, 50):
        (few / f"{label:03}").mkdir(parents=True)
        (few / f"{label:03}" / "0.jpg").symlink_to((data / f"imagenet/val/{label:03}/0.jpg").resolve())
    weights = data / "weights" / "vit_tiny_patch16_224.safetensors"
    arguments = ("vit_tiny_patch16_224", "--weights", weights, "--data", few, "--gflops", 0.86, "-o", tmp_path / "out")
    assert pmvit_here("compress", *arguments).returncode == 0
    numbers = json.loads(pmvit_here("evaluate", tmp_path / "out", "--data", few, "--json").stdout)
    assert numbers["images"] == 20
    assert numbers["agreement"] >= 0.6
    original = create_model("vit_tiny_patch16_224", weights)
    assert pmvit.flops(pmvit.load(tmp_path / "out")).macs < 0.75 * pmvit.flops(original).macs
