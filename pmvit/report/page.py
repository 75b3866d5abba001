"""`report`: everything known of a compressed model as one HTML file that needs no network."""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import nn

from pmvit.commands import this_command, versions
from pmvit.compress import compression_of
from pmvit.errors import PmvitError
from pmvit.files import write_text
from pmvit.fingerprint import fingerprint
from pmvit.methods.base import method_of
from pmvit.models import adapter_for
from pmvit.report import sections
from pmvit.report.blocks import BlockDescription
from pmvit.report.facts import SAME_WEIGHTS, Facts, collect, read_json
from pmvit.report.gallery import DEMO
from pmvit.report.measured import Measured, measure
from pmvit.report.sections import Section

WEB = Path(__file__).with_name("web")
LARGEST_FILE = 5_000_000  # bytes
LARGEST_PLAN = 2_000_000
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
        original: A saved model, or a model, to compare with; if not given, the one this was made of, if it is there.
        limit: How many images at most to measure on.
        names: A text file with the names of the classes, one a line.
        evaluation: What `pmvit evaluate --json` printed, instead of measuring.
        benchmark: `benchmark.json` of `pmvit benchmark`; that in the folder if not given.
        comparison: `comparison.json` of `pmvit compare`; that in the folder if not given.
        workers: Processes that read images.
        progress: Show progress bars.

    Returns:
        The file.

    Raises:
        PmvitError: If something is not what it should be, or the page would be larger than 5 MB.
    """
    path, output = Path(path), Path(output)
    if output.is_dir():
        raise PmvitError(f"expected the name of a file to write, got the folder {output}: use {output / 'report.html'}")
    facts = collect(path, original)
    store = output.with_suffix(".json")
    found = _known(facts, store, data, original, limit)
    if found is None and data is not None:
        of = _key(facts, data, limit)
        options: dict[str, Any] = {"limit": limit, "names": names, "workers": workers, "progress": progress}
        found = measure(facts.model, facts.original, data, of, **options)
        found.write(store)
    judged = found.evaluation if found is not None else None
    if found is not None:
        facts = replace(facts, original_title=found.of["compared_with"])
    if evaluation is not None:
        judged = sections.from_evaluate(read_json(Path(evaluation)), str(evaluation))
    timed = _beside(path, benchmark, BENCHMARK_FILE) or (found.speed if found is not None else None)
    compared = _beside(path, comparison, COMPARISON_FILE)
    pictures = found.pictures if found is not None else []
    page = render(facts, judged, timed, compared, pictures, str(comparison or COMPARISON_FILE))
    if len(page.encode()) > LARGEST_FILE:
        raise PmvitError(f"the report would have {len(page.encode()) / 1e6:.1f} MB, more than 5: report it")
    write_text(output, page)
    return output


def _key(facts: Facts, data: str | Path | None, limit: int | None) -> dict[str, Any]:
    where = str(data) if data == DEMO or not Path(str(data)).exists() else str(Path(str(data)).resolve())
    original = {"original": fingerprint(facts.original), "compared_with": facts.original_title}
    return {"model": facts.checksum, **original, "data": where, "limit": limit}


def _known(
    facts: Facts, store: Path, data: str | Path | None, original: str | Path | nn.Module | None, limit: int | None
) -> Measured | None:
    """What was measured before of this model; of other images or another original only if none were asked for."""
    if not store.exists():
        return None
    found = Measured.read(store)
    wanted = _key(facts, data, limit)
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


def render(
    facts: Facts,
    evaluation: dict[str, Any] | None,
    speed: dict[str, Any] | None,
    comparison: dict[str, Any] | None,
    pictures: list[dict[str, Any]],
    where: str = COMPARISON_FILE,
) -> str:
    """The page as text."""
    again = f"pmvit report {facts.path}"
    stages = ["original", "compressed"]
    accuracy = Section(missing=f"Not measured yet: {again} --data IMAGES measures accuracy before and after.")
    tables = [sections.stages_table(facts.stages)] if facts.stages else []
    if evaluation is not None:
        tables.insert(0, sections.accuracy_table(evaluation, stages))
    if tables:
        accuracy = Section(tables)
    timed = Section(missing=f"Not measured yet: pmvit benchmark {facts.path} -o {facts.path} measures it.")
    if speed is not None:
        timed = Section([sections.speed_table(speed)])
    learning = Section(missing=f"This model was not fine-tuned: pmvit finetune {facts.path} --data IMAGES -o tuned/.")
    if charts := sections.curves(facts.metrics):
        learning = Section(charts=charts)
    others = Section(missing="Not compared yet: pmvit compare puts this model beside other methods at equal cost.")
    if comparison is not None:
        others = sections.comparison_section(comparison, where)
    style, script = _read("style.css"), "\n".join(map(_read, SCRIPTS))
    return (
        environment()
        .get_template("report.html")
        .render(
            title=facts.config["model"]["architecture"],
            subtitle=_subtitle(facts),
            cards=sections.cards((facts.costs[0].gflops, facts.costs[1].gflops), evaluation, speed),
            what=_what(facts),
            accuracy=accuracy,
            speed=timed,
            learning=learning,
            comparison=others,
            blocks=facts.blocks,
            no_blocks=facts.no_blocks,
            viewer=viewer_data(facts.blocks, facts.model, pictures) if facts.blocks is not None else None,
            commands=_commands(facts),
            settings=_settings(facts),
            versions=versions(),
            style=style,
            script=script,
            style_hash=_hash(style),
            script_hash=_hash(script),
        )
    )


def environment() -> Environment:
    """Templates in which every text is escaped."""
    made = Environment(
        loader=PackageLoader("pmvit.report", "web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["json_data"] = json_data
    return made


def json_data(value: Any) -> str:
    """JSON that can stand inside a script element: nothing in it can end the element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def viewer_data(blocks: Sequence[BlockDescription], model: nn.Module, pictures: list[dict[str, Any]]) -> dict[str, Any]:
    """What the block viewer gets; the scores and weights of a very large plan are left out."""
    compression = compression_of(model)
    reconstruct = compression.plan.reconstruct if compression is not None else "residual"
    for keys in (("weights", "scores"), ("weights",), ()):
        short = [_short(block, keys) for block in blocks]
        if len(json_data(short)) < LARGEST_PLAN:
            break
    return {"blocks": short, "reconstruct": reconstruct, "images": pictures}


def _short(block: BlockDescription, keys: Sequence[str]) -> dict[str, Any]:
    everything: dict[str, Any] = {**block}
    made = {name: everything[name] for name in ("name", "compressed", "grid", "groups", "centres", "prefix")}
    for key in keys:
        values: list[float] | None = everything[key]
        made[key] = None if values is None else [float(f"{value:.3g}") for value in values]
    return made


def _read(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _subtitle(facts: Facts) -> str:
    method = method_of(facts.model)
    if method is not None:
        return f"Compressed by {method.name}."
    compression = compression_of(facts.model)
    share = f"{100 * compression.plan.keep:.0f} % of the patch tokens" if compression is not None else ""
    tuned = " and fine-tuned" if facts.tuning is not None or facts.metrics else ""
    return f"Compressed by Prune and Merge{tuned}: its blocks run on {share}."


def _what(facts: Facts) -> list[tuple[str, str]]:
    """What was compressed, and how, in short."""
    adapter, (before, after) = adapter_for(facts.model), facts.costs
    channels, height, width = adapter.input_size(facts.model)
    layouts = adapter.layouts(facts.model)
    grids = ", ".join(f"{rows} × {columns}" for rows, columns in dict.fromkeys(layout.grid for layout in layouts))
    said = [
        ("Model", facts.config["model"]["architecture"]),
        ("Input", f"{height} × {width} pixels, {channels} channel{'s' if channels > 1 else ''}"),
        ("Blocks", f"{len(layouts)}, on {grids} patches"),
        ("Multiply-accumulates", f"{before.macs / 1e9:.3f} G → {after.macs / 1e9:.3f} G"),
        ("Parameters", f"{before.parameters / 1e6:.2f} M → {after.parameters / 1e6:.2f} M"),
    ]
    compression = compression_of(facts.model)
    if compression is not None:
        plan = compression.plan
        said.append(("Merging and putting back", f"{100 * after.module_macs / after.macs:.2f} % of the cost"))
        back = {"residual": "each group's update", "pinv": "the pseudo-inverse"}
        said.append(("Put back by", back[plan.reconstruct]))
    method = method_of(facts.model)
    if method is not None:
        options = ", ".join(f"{name} {value}" for name, value in method.describe()["options"].items())
        said.append(("Method", f"{method.name}: {options}"))
    if facts.original_title:
        said.append(("Compared with", facts.original_title))
    if facts.original_title == SAME_WEIGHTS:
        said.append(("", "The original is not in the folder: --original names it."))
    return said


def _commands(facts: Facts) -> list[str]:
    commands = [str(one["command"]) for one in facts.commands]
    command = this_command()
    return [*commands, command] if command.startswith("pmvit report") else commands


def _settings(facts: Facts) -> list[tuple[str, list[tuple[str, str]]]]:
    """The configurations that are on record, each with its name."""
    compression = compression_of(facts.model)
    made_by = dict(compression.plan.made_by) if compression is not None else {}
    titles = {"scores": "Scores", "plan": "Plan"}
    found = [(titles.get(name, name), values) for name, values in made_by.items() if isinstance(values, dict)]
    if facts.tuning is not None:
        found.append(("Fine-tuning", facts.tuning.get("config") or {}))
    return [(title, [(name, json.dumps(value)) for name, value in values.items()]) for title, values in found]
