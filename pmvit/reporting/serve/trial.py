"""One image through a compressed model and its original: what both say, and how long they take."""

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from pmvit.hosts import host_of
from pmvit.hosts.outputs import gives_logits, predict
from pmvit.numbers.colours import palette
from pmvit.reporting.class_names import class_names
from pmvit.reporting.images import InputImages, fitted, likeliest, page_picture
from pmvit.reporting.page.templates import chosen_blocks
from pmvit.reporting.pictures.segment import label_pixels
from pmvit.reporting.pictures.segmentation import SegmentedImage
from pmvit.reporting.saved_model import SavedModel
from pmvit.runtime.bench.timing import interleave, run_to_end
from pmvit.runtime.optimize import optimize_for_inference

SECONDS, MOST_ROUNDS = 0.6, 9  # an image is timed for about so long, in so many rounds at most
LARGEST_SIDE = 640  # of an image whose pixels are labelled, after it covers the model's size


class Trial:
    """A compressed model and its original, ready to be tried, on one image at a time."""

    def __init__(self, saved: SavedModel, names: str | Path | None = None) -> None:
        self.names = class_names(saved.model, names)
        self.models: dict[str, nn.Module] = {"original": saved.reference.model, "compressed": saved.model}
        if saved.plan is not None:
            self.models["optimized"] = optimize_for_inference(saved.model)
        for model in self.models.values():
            model.eval().requires_grad_(False)
        self._saved, self._model = saved, saved.model
        self._images = InputImages(saved.model)
        self._pixel_classes = host_of(saved.model).outputs().pixel_classes

    def run(self, picture: Image.Image) -> dict[str, Any]:
        """What the page shows of an image, as JSON data: `picture`, `seconds` by model, the answers of both and, with
        an adaptive plan, the image's `blocks`.
        """
        prepared = self._images.prepare(picture)
        result: dict[str, Any] = {"picture": page_picture(self._images.picture(prepared))}
        image = prepared[None].to(next(self._model.parameters()).device)
        with torch.inference_mode():
            runs = {name: partial(run_to_end, partial(predict, model), image) for name, model in self.models.items()}
            begun = time.perf_counter()
            outputs = {name: run() for name, run in runs.items()}
            took = (time.perf_counter() - begun) or 1e-3
            rounds = max(1, min(MOST_ROUNDS, int(SECONDS / took)))
            times = interleave(runs, rounds, warmup=0)
            answers = self._answers(picture, outputs) | chosen_blocks(self._saved, prepared)
        result["seconds"] = {name: statistics.median(values) for name, values in times.items()}
        return {**result, "rounds": rounds, **answers}

    def _answers(self, picture: Image.Image, outputs: dict[str, Tensor]) -> dict[str, Any]:
        before, after = outputs["original"][0].float(), outputs["compressed"][0].float()
        if self._pixel_classes is not None:
            return self._pixels(picture, self._pixel_classes)
        if not gives_logits(self._model):
            return {"kind": "embedding", "cosine": float(torch.cosine_similarity(before.flatten(), after.flatten(), 0))}
        shown = {"original": likeliest(before, self.names), "compressed": likeliest(after, self.names)}
        return {"kind": "classes", **shown, "same": shown["original"][0]["name"] == shown["compressed"][0]["name"]}

    def _pixels(self, picture: Image.Image, classes: int) -> dict[str, Any]:
        """The classes of all pixels of an image, as pictures."""
        small = fitted(picture, LARGEST_SIDE) if max(picture.size) > LARGEST_SIDE else picture
        before, after = (label_pixels(self.models[name], small) for name in ("original", "compressed"))
        image, colours = SegmentedImage("", small, classes, None, before, after), palette(classes)
        _, *panels = (page_picture(panel, LARGEST_SIDE) for panel, _ in image.panels())
        return {
            "kind": "pixels",
            **dict(zip(("original", "compressed", "difference"), panels, strict=True)),
            "agreement": image.agreement,
            "classes": [{"name": self.names[each], "colour": list(colours[each])} for each in image.classes_found()],
        }
