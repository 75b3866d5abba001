"""Models whose plan adapts to the image: pictures and pages show what each image chose, tables how many merge."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from torch import nn

import pmvit
from pmvit.compression import plan_of_image
from pmvit.config import MetricConfig
from pmvit.data.demo import demo_images, demo_loader, demo_model
from pmvit.hosts import host_of
from pmvit.hosts.adaptive import spares_last_mlp
from pmvit.measuring import TokenMetric
from pmvit.measuring.flops import model_cost
from pmvit.planning.adaptive import AdaptivePlan
from pmvit.reporting.blocks import blocks_of, describe_blocks
from pmvit.reporting.page import measurements
from pmvit.reporting.saved_model import SavedModel
from pmvit.reporting.serve.server import Server
from pmvit.reporting.serve.trial import Trial
from pmvit.wrapping import fingerprint
from tests.helpers import compressed, pmvit_here
from tests.reporting.pages import Watched, browser, demo_folder

MERGES = (0, 60, 0, 50, 20, 0)
TOKENS = (196, 136, 136, 86, 66, 66)


def adaptive(model: nn.Module) -> nn.Module:
    """The demo's model with an adaptive plan by a random metric."""
    layout, config = host_of(model).layout, MetricConfig(rank=16)
    projections = torch.randn(len(MERGES), 128, 16, generator=torch.Generator().manual_seed(0))
    metric = TokenMetric(
        projections=projections,
        grid=layout.grid,
        num_prefix=layout.num_prefix,
        cost=model_cost(model),
        spares_last_mlp=spares_last_mlp(host_of(model)),
        config=config,
        images=1,
        model=fingerprint(model),
        data="",
    )
    return pmvit.compress(model, AdaptivePlan(MERGES, metric, {"plan": {"keep": 0.6}}))


@pytest.fixture(scope="module")
def small() -> nn.Module:
    return adaptive(demo_model())


@pytest.fixture(scope="module")
def folder(small: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "out"
    pmvit.save(small, path)
    return path


@pytest.fixture(scope="module")
def page(folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurements, "ROUNDS", 2)
        return pmvit.report(folder, folder / "report.html", data="demo", limit=40, memory=False, progress=False)


def section(page: str, name: str) -> str:
    found = re.search(rf'<section id="{name}".*?</section>', page, flags=re.DOTALL)
    assert found is not None
    return found.group()


def test_every_image_has_blocks_of_its_own(small: nn.Module) -> None:
    images = demo_loader("test", 2)[0][0]
    described = [json.loads(json.dumps(describe_blocks(small, image=image))) for image in images]
    for image, blocks in zip(images, described, strict=True):
        plan = plan_of_image(small, image)
        assert plan is not None
        assert tuple(block["kept"] for block in blocks) == TOKENS
        assert [block["groups"] for block in blocks] == [list(plan.layers[index].groups) for index in range(6)]
        assert [block["compressed"] for block in blocks] == [False, True, True, True, True, True]
    first, second = ([block["groups"] for block in blocks] for blocks in described)
    assert first[0] == second[0]
    assert all(one != other for one, other in zip(first[1:], second[1:], strict=True))
    with pytest.raises(pmvit.PmvitError, match="expected an image to show the blocks of"):
        blocks_of(small)
    fixed = compressed()
    assert blocks_of(fixed, torch.randn(3, 96, 96)) == blocks_of(fixed)


def test_pictures_and_maps_are_drawn_for_each_image(small: nn.Module, tmp_path: Path) -> None:
    images = demo_folder(tmp_path / "images", 2)
    drawn = pmvit.visualize(small, images, tmp_path / "out", formats="svg", blocks=(0, 1, -1), progress=False)
    assert drawn.maps == []
    assert [path.name.split("-")[-1] for paths in drawn.images.values() for path in paths] == [
        "blocks.svg",
        "cam.svg",
        "maps.svg",
    ] * 2
    first, second = ([path.read_text() for path in paths] for paths in drawn.images.values())
    assert "136 of 196 kept" in first[0]
    assert "60 merged, 60 of them here" in first[0]
    assert "130 merged, 0 of them here" in first[0]
    maps = [re.findall(r"base64,\s*([^\"]+)", text) for text in (first[2], second[2])]
    assert maps[0]
    assert maps[0] != maps[1]
    with pytest.raises(pmvit.PmvitError, match="only maps of a fixed plan"):
        pmvit.visualize(small, None, tmp_path / "maps", what=("maps",), progress=False)


def test_the_report_has_the_groups_of_each_of_its_images(page: Path, folder: Path, small: nn.Module) -> None:
    text = page.read_text(encoding="utf-8")
    found = re.search(r'id="viewer-data">(.*?)</script>', text)
    assert found is not None
    viewer = json.loads(found.group(1))
    assert (viewer["blocks"], viewer["reconstruct"]) == ([], "residual")
    pictures = viewer["images"]
    assert len(pictures) == 12
    for picture, image in zip(pictures, demo_loader("test", 12)[0][0], strict=True):
        plan = plan_of_image(small, image)
        assert plan is not None
        assert [block["groups"] for block in picture["blocks"]] == [list(plan.layers[i].groups) for i in range(6)]
    for index, (r, tokens) in enumerate(zip(MERGES, TOKENS, strict=True)):
        row = f"<td>{r or '–'}</td><td>{tokens}</td><td>{100 * tokens / 196:.0f} %</td>"
        assert re.search(rf'<th scope="row">{index}</th>.*{row}', section(text, "budget"))
    assert "Compressed by adaptive Prune and Merge" in text
    assert "optimised for inference" in section(text, "speed")
    without = pmvit.report(folder, folder / "without.html", progress=False).read_text(encoding="utf-8")
    assert "Every image chooses which tokens merge" in section(without, "blocks")
    assert "--data IMAGES" in section(without, "blocks")
    assert 'id="viewer-data"' not in without
    assert "merge before" in section(without, "budget")


def test_the_viewer_changes_blocks_with_the_picture(page: Path, small: nn.Module) -> None:
    images = demo_loader("test", 4)[0][0]
    first, other = (describe_blocks(small, image=images[number])[5]["states"] for number in (0, 3))
    patch = next(place for place, pair in enumerate(zip(first, other, strict=True)) if pair == ("merged", "kept"))
    row, column = divmod(patch, 14)
    with browser() as chromium:
        watched = Watched(chromium, viewport={"width": 1280, "height": 900})
        watched.page.goto(page.as_uri())
        watched.page.locator("figcaption", has_text="test image 0").first.wait_for()
        watched.page.locator("#block-slider").focus()
        watched.page.keyboard.press("End")
        told, tokens = watched.page.locator(".told"), watched.page.locator(".tokens")
        assert "66 kept, 130 merged, 0 pruned" in tokens.inner_text()
        view = watched.page.locator(".block-view")
        width, height = (view.bounding_box()[side] for side in ("width", "height"))
        view.click(position={"x": (column + 0.5) / 14 * width, "y": (row + 0.5) / 14 * height})
        assert f"Patch row {row + 1}, column {column + 1}. In a group of" in told.inner_text()
        watched.page.locator(".thumbs button").nth(3).click()
        watched.page.locator("figcaption", has_text="test image 3").wait_for()
        assert watched.page.locator(".slider output").inner_text() == "5 / 5"
        assert f"Patch row {row + 1}, column {column + 1}. Kept" in told.inner_text()
        assert watched.complaints == []


def test_the_local_page_waits_for_an_image(folder: Path, tmp_path: Path) -> None:
    Image.fromarray(demo_images("test", 1)[0][0].numpy()).save(tmp_path / "boot.png")
    with browser() as chromium, Server(SavedModel(folder), 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        watched = Watched(chromium)
        watched.page.goto(server.address)
        assert not watched.page.locator(".viewer").is_visible()
        assert "drop one to see its choice" in watched.page.locator("#blocks").inner_text()
        watched.page.set_input_files("#file", tmp_path / "boot.png")
        watched.page.locator(".block-view").wait_for()
        watched.page.locator("#block-slider").focus()
        watched.page.keyboard.press("End")
        assert "66 kept, 130 merged, 0 pruned" in watched.page.locator(".tokens").inner_text()
        assert watched.complaints == []
        server.shutdown()
        thread.join()


def test_the_local_page_answers_with_the_groups_of_the_image(folder: Path, small: nn.Module) -> None:
    trial = Trial(SavedModel(folder))
    pictures, _ = demo_images("test", 2)
    answers = [trial.run(Image.fromarray(picture.numpy())) for picture in pictures]
    for answer, image in zip(answers, demo_loader("test", 2)[0][0], strict=True):
        plan = plan_of_image(small, image)
        assert plan is not None
        assert [tuple(block["groups"]) for block in answer["blocks"]] == [plan.layers[i].groups for i in range(6)]
        assert set(answer["seconds"]) == {"original", "compressed", "optimized"}
    assert answers[0]["blocks"] != answers[1]["blocks"]


def test_the_card_and_info_tell_how_many_merge(folder: Path) -> None:
    text = ModelCard.load(folder / "README.md").text
    for index, (r, tokens) in enumerate(zip(MERGES, TOKENS, strict=True)):
        assert f"| {index} | {r} | {tokens} |" in text
    assert "every image chooses" in text
    assert '"keep": 0.6' in text
    told: Any = json.loads(pmvit_here("info", folder, "--json").stdout)
    assert [(block["merged"], block["tokens"]) for block in told["blocks"].values()] == list(
        zip(MERGES, TOKENS, strict=True)
    )
    assert "merge before" in pmvit_here("info", folder).stdout
