"""The report and the local page in a real browser: clicks, keys, dropped files, dark, light and small screens."""

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import pmvit
from pmvit.data.demo import demo_images
from pmvit.planning import Plan
from pmvit.reporting.page import measurements
from pmvit.reporting.saved_model import SavedModel
from pmvit.reporting.serve.server import Server
from tests.reporting.pages import HOSTILE, Watched, browser, demo_folder, save_demo

DROP = """([element, name, content]) => {
  const bytes = Uint8Array.from(atob(content), letter => letter.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name));
  element.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_demo(tmp_path_factory.mktemp("model") / "out")


@pytest.fixture(scope="module")
def report(chromium: Any, folder: Path) -> str:
    images = demo_folder(folder.parent / "images")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurements, "ROUNDS", 2)
        written = pmvit.report(folder, folder / "report.html", data=images, workers=0, memory=False, progress=False)
    return written.as_uri()


def test_the_viewer_by_mouse_and_keyboard(chromium: Any, report: str, folder: Path) -> None:
    watched = Watched(chromium, viewport={"width": 1280, "height": 900})
    page = watched.page
    page.goto(report)
    plan = Plan.load(folder / "plan.json")
    told, view, slider = page.locator(".told"), page.locator(".block-view"), page.locator("#block-slider")
    slider.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator(".slider output").inner_text() == "2 / 5"
    layer = plan.layers[2]
    assert (
        f"{layer.num_kept} kept, {layer.num_merged} merged, {layer.num_pruned} pruned"
        in page.locator(".tokens").inner_text()
    )
    members = next(some for some in layer.members() if len(some) > 2)
    centre = layer.centres[layer.groups[members[0]]]
    merged = next(token for token in members if token != centre)
    row, column = divmod(merged, 14)
    view.scroll_into_view_if_needed()
    box = view.bounding_box()
    page.mouse.move(box["x"] + (column + 0.5) / 14 * box["width"], box["y"] + (row + 0.5) / 14 * box["height"])
    assert f"Patch row {row + 1}, column {column + 1}." in told.inner_text()
    place = f"row {centre // 14 + 1}, column {centre % 14 + 1}"
    expected = f"In a group of {len(members)}, merged in block 2 into the kept patch {place}."
    assert expected in told.inner_text()
    assert "Put back from the group's update" in told.inner_text()
    assert page.locator(".trace li").count() == 6
    pruned = layer.groups.index(-1)
    view.focus()
    page.keyboard.press("Escape")
    assert "Choose a patch" in told.inner_text()
    page.keyboard.press("ArrowRight")  # the first patch, then on to the pruned one
    for _ in range(pruned // 14):
        page.keyboard.press("ArrowDown")
    for _ in range(pruned % 14):
        page.keyboard.press("ArrowRight")
    assert "Pruned: block 2 does not see it" in told.inner_text()
    assert page.locator(".trace [aria-current]").get_attribute("class") == "pruned"
    page.keyboard.press("PageDown")
    assert page.locator(".slider output").inner_text() == "3 / 5"
    before = _pixels(page)
    page.locator(".thumbs button").nth(3).click()
    page.locator('.thumbs button:nth-child(4)[aria-pressed="true"]').wait_for()
    page.locator("figcaption", has_text="labelled").first.wait_for()
    assert _pixels(page) != before
    page.get_by_label("Colour the groups").check()
    assert watched.complaints == []
    assert all(url.startswith(("file:", "data:")) for url in watched.requests)


def _pixels(page: Any) -> str:
    return str(page.evaluate("document.querySelector('.block-view').toDataURL()"))


def test_names_stay_text(chromium: Any, report: str) -> None:
    watched = Watched(chromium)
    watched.page.goto(report)
    watched.page.locator(f'.thumbs button[aria-label="9 {HOSTILE}"]').first.click()
    watched.page.locator("figcaption", has_text="labelled 9 <img").wait_for()
    assert watched.page.evaluate("window.hacked") is None
    assert watched.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_in_both_themes(chromium: Any, report: str, scheme: str) -> None:
    phone = {"viewport": {"width": 375, "height": 700}, "has_touch": True, "is_mobile": True}
    watched = Watched(chromium, color_scheme=scheme, **phone)
    page = watched.page
    page.goto(report)
    assert watched.overflow() <= 0
    page.locator(".block-view").tap(position={"x": 30, "y": 5})
    assert "Patch row 1, column 2." in page.locator(".told").inner_text()
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    for selector in ("h1", ".lead", ".note", "thead th", ".cards .detail", "nav a", ".missing"):
        assert watched.contrast(selector) >= 4.5, selector
    page.get_by_role("button", name="Switch to").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != colour
    assert watched.complaints == []


@pytest.fixture(scope="module")
def address(chromium: Any, folder: Path) -> Iterator[str]:
    names = folder.parent / "names.txt"
    names.write_text("\n".join(["</script><script>window.hacked=1</script>"] * 10))
    server = Server(SavedModel(folder), 0, names)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.address
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_image_dropped_on_the_local_page(chromium: Any, address: str, tmp_path: Path) -> None:
    Image.fromarray(demo_images("test", 1)[0][0].numpy()).resize((90, 60)).save(tmp_path / "boot.png")
    content = (tmp_path / "boot.png").read_bytes()
    watched = Watched(chromium, viewport={"width": 375, "height": 700})
    page = watched.page
    page.goto(address)
    drop = page.locator("#drop")
    drop.evaluate(
        f"(element, given) => ({DROP})([element, ...given])", ["boot.png", base64.b64encode(content).decode()]
    )
    page.locator("#answers").wait_for(state="visible")
    assert page.locator("#columns h3").all_inner_texts() == ["Original", "Compressed"]
    assert page.locator("#columns li").count() == 10
    assert "<script>" in page.locator("#columns li").first.inner_text()
    assert " ms" in page.locator(".time").first.inner_text()
    assert page.locator(".thumbs button").count() == 1
    page.locator("#block-slider").fill("4")
    assert page.locator(".slider output").inner_text() == "4 / 5"
    assert page.evaluate("window.hacked") is None
    assert watched.overflow() <= 0
    assert watched.complaints == []
    assert all(url.startswith((address, "data:")) for url in watched.requests)

    page.locator("#file").set_input_files({"name": "cut.png", "mimeType": "image/png", "buffer": content[:200]})
    page.locator("#alert").wait_for(state="visible")
    assert page.locator("#alert").inner_text() == "The image is broken: its file ends too early or is damaged."
    assert page.locator("#answers").is_hidden()  # those of the image before
    page.locator("#file").set_input_files({"name": "boot.png", "mimeType": "image/png", "buffer": content})
    page.locator(".thumbs button").nth(1).wait_for()
    assert page.locator("#alert").is_hidden()
    assert page.locator("#answers").is_visible()
