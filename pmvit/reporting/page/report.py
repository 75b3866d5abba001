"""`report`: everything known of a compressed model as one HTML file that needs no network."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pmvit.data.demo import DEMO
from pmvit.errors import PmvitError
from pmvit.files import read_json, read_text, write_text
from pmvit.hosts import host_of
from pmvit.measuring.flops import Flops, flops
from pmvit.numbers.measures import REFERENCES
from pmvit.planning.adaptive import AdaptivePlan
from pmvit.reporting.blocks import sizes
from pmvit.reporting.page import sections
from pmvit.reporting.page.measurements import Measurements, measure
from pmvit.reporting.page.templates import content_hash, read_web, render
from pmvit.reporting.pictures.charts import Chart
from pmvit.reporting.saved_model import SavedModel
from pmvit.saving.commands import this_command
from pmvit.wrapping import fingerprint

LARGEST_MEGABYTES = 5
SCRIPTS = ("theme.js", "viewer.js", "report.js")
BACK = {"residual": "each group's update", "pinv": "the pseudo-inverse"}
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
    memory: bool = True,
    device: str | torch.device = "cpu",
    progress: bool = True,
) -> Path:
    """Write a page about a compressed model: numbers before and after, what each block keeps, how it was made.

    What is measured here is kept beside the page, under its name with the ending `.json`, and not measured again as
    long as model, original, images and names are the same. Only what was measured is shown.

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
        memory: Measure peak memory, too, in a process for each variant; some seconds each.
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
    saved = SavedModel(path, original, device)
    store = output.with_suffix(".json")
    of = _key(saved, data, limit, names)
    found = Measurements.read(store) if store.exists() else Measurements({}, None, None, [])
    asked = ["model", *(["original"] if original is not None else []), *(["original", "data", "limit"] if data else [])]
    asked += ["names"] if data and names is not None else []
    if any(found.of.get(name) != of[name] for name in asked):
        found = Measurements(of, None, None, [])
        if data is not None:
            found = measure(
                saved, data, of, limit=limit, names=names, workers=workers, memory=memory, progress=progress
            )
            found.write(store)
    found = replace(found, speed=_beside(path, benchmark, BENCHMARK_FILE) or found.speed)
    if evaluation is not None:
        judged = sections.from_evaluate(read_json(Path(evaluation)), str(evaluation))
        found = replace(found, evaluation=judged)
    compared = _beside(path, comparison, COMPARISON_FILE)
    others = sections.comparison_section(compared, str(comparison or COMPARISON_FILE)) if compared else ([], [])
    page = _render(saved, found, others)
    size = len(page.encode()) / 1e6
    if size > LARGEST_MEGABYTES:
        raise PmvitError(f"the report would have {size:.1f} MB, more than {LARGEST_MEGABYTES}: shorten the comparison")
    write_text(output, page)
    return output


def _key(saved: SavedModel, data: str | Path | None, limit: int | None, names: str | Path | None) -> dict[str, Any]:
    """Of which model, original and images measurements are, and what the classes are called in them."""
    checksum = "-".join(value[:16] for _, value in sorted(saved.config["sha256"].items()))
    where = str(data) if data == DEMO or not Path(str(data)).exists() else str(Path(str(data)).resolve())
    original = {"original": fingerprint(saved.reference.model), "compared_with": saved.reference.title}
    told = None if names is None else content_hash(read_text(Path(names), "the names of classes"))
    return {"model": checksum, **original, "data": where, "limit": limit, "names": told}


def _beside(path: Path, given: str | Path | None, name: str) -> dict[str, Any] | None:
    """A document with rows: the one that was named, or that in the folder of the model."""
    place = Path(given) if given is not None else path / name
    if given is None and not place.is_file():
        return None
    document = read_json(place)
    if not isinstance(document.get("rows"), list):
        raise PmvitError(f"{place}: expected an object with rows, as `pmvit benchmark` and `pmvit compare` write it")
    return document


def _render(saved: SavedModel, found: Measurements, others: tuple[list[sections.Table], list[Chart]]) -> str:
    """The page as text."""
    costs = flops(saved.reference.model), flops(saved.model)
    told = REFERENCES.get(str((found.evaluation or {}).get("reference")))  # by an evaluation that was given
    compared_with = told or found.of.get("compared_with") or saved.reference.title
    tables = [sections.accuracy_table(found.evaluation, compared_with)] if found.evaluation is not None else []
    tables += [sections.stages_table(saved.stages)] if saved.stages else []
    commands = [str(one["command"]) for one in saved.commands]
    commands += [this_command()] if this_command().startswith("pmvit report") else []
    style, script = read_web("style.css"), "\n".join(map(read_web, SCRIPTS))
    return render(
        "report.html",
        saved,
        found.pictures,
        subtitle=_subtitle(saved),
        cards=sections.cards((costs[0].gflops, costs[1].gflops), found.evaluation, found.speed, compared_with),
        what=_what(saved, costs, compared_with),
        path=saved.path,
        accuracy=tables,
        classes=sections.class_table(found.evaluation) if found.evaluation is not None else None,
        apart=found.apart,
        speed=[sections.speed_table(found.speed)] if found.speed is not None else [],
        learning=sections.curves(saved.metrics),
        tuned=" and ".join(saved.tuned),
        comparison=others,
        blocks=saved.blocks,
        is_split=any(block["kept_in_mlp"] != block["kept"] for block in saved.blocks or ()),
        merges=saved.plan.blocks if isinstance(saved.plan, AdaptivePlan) else {},
        commands=commands,
        settings=_settings(saved),
        style=style,
        script=script,
        style_hash=content_hash(style),
        script_hash=content_hash(script),
    )


def _subtitle(saved: SavedModel) -> str:
    """One sentence on what was done to the model."""
    if saved.plan is None:
        return f"{_done(saved)}."
    return f"{_done(saved)}: its blocks run on {100 * saved.plan.keep:.0f} % of the patch tokens."


def _done(saved: SavedModel) -> str:
    """By what it was compressed, and how its weights were tuned since."""
    return " and ".join((f"Compressed by {saved.recipe.title}", *saved.tuned))


def _what(saved: SavedModel, costs: tuple[Flops, Flops], compared_with: str) -> list[tuple[str, str]]:
    """What was compressed, and how, in short."""
    host, (before, after) = host_of(saved.model), costs
    size = host.input_size()
    grids = [layout.grid for layout in host.layouts()]
    said = [
        ("Model", saved.config["model"]["architecture"]),
        ("Input", " × ".join(map(str, size)) + (" (channels × height × width)" if len(size) == 3 else "")),
        ("Blocks", f"{len(grids)}, on {sizes(grids, '×')} patches"),
        ("Multiply-accumulates", f"{before.macs / 1e9:.3f} G → {after.macs / 1e9:.3f} G"),
        ("Parameters", f"{before.parameters / 1e6:.2f} M → {after.parameters / 1e6:.2f} M"),
    ]
    if saved.plan is not None:
        said.append(("Merging and putting back", f"{100 * after.module_macs / after.macs:.2f} % of the cost"))
        said.append(("Put back by", BACK[saved.plan.reconstruct]))
    else:
        options = json.loads(saved.recipe.to_json())["options"]
        told = ", ".join(f"{name} {value}" for name, value in options.items())
        said.append(("Method", f"{saved.recipe.title}: {told}"))
    said.append(("Compared with", compared_with))
    if saved.reference.name == "uncompressed":
        said.append(("", "The original is not at hand: --original names it."))
    return said


def _settings(saved: SavedModel) -> list[tuple[str, list[tuple[str, str]]]]:
    """The configurations that are on record, each with its name."""
    titles = {"scores": "Scores", "plan": "Plan", "metric": "Metric"}
    made_by = saved.plan.made_by if saved.plan is not None else {}
    found = [(titles.get(name, name), values) for name, values in made_by.items() if isinstance(values, dict)]
    if saved.tuning:
        found.append(
            ("Calibration" if saved.tuned[-1:] == ("calibrated",) else "Fine-tuning", saved.tuning.get("config") or {})
        )
    return [(title, [(name, json.dumps(value)) for name, value in values.items()]) for title, values in found]
