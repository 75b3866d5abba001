"""What the documentation and the examples show runs."""

import ast
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from typer.testing import CliRunner

import pmvit
from pmvit.cli import app
from pmvit.data.demo import demo_loader, demo_model
from pmvit.hosts import host as hosts
from pmvit.methods import METHODS
from scripts import drawings, leaderboard, readme, results
from tests.hub_server import environment, running_hub

ROOT = Path(__file__).parents[1]


def test_the_host_of_the_documentation_works(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/hosts.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    lines = code[code.index("@register") : code.index("model = MyViT()")].strip().splitlines()
    assert len(lines) <= 30
    before = list(hosts._hosts)
    try:
        exec(code, {})  # noqa: S102  # the very text that users are shown
    finally:
        hosts._hosts[:] = before
    whole, arrow, small, *shape = capsys.readouterr().out.split()
    assert arrow == "->"
    assert int(small) < int(whole)
    assert " ".join(shape) == "torch.Size([8, 5])"


def test_the_page_of_adaptive_plans_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    text = (ROOT / "docs/adaptive.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    shown = {
        'timm.create_model("deit_small_patch16_224", pretrained=True)': "demo_model()",
        "gflops=2.5": "gflops=0.15",
    }
    for before, after in shown.items():
        assert code.count(before) == 1
        code = code.replace(before, after)
    monkeypatch.chdir(tmp_path)
    loader = demo_loader("train", 8, 8)
    names: dict[str, Any] = {"demo_model": demo_model, "loader": loader, "image": loader[0][0][0]}
    exec(code, names)  # noqa: S102  # the text that users are shown, with a model that needs no network
    assert pmvit.flops(names["faster"]).gflops <= 0.15 < pmvit.flops(names["model"]).gflops
    assert names["exported"].images >= names["exported"].chose_otherwise >= 0


def test_the_method_of_the_documentation_is_one_like_any_other(tmp_path: Path) -> None:
    text = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    part = text[text.index("## Adding a method") :]
    defined, _ = re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL)
    model = demo_model()
    names: dict[str, Any] = {}
    try:
        exec(defined, names)  # noqa: S102  # the very text that users are shown
        made = pmvit.compress(model, names["Longest"].at(0.5, model))
        pmvit.save(made, tmp_path / "made")
        assert pmvit.flops(pmvit.load(tmp_path / "made")) == pmvit.flops(made)
    finally:
        METHODS.pop("longest", None)
    assert 0.65 < pmvit.flops(made).macs / pmvit.flops(model).macs < 0.8  # half the patches, in the last 3 of 6 blocks


def test_every_method_of_a_host_is_documented() -> None:
    text = (ROOT / "docs/hosts.md").read_text(encoding="utf-8")
    table = text[text.index("## All that a host may say") :]
    named = [name for cell in re.findall(r"^\| (`.*?`) \|", table, flags=re.MULTILINE) for name in cell.split(", ")]
    methods = [
        name for name, value in vars(hosts.Host).items() if callable(getattr(hosts.Host, name)) and name[0] != "_"
    ]
    assert sorted(name.strip("`") for name in named) == sorted(methods)
    assert len(methods) <= 18


def test_the_clip_example_runs_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    example = ROOT / "examples" / "clip_image_tower.py"
    monkeypatch.setattr("sys.argv", [str(example), "--random", "--images", "64", "-o", str(tmp_path / "small")])
    runpy.run_path(str(example), run_name="__main__")
    shown = capsys.readouterr().out
    assert re.findall("image tower: .*", shown)[0] in (ROOT / "docs/huggingface.md").read_text("utf-8")
    found = re.search(r"mean ([0-9.]+), lowest ([0-9.]+), (\d+) images", shown)
    assert found is not None
    mean, lowest, count = (float(number) for number in found.groups())
    assert 0.9 < mean < 1
    assert lowest <= mean
    assert count == 32
    assert type(pmvit.load(tmp_path / "small")).__name__ == "CLIPModel"


@pytest.mark.parametrize("page", ["huggingface", "swin"])
def test_pages_that_run_as_they_stand_show_what_they_print(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    ((code, shown),) = re.findall(r"^```python\n(.*?)^```\n\n^```text\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    exec(code, {})  # noqa: S102  # the very text that users are shown
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in shown.splitlines() if line not in (*printed, "...")] == []


def test_a_command_shows_the_same_output_on_every_page() -> None:
    outputs: dict[str, set[str]] = {}
    for path in (ROOT / "docs").glob("*.md"):
        for block in re.findall(r"^```console\n(.*?)^```", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE):
            command, _, output = block.partition("\n")
            outputs.setdefault(re.sub(r"--data \S+(@test|/test|\.tar'?)", "--data TEST", command), set()).add(output)
    assert [command for command, shown in outputs.items() if len(shown) > 1] == []
    assert len(outputs) < sum(path.read_text("utf-8").count("```console") for path in (ROOT / "docs").glob("*.md"))


def test_the_quick_start_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for numbers, which are the machine's; the benchmark, which takes long, is tried elsewhere."""
    pytest.importorskip("onnxruntime")
    text = (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    exec(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0], {})  # noqa: S102  # what users are shown
    for block in re.findall(r"^```console\n\$ pmvit (.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        command, _, shown = block.partition("\n")
        if not command.startswith("benchmark"):
            result = CliRunner().invoke(app, shlex.split(command))
            assert result.exit_code == 0, result.output
            assert words(result.stdout) == words(shown), command


def words(text: str) -> list[str]:
    """What a text says but for numbers, and lines whose length is one."""
    return re.sub(r"[━─┃╇│┼]+", " ", re.sub(r"[\d.█]+(?:e-\d+)?", "#", text)).split()


def test_the_hub_example_runs_with_a_hub_on_this_machine(tmp_path: Path) -> None:
    command = [sys.executable, "examples/hub_round_trip.py", "me/demo", "--private"]
    with running_hub() as hub:  # the client reads where the hub is when it is imported: in a process of its own
        own = {**os.environ, **environment(hub, tmp_path)}
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=own)
        assert result.returncode == 0, result.stderr
        assert hub.repos["me/demo"].private
        files = hub.repos["me/demo"].files("main") or {}
    assert f"pushed: {hub.url}/me/demo/commit/" in result.stdout
    assert "pmvit.load('hf-hub:me/demo')" in result.stdout
    assert "largest difference of a logit 0.0\n" in result.stdout
    card: Any = ModelCard(files["README.md"].decode())
    results = {each.metric_name: each for each in card.data.eval_results}
    found = re.search(r"top-1: \S+ -> ([0-9.]+)%", result.stdout)
    assert found is not None
    assert results["top-1 accuracy"].metric_value == pytest.approx(float(found[1]) / 100, abs=1e-3)
    assert results["top-1 accuracy"].dataset_name == "fashion_mnist"


def test_the_page_of_vision_language_models_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    code = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/vlm.md").read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code[0], names)  # noqa: S102  # the very text that users are shown
    assert capsys.readouterr().out.strip() == "torch.Size([1, 60])"
    assert type(pmvit.load(tmp_path / "llava-small")) is type(names["model"])


def test_the_example_of_vision_language_models_runs_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    words = ["vlm_tower.py", "--random", "--images", "64", "-o", str(tmp_path / "small")]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(ROOT / "examples/vlm_tower.py"), run_name="__main__")
    shown = (ROOT / "docs/vlm.md").read_text("utf-8")
    *told, _ = capsys.readouterr().out.splitlines()
    before, after = (float(number) for number in re.findall(r"[0-9.]+(?= -|\ GFLOPs)", told[0]))
    assert after < before
    assert all(re.sub(r"[0-9.]+", "N", line) in re.sub(r"[0-9.]+", "N", shown) for line in told)
    assert type(pmvit.load(tmp_path / "small")).__name__ == "LlavaForConditionalGeneration"


def test_the_video_example_runs_without_a_network(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "examples/video_classifier.py", "--random", "-o", str(tmp_path / "small")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "grid: 4 x 4 x 4 tokens (time x rows x columns)" in result.stdout
    found = re.search(r"([0-9.]+) -> ([0-9.]+) GFLOPs", result.stdout)
    assert found is not None
    before, after = map(float, found.groups())
    assert 0.5 < after / before < 0.8
    assert type(pmvit.load(tmp_path / "small")).__name__ == "VideoMAEForVideoClassification"


def test_the_page_of_images_of_any_size_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs/resolutions.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    shape = "embed_dim=48, depth=4, num_heads=2, num_classes=3, img_size=56, dynamic_img_size=True"
    shown = {
        "pretrained=True, img_size=224, dynamic_img_size=True": shape,
        "(224, 448)": "(56, 112)",
        "img_size=448, gflops=12": "img_size=112, flops_share=0.7",
    }
    for before, after in shown.items():
        assert code.count(before) == 1
        code = code.replace(before, after)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"loader": torch.randn(8, 3, 56, 56), "images": torch.randn(1, 3, 84, 28)}
    exec(code, names)  # noqa: S102  # the text that users are shown, with a model that needs no network
    assert pmvit.flops(names["wide"]).gflops > pmvit.flops(names["small"]).gflops
    assert names["larger"](torch.randn(1, 3, 112, 112)).shape == (1, 3)


def test_the_example_of_any_size_runs_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["any_resolution.py", "--random", "--images", "8", "--sizes", "64,96"])
    runpy.run_path(str(ROOT / "examples/any_resolution.py"), run_name="__main__")
    found = re.findall(r"^(\d+) x \1: ([0-9.]+) -> ([0-9.]+) GFLOPs", capsys.readouterr().out, re.MULTILINE)
    assert [size for size, _, _ in found] == ["64", "96"]
    assert all(0.5 < float(after) / float(before) < 0.9 for _, before, after in found)


def _error_messages() -> list[re.Pattern[str]]:
    """What `PmvitError` is raised with anywhere, as patterns: anything may stand for a value.

    `one_line` raises it with what failed, the reason in brackets, and advice.
    """
    patterns = []
    for path in (ROOT / "pmvit").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
            if not isinstance(node, ast.Call) or name not in ("PmvitError", "one_line"):
                continue
            messages = [texts.get(each.id, each) if isinstance(each, ast.Name) else each for each in node.args]
            words: list[str | None] = []
            for number, message in enumerate(messages):
                parts = message.values if isinstance(message, ast.JoinedStr) else [message]
                words += [str(part.value) if isinstance(part, ast.Constant) else None for part in parts]
                words += [" (", None, ")"] if name == "one_line" and number == 0 else []
            if sum(len(word or "") for word in words) > 20:  # a message that is all values would match any text
                text = "".join(".*" if word is None else re.escape(word) for word in words)
                patterns.append(re.compile(text.replace("\\\n", r"\s"), re.DOTALL))
    return patterns


def test_the_errors_of_the_documentation_are_those_of_the_code() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    shown = [message.strip() for message in re.findall(r"^`+([^\n]+?)`+$", text, flags=re.MULTILINE)]
    known = _error_messages()
    assert len(shown) >= 15
    assert [message for message in shown if not any(pattern.fullmatch(message) for pattern in known)] == []


def test_every_public_name_is_on_the_api_page() -> None:
    """And what is there is where the page says."""
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    found = re.findall(r"^::: (pmvit(?:\.\w+)*)\.(\w+)$", text, flags=re.MULTILINE)
    names = [name for _, name in found]
    assert len(names) == len(set(names))
    assert set(names) >= set(pmvit.__all__)
    for room, name in found:
        assert hasattr(import_module(room), name), f"{room}.{name}"
        assert name not in pmvit.__all__ or getattr(pmvit, name) is getattr(import_module(room), name)


def test_the_results_are_those_of_experiments_and_benchmarks() -> None:
    made = results.pages()
    for page, text in made.items():
        assert page.read_text(encoding="utf-8") == text, "run python -m scripts.results"
    lengths = {page.name: len(text) for page, text in made.items()}
    assert lengths["results.md"] < 16_000  # it is for who wants to know what he gets
    there = {path.name for path in results.PAGE.parent.glob("results*.md")}
    assert there | {"leaderboard.md"} == set(lengths)


def test_the_readme_quotes_what_was_measured_beside_tome() -> None:
    text = readme.PAGE.read_text(encoding="utf-8")
    assert text == readme.filled(text), "run python -m scripts.results"
    titles, rows = _table(text.partition(readme.START)[2].partition(readme.END)[0].strip().split("\n\n")[0])
    ours, theirs, whole = (titles.index(name) for name in ("ours", "ToMe", "original"))
    assert all(float(row[ours]) > 0 < float(row[whole]) for row in rows)
    assert sum(row[theirs] != "-" for row in rows) > 4
    named = set(re.findall(r"--(keep|gflops|flops-share)\b|\b(keep|gflops|flops_share)=", text))
    assert {word for pair in named for word in pair if word} == {"gflops"}  # in commands as in the tables


def test_the_page_of_results_has_tome_at_every_budget_and_speed() -> None:
    equal, quality, speed = readme.tables().strip().split("\n\n")
    assert equal.count("\n") > 4
    for text in (quality, speed):
        titles, rows = _table(text)
        ours, theirs = titles.index("ours"), titles.index("ToMe")
        counted = [[len(re.findall(r"\d+\.\d+", row[column])) for column in (ours, theirs)] for row in rows]
        assert all(mine == other > 0 for mine, other in counted)


def _table(text: str) -> tuple[list[str], list[list[str]]]:
    """Titles and cells."""
    titles, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.strip().splitlines())
    return titles, rows


def test_a_new_result_is_collected_with_its_command_commit_and_pictures(tmp_path: Path) -> None:
    for path in (path for pages in results.ORDER.values() for path in pages):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("# Old\n")
    page = "# New\n\n`python -m experiments.new` made this page at commit `0123abc`.\n\n## Part\n\n"
    (tmp_path / "experiments/new.md").write_text(page + "![drawn](new.png) [old](pets.md)\n")
    made = results.collect(tmp_path)
    assert "| [New](results_more.md#new) | `python -m experiments.new`, commit `0123abc` |" in made["index"]
    assert "\n### Part\n" in made["results_more.md"]
    link = "results_classification.md#pets"
    assert f"![drawn](../experiments/new.png) [old]({link})" in made["results_more.md"]
    assert '<a id="pets">' in made["results_classification.md"]
    (tmp_path / "experiments/pets.md").unlink()
    with pytest.raises(pmvit.PmvitError, match=r"expected a page at experiments/pets\.md"):
        results.collect(tmp_path)


def test_the_leaderboard_has_a_method_as_soon_as_it_has_a_row(tmp_path: Path) -> None:
    def compared(method: str, top1: float, kl: float, exports: bool) -> dict[str, Any]:
        found = {"top1": top1, "reference_top1": 0.7, "kl": kl}
        model = "deit_tiny_patch16_224"
        return {"model": model, "method": method, "wanted": 0.86, "evaluation": found, "exports": exports}

    def on_pets(method: str, gflops: float | None, correct: str, stage: str = "tuned", seed: int = 0) -> dict[str, Any]:
        key = {"method": method, "gflops": gflops, "stage": stage, "seed": seed}
        return {"key": key, "gflops": gflops or 1.25, "correct": correct, "agrees": correct, "kl": [0.25] * 4}

    pets = [on_pets("original", None, "1111"), on_pets("tome", 0.73, "1000", "compressed")]
    pets += [on_pets("tome", 0.73, "1100"), on_pets("tome", 0.73, "1111", seed=1)]
    rows = [compared("tome", 0.675, 0.05, False), compared("adaptive", 0.69, 0.02, True)]
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments/comparison.json").write_text(json.dumps(rows))
    assert "## Tuned" not in leaderboard.page(tmp_path)
    (tmp_path / "experiments/pets_methods.json").write_text(json.dumps(pets))
    found = [line for line in leaderboard.page(tmp_path).splitlines() if line.startswith("| ")]
    assert found[1:3] == [
        "| **adaptive plans**, ours | - / 1.0 / - | - / 0.020 / - | yes |",
        "| ToMe | - / 2.5 / - | - / 0.050 / - | no |",
    ]
    assert found[-2:] == [
        "| original | 1.25 | - | 100.0% | - | - | - |",
        "| ToMe | 0.73 | 25.0% | 75.0% | 75.0% | 0.250 | no |",
    ]


def test_the_drawings_are_those_of_the_script() -> None:
    for name, draw in drawings.DRAWINGS.items():
        assert (drawings.FOLDER / f"{name}.svg").read_text(encoding="utf-8") == draw(), "run python -m scripts.drawings"


def test_the_site_builds_strictly_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert {"index.html", "api.html", "results.html", "1_compress.html"} <= set(pages)
    for name, html in pages.items():
        fetched = re.findall(r'<(?:script|img|iframe)[^>]+src="(https?:[^"]+)|<link[^>]+href="(https?:[^"]+)', html)
        assert fetched == [], name
    assert 'id="pmvit.measuring.measure"' in pages["api.html"]


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run(path: Path) -> None:
    notebooks = pytest.importorskip("scripts.notebooks")
    stored = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for cell, before in zip(notebooks.run(path).cells, stored, strict=True):
        kinds = [[output["output_type"] for output in each.get("outputs", [])] for each in (cell, before)]
        assert kinds[0] == kinds[1], cell.source
        texts = [
            "".join("".join(output.get("text", "")) for output in each.get("outputs", [])) for each in (cell, before)
        ]
        assert words(texts[0]) == words(texts[1]), f"run python -m scripts.notebooks: {cell.source}"
