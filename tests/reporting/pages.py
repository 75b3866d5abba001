"""What the tests of pages start from: a compressed demo model with images, and a browser."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import pmvit
from pmvit.data.demo import CLASSES, demo_images, demo_model
from tests.helpers import small_plan

HOSTILE = "<img src=x onerror=window.hacked=1>"  # a name that must stay text
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-extensions")


def save_demo(folder: Path) -> Path:
    """The demo's model, compressed by a plan of random scores."""
    model = demo_model()
    pmvit.save(pmvit.compress(model, small_plan(model)), folder)
    return folder


def demo_folder(folder: Path, count: int = 40) -> Path:
    """Images of the demo in class folders, one of which has a hostile name."""
    pictures, labels = demo_images("test", count)
    names = [f"{number} {name}" for number, name in enumerate(CLASSES[:-1])] + [f"9 {HOSTILE}"]
    for name in names:
        (folder / name).mkdir(parents=True)
    for number, (picture, label) in enumerate(zip(pictures, labels.tolist(), strict=True)):
        Image.fromarray(picture.numpy()).save(folder / names[label] / f"{number}.png")
    return folder


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium as the system has it; the test is skipped where there is none."""
    paths = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    found = next(filter(None, paths), None)
    if found is None:
        pytest.skip("no chromium to test pages in: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=list(ARGUMENTS))
        yield opened
        opened.close()


class Watched:
    """A page in a browser, with what it complained of and what it asked the network for."""

    def __init__(self, opened: Any, **options: Any) -> None:
        self.context = opened.new_context(**options)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))

    def contrast(self, selector: str) -> float:
        """Of the colour of a text to the page behind it, as WCAG has it."""
        return float(self.page.locator(selector).first.evaluate(CONTRAST))


CONTRAST = """element => {
  const luminance = text => {
    const [r, g, b] = text.match(/[0-9.]+/g).slice(0, 3).map(Number)
      .map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const pair = [getComputedStyle(element).color, getComputedStyle(document.body).backgroundColor].map(luminance);
  return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
}"""
