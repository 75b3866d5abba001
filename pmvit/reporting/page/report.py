"""`report`: everything known of a compressed model as one HTML file that needs no network."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pmvit.data.demo import DEMO
from pmvit.errors import PmvitError
from pmvit.files import write_text
from pmvit.measuring.flops import flops
from pmvit.reporting.page import sections, summary
from pmvit.reporting.page.comparison import comparison_section
from pmvit.reporting.page.measurements import Measurements, measure
from pmvit.reporting.page.sections import Section
from pmvit.reporting.page.templates import content_hash, environment, read_web, viewer_data
from pmvit.reporting.saved_model import SavedModel, open_saved, read_json
from pmvit.saving.commands import versions
from pmvit.wrapping import fingerprint

LARGEST_MEGABYTES = 5
SCRIPTS = ("theme.js", "viewer.js", "report.js")
BENCHMARK_FILE, COMPARISON_FILE = "benchmark.json", "comparison.json"


def report(
    path: str | Path,
    output: str | Path,
    *,
    data: str | Path | None = None,
    original: str | Path | nn.Module | None = None,
    limit: int | None = None,
    names: str | Path | None = None,
    evaluation: str | Path | None = None,
    benchmark: str | Path | None = None,
    comparison: str | Path | None = None,
    workers: int = 2,
    device: str | torch.device = "cpu",
    progress: bool = True,
) -> Path:
    """Write a page about a compressed model: numbers before and after, what each block keeps, how it was made.

    What is measured here is kept beside the page, under its name with the ending `.json`, and not measured again as
    long as model, original and images are the same. Only what was measured is shown.

    Args:
        path: What `save` wrote: a folder, with what `run`, `finetune`, `benchmark` and `compare` left in it, or a file.
        output: The HTML file to write.
        data: Images to measure accuracy on and to show, as `evaluate` takes them; `demo` for the built-in ones. Speed
            is measured, too. If not given, nothing is measured.
        original: A saved model, or a model, to compare with; if not given, the one this was made of, if it is at hand.
        limit: How many images at most to measure on.
        names: A text file with the names of the classes, one a line.
        evaluation: What `pmvit evaluate --json` printed, instead of measuring.
        benchmark: `benchmark.json` of `pmvit benchmark`; that in the folder if not given.
        comparison: `comparison.json` of `pmvit compare`; that in the folder if not given.
        workers: Processes that read images.
        device: Where accuracy is measured; speed is that of the CPU.
        progress: Show progress bars.

    Returns:
        The file.

    Raises:
        PmvitError: If something is not what it should be, or the page would be larger than 5 MB.
    """
    path, output = Path(path), Path(output)
    if output.is_dir():
        raise PmvitError(f"expected the name of a file to write, got the folder {output}: use {output / 'report.html'}")
    saved = open_saved(path, original, device)
    store = output.with_suffix(".json")
    of, found = _key(saved, data, limit), _known(saved, store, data, original, limit)
    if found is None and data is not None:
        found = measure(saved, data, of, limit=limit, names=names, workers=workers, progress=progress)
        found.write(store)
    found = found or Measurements(of, None, None, [])
    judged, timed = found.evaluation, _beside(path, benchmark, BENCHMARK_FILE) or found.speed
    if evaluation is not None:
        judged = sections.from_evaluate(read_json(Path(evaluation)), str(evaluation))
    compared = _beside(path, comparison, COMPARISON_FILE)
    others = None if compared is None else comparison_section(compared, str(comparison or COMPARISON_FILE))
    page = _render(saved, replace(found, evaluation=judged, speed=timed), others)
    size = len(page.encode()) / 1e6
    if size > LARGEST_MEGABYTES:
        raise PmvitError(f"the report would have {size:.1f} MB, more than {LARGEST_MEGABYTES}: shorten the comparison")
    write_text(output, page)
    return output


def _key(saved: SavedModel, data: str | Path | None, limit: int | None) -> dict[str, Any]:
    where = str(data) if data == DEMO or not Path(str(data)).exists() else str(Path(str(data)).resolve())
    original = {"original": fingerprint(saved.reference.model), "compared_with": saved.reference.title}
    return {"model": saved.checksum, **original, "data": where, "limit": limit}


def _known(
    saved: SavedModel, store: Path, data: str | Path | None, original: str | Path | nn.Module | None, limit: int | None
) -> Measurements | None:
    """What was measured before of this model; of other images or another original only if none were asked for."""
    if not store.exists():
        return None
    found = Measurements.read(store)
    wanted = _key(saved, data, limit)
    asked = ["model", *(["original"] if original is not None else []), *(["original", "data", "limit"] if data else [])]
    return found if all(found.of.get(name) == wanted[name] for name in asked) else None


def _beside(path: Path, given: str | Path | None, name: str) -> dict[str, Any] | None:
    """A document with rows: the one that was named, or that in the folder of the model."""
    place = Path(given) if given is not None else path / name
    if given is None and not place.is_file():
        return None
    document = read_json(place)
    if not isinstance(document.get("rows"), list):
        raise PmvitError(f"{place}: expected an object with rows, as `pmvit benchmark` and `pmvit compare` write it")
    return document


def _render(saved: SavedModel, found: Measurements, others: Section | None) -> str:
    """The page as text."""
    costs = flops(saved.reference.model), flops(saved.model)
    compared_with = found.of.get("compared_with") or saved.reference.title
    tables = [sections.accuracy_table(found.evaluation, compared_with)] if found.evaluation is not None else []
    tables += [sections.stages_table(saved.stages)] if saved.stages else []
    speeds = [sections.speed_table(found.speed)] if found.speed is not None else []
    style, script = read_web("style.css"), "\n".join(map(read_web, SCRIPTS))
    return (
        environment()
        .get_template("report.html")
        .render(
            title=saved.config["model"]["architecture"],
            subtitle=summary.subtitle(saved),
            cards=sections.cards((costs[0].gflops, costs[1].gflops), found.evaluation, found.speed),
            what=summary.what(saved, costs, compared_with),
            path=saved.path,
            accuracy=Section(tables),
            speed=Section(speeds),
            learning=Section(charts=sections.curves(saved.metrics)),
            comparison=others or Section(),
            blocks=saved.blocks,
            no_blocks=saved.no_blocks,
            viewer=viewer_data(saved.blocks, saved.model, found.pictures) if saved.blocks is not None else None,
            commands=summary.commands(saved),
            settings=summary.settings(saved),
            versions=versions(),
            style=style,
            script=script,
            style_hash=content_hash(style),
            script_hash=content_hash(script),
        )
    )
