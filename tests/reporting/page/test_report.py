"""What a report says, and where it has it from."""

import copy
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import pmvit
from pmvit.cli import app
from pmvit.data.demo import CLASSES, demo_model
from pmvit.errors import PmvitError
from pmvit.numbers.tables import format_number
from pmvit.planning import Plan
from pmvit.reporting.class_names import class_names
from pmvit.reporting.page import measurements
from pmvit.reporting.page.sections import speed_table
from pmvit.reporting.pictures.charts import Series, line_chart
from pmvit.saving.commands import read_commands, record_commands, running_command
from pmvit.training.metrics import curves
from tests.helpers import QUIET, Batches, compressed, pmvit_here, small_plan, small_vit, tome
from tests.reporting.pages import save_demo
from tests.runtime.split_plans import COUNTS, split_plan
from tests.swins import small_swin


def section(page: str, name: str) -> str:
    found = re.search(rf'<section id="{name}".*?</section>', page, flags=re.DOTALL)
    assert found is not None
    return found.group()


def test_a_report_with_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_demo(tmp_path / "out")
    lines: list[dict[str, Any]] = [
        {"step": step, "loss": 1 / step, "ce": 0.5 / step, "lr": 1e-4} for step in range(1, 30)
    ]
    lines.append({"kind": "epoch", "step": 29, "epoch": 1, "top1": 0.8})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [
        {"name": name, "method": name, "gflops": cost, "evaluation": {"top1": top1}, "speeds": []}
        for name, cost, top1 in (("original", 0.28, 0.9), ("prune-merge", 0.17, 0.88), ("<b>tome", 0.17, 0.85))
    ]
    (folder / "comparison.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(measurements, "ROUNDS", 2)
    output = pmvit.report(folder, folder / "report.html", data="demo", limit=40, progress=False)
    page = output.read_text(encoding="utf-8")
    assert len(page) < 1_000_000
    assert not re.search(r"https?:", page)
    assert re.search(r"script-src 'sha256-[^']+'", page)
    stored = json.loads((folder / "report.json").read_text())
    top1 = next(one for one in stored["evaluation"]["measures"] if one["name"] == "top1")
    assert f"{100 * top1['compressed'][0]:.1f} %" in section(page, "summary")
    assert f"{100 * top1['compressed'][1]:.1f} – {100 * top1['compressed'][2]:.1f}" in section(page, "accuracy")
    last = stored["speed"]["rows"][-1]
    ratio = last["speedup"]
    if last["memory"] is not None:  # Linux says
        assert f"<td>{format_number(last['memory'], ',.0f')} MB</td>" in section(page, "speed")
    losses = stored["evaluation"]["classes"]
    assert sum(one["images"] for one in losses) == 40
    assert losses[0]["name"] in section(page, "accuracy")
    assert section(page, "accuracy").count("<img") == len(stored["apart"]) > 0
    assert f"<div>{stored['apart'][0]['lines'][1]}</div>" in section(page, "accuracy")
    assert f"{ratio[1]:.2f} – {ratio[2]:.2f}" in section(page, "speed")
    plan = Plan.load(folder / "plan.json")
    for index, layer in plan.layers.items():
        cells = "".join(f"<td>{count}</td>" for count in (layer.num_kept, layer.num_merged, layer.num_pruned))
        assert f'<th scope="row">{index}</th>' in section(page, "budget")
        assert cells in section(page, "budget")
    assert section(page, "learning").count("<svg") == 3
    assert section(page, "methods").count("<title>") == 3
    assert "&lt;b&gt;tome" in section(page, "methods")
    assert "<b>tome" not in page
    assert "made from Python" in section(page, "reproduce")

    def measure_again(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(measurements, "evaluate_pair", measure_again)
    same = pmvit.report(folder, folder / "report.html", data="demo", limit=40, progress=False)
    assert same.read_text(encoding="utf-8") == page
    with pytest.raises(AssertionError, match="measured again"):
        pmvit.report(folder, folder / "report.html", data="demo", limit=20, progress=False)
    (tmp_path / "names.txt").write_text("".join(f"thing {number}\n" for number in range(10)))
    with pytest.raises(AssertionError, match="measured again"):
        pmvit.report(
            folder, folder / "report.html", data="demo", limit=40, names=tmp_path / "names.txt", progress=False
        )


def test_what_was_not_measured_says_which_command_measures_it(tmp_path: Path) -> None:
    """A Swin without images: grids differ from stage to stage, nothing is measured."""
    model = small_swin()
    pmvit.save(pmvit.compress(model, small_plan(model)), tmp_path / "out")
    page = pmvit.report(tmp_path / "out", tmp_path / "report.html", progress=False).read_text(encoding="utf-8")
    assert "--data IMAGES measures accuracy" in section(page, "accuracy")
    assert "pmvit benchmark" in section(page, "speed")
    assert "pmvit finetune" in section(page, "learning")
    assert "pmvit compare" in section(page, "methods")
    found = re.search(r'id="viewer-data">(.*?)</script>', page)
    assert found is not None
    blocks = json.loads(found.group(1))["blocks"]
    plan = Plan.load(tmp_path / "out" / "plan.json")
    assert [tuple(block["grid"]) for block in blocks] == list(plan.grids)
    assert len(set(plan.grids)) > 1
    assert not (tmp_path / "report.json").exists()


def test_other_methods_have_no_blocks_to_show_and_files_are_checked(tmp_path: Path) -> None:
    pmvit.save(tome(demo_model(), 8), tmp_path / "out")
    output = tmp_path / "report.html"
    page = pmvit.report(tmp_path / "out", output, progress=False).read_text(encoding="utf-8")
    assert "ToMe chooses its tokens anew for every image" in section(page, "blocks")
    assert 'id="viewer-data"' not in page
    evaluation = tmp_path / "evaluation.json"
    evaluation.write_text(json.dumps({"images": 100, "broken": 0, "top1": 0.8, "reference_top1": 0.9}))
    page = pmvit.report(tmp_path / "out", output, evaluation=evaluation).read_text(encoding="utf-8")
    assert "71.1 – 86.7" in section(page, "accuracy")  # Wilson's interval of 80 of 100
    assert "−10.0 points" in section(page, "accuracy")
    for option, words in (("evaluation", "evaluate --json"), ("comparison", "with rows"), ("benchmark", "with rows")):
        evaluation.write_text("{}")
        files: dict[str, Any] = {option: evaluation}
        with pytest.raises(PmvitError, match=words):
            pmvit.report(tmp_path / "out", output, **files)
    with pytest.raises(PmvitError, match="got the folder"):
        pmvit.report(tmp_path / "out", tmp_path)
    pmvit.save(demo_model(), tmp_path / "plain")
    with pytest.raises(PmvitError, match="is not compressed"):
        pmvit.report(tmp_path / "plain", output)


def test_tokens_of_mlps_are_those_of_the_command_line(tmp_path: Path) -> None:
    model = small_vit(depth=5)
    plan = split_plan()
    pmvit.save(pmvit.compress(model, plan), tmp_path / "out")
    page = pmvit.report(tmp_path / "out", tmp_path / "report.html", progress=False).read_text(encoding="utf-8")
    found = re.findall(r'<tr><th scope="row">(\d+)</th>.*?</svg></td>(.*?)</tr>', section(page, "budget"))
    shown = [[number, *re.findall(r"<td>(.*?)</td>", cells)] for number, cells in found]
    printed = [line.split() for line in pmvit_here("info", tmp_path / "out").stdout.splitlines() if "%" in line][:5]
    assert [[cell.replace(" %", "%") for cell in row] for row in shown] == printed
    assert [int(row[2]) for row in shown] == [mlp for _, mlp in COUNTS]
    assert '<th scope="col">in the MLP</th>' in section(page, "budget")


def test_a_calibrated_model_is_not_called_fine_tuned(tmp_path: Path, small_batches: Batches) -> None:
    small = compressed()
    images = [images for images, _ in small_batches]
    for distill, word in ((False, "biases"), (True, "distilled")):
        tuned = pmvit.calibrate(
            copy.deepcopy(small), images, output=tmp_path / word, distill=distill, epochs=1, progress=False, workers=0
        )
        assert tuned.steps == (3 if distill else 0)
        page = pmvit.report(tmp_path / word, tmp_path / "report.html", progress=False).read_text(encoding="utf-8")
        assert "Compressed by Prune and Merge and calibrated:" in page
        assert "and fine-tuned" not in page
        assert ("Calibration: settings" in page) == distill
        assert ("It is calibrated, and there is no record of how" in section(page, "learning")) != distill
        card = (tmp_path / word / "README.md").read_text(encoding="utf-8")
        assert ", compressed and calibrated" in card
        assert '"calibrate"' in card
        assert '"finetune"' not in card
    both = pmvit.load(tmp_path / "distilled")
    pmvit.finetune(both, train=small_batches, output=tmp_path / "both", epochs=1, **QUIET)
    page = pmvit.report(tmp_path / "both", tmp_path / "report.html", progress=False).read_text(encoding="utf-8")
    assert "Compressed by Prune and Merge and calibrated and fine-tuned:" in page


def test_what_a_model_is_compared_with_is_said(tmp_path: Path) -> None:
    model = demo_model()
    small: Any = pmvit.compress(model, small_plan(model))
    with torch.no_grad():
        small.head.bias.add_(1)
    pmvit.save(small, tmp_path / "tuned")
    said = {
        None: "the same weights uncompressed</dd><dt></dt><dd>The original is not at hand: --original names it.",
        model: "the original</dd></dl>",
        pmvit.decompress(small): "another model</dd></dl>",
    }
    for original, words in said.items():
        page = pmvit.report(tmp_path / "tuned", tmp_path / "report.html", original=original, progress=False)
        assert f"<dt>Compared with</dt><dd>{words}" in section(page.read_text(encoding="utf-8"), "summary")
    document = {"images": 10, "top1": 0.5, "reference_top1": 0.6, "agreement": 0.7, "reference": "uncompressed"}
    (tmp_path / "judged.json").write_text(json.dumps(document), encoding="utf-8")
    given: dict[str, Any] = {
        "original": model,
        "evaluation": tmp_path / "judged.json",
        "progress": False,
    }  # the file knows better
    page = pmvit.report(tmp_path / "tuned", tmp_path / "report.html", **given)
    shown = page.read_text(encoding="utf-8")
    assert "agreement with the same weights uncompressed" in shown
    assert "agreement with the original" not in shown


def test_class_names_are_recorded_and_not_guessed(tmp_path: Path) -> None:
    """Models of the demo's shape, or with ImageNet's number of classes, are not taken for them."""
    demo = demo_model()
    pmvit.save(pmvit.compress(demo, small_plan(demo)), tmp_path / "demo")
    assert class_names(pmvit.load(tmp_path / "demo")) == CLASSES
    digits: Any = demo_model()
    del digits.pretrained_cfg["label_names"]
    pmvit.save(digits, tmp_path / "digits.safetensors")
    numbers = tuple(f"class {number}" for number in range(10))
    assert class_names(pmvit.load(tmp_path / "digits.safetensors")) == numbers
    for number in range(10):
        (tmp_path / "images" / f"digit-{number}").mkdir(parents=True)
        Image.new("L", (28, 28)).save(tmp_path / "images" / f"digit-{number}" / "a.png")
    assert class_names(digits, data=tmp_path / "images")[3] == "digit-3"
    assert class_names(digits, data="demo") == CLASSES
    imagenet: Any = small_vit(num_classes=1000)
    assert class_names(imagenet)[:2] == ("tench, Tinca tinca", "goldfish, Carassius auratus")
    imagenet.pretrained_cfg["tag"] = "my_own"
    assert class_names(imagenet)[0] == "class 0"


def test_commands_are_remembered_with_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pmvit", "compress", "vit", "--data", "my images"])
    with running_command(after=Path("vit")):
        record_commands(tmp_path / "out")
    monkeypatch.setattr("sys.argv", ["pmvit", "finetune", "out"])
    with running_command(after=tmp_path / "out"):
        record_commands(tmp_path / "tuned")
    monkeypatch.setattr("sys.argv", ["pmvit", "finetune", "--resume", "tuned"])
    with running_command(after=tmp_path / "tuned"):
        for _ in range(3):  # a run saves more than once
            record_commands(tmp_path / "tuned")
    commands = [one["command"] for one in read_commands(tmp_path / "tuned")]
    assert commands == ["pmvit compress vit --data 'my images'", "pmvit finetune out", "pmvit finetune --resume tuned"]
    record_commands(tmp_path / "tuned")
    assert read_commands(tmp_path / "tuned") == []  # made from Python now
    (tmp_path / "out" / "commands.json").write_text("[]")
    with pytest.raises(PmvitError, match="commands"):
        read_commands(tmp_path / "out")


def test_the_command_says_where_the_report_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_demo(tmp_path / "out")
    arguments = ["report", str(folder), "--original", str(folder)]
    monkeypatch.setattr("sys.argv", ["pmvit", *arguments])
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "report.html (0." in result.output.replace("\n", "")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert f"pmvit report {folder} --original" in section(page, "reproduce")


def test_a_chart_obeys_the_page() -> None:
    """No styles, which the page's security policy forbids; its colours, escaped names, round marks on the axes."""
    points = [(1.0, 0.13), (2.0, 0.88)]
    chart = line_chart("loss & co", [Series("a<b", points, ["first <i>", "second"], 3)], "step $x$", "loss", zero=True)
    svg = str(chart.svg)
    assert "style" not in svg
    assert "http" not in svg
    drawn = ElementTree.fromstring(svg)  # noqa: S314  # our own
    assert drawn.get("aria-label") == "loss & co: loss over step $x$, a<b"
    texts = [element.text for element in drawn.iter("text")]
    assert [text for text in texts if text in ("0.0", "0.2", "0.4", "0.6", "0.8")] == [
        "0.0",
        "0.2",
        "0.4",
        "0.6",
        "0.8",
    ]
    assert "step $x$" in texts
    assert [element.text for element in drawn.iter("title")] == ["first <i>", "second"]
    assert {element.get("stroke") for element in drawn.iter("path")} <= {
        None,
        "var(--c3)",
        "var(--line)",
        "var(--paper)",
    }
    assert chart.legend == [("a<b", "c3")]
    alone = line_chart("one", [Series("a", [(3.0, 3.0)], ["it"], None)], "x", "y")
    assert str(alone.svg).count("<title>") == 1


def test_speeds_of_older_benchmarks_are_read() -> None:
    """Version 0.1 called the variants contenders."""
    measured = {"runtime": "eager", "batch": 1, "throughput": 10.0, "p50": 0.1}
    rows = [
        {**measured, "contender": name, "speedup": [ratio] * 3} for name, ratio in (("original", 1.0), ("bound", 2.0))
    ]
    table = speed_table({"rows": rows, "environment": {}})
    assert [row[0].text for row in table.rows] == ["original", "equal-token bound"]


def test_learning_curves_by_hand() -> None:
    """Steps as means over runs of neighbours, epochs one by one, and nothing of what was not measured."""
    lines: list[dict[str, Any]] = [{"step": step, "loss": step, "kl": None, "lr": 1e-4} for step in range(1, 201)]
    lines += [{"kind": "epoch", "step": epoch, "epoch": epoch, "top1": epoch / 200} for epoch in range(1, 151)]
    loss, validation, rate = curves(lines)
    assert list(loss.lines) == ["loss"]
    assert loss.lines["loss"] == [(2 * number + 1.5, 2 * number + 1.5) for number in range(100)]
    assert validation.y == "top-1 (%)"
    assert validation.lines["top-1 accuracy"] == [(epoch, 100 * (epoch / 200)) for epoch in range(1, 151)]
    assert rate.lines == {"weights": [(x, 1.0) for x, _ in loss.lines["loss"]]}
    assert curves(lines[:200])[1].lines == {}
