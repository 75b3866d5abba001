"""`report`: everything known of a compressed model as one HTML file that needs no network."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from pmvit.commands import versions
from pmvit.data.demo import DEMO
from pmvit.errors import PmvitError
from pmvit.files import write_text
from pmvit.fingerprint import fingerprint
from pmvit.reporting import sections, summary
from pmvit.reporting.compared import comparison_section
from pmvit.reporting.facts import Facts, collect, read_json
from pmvit.reporting.measured import Measured, measure
from pmvit.reporting.sections import Section
from pmvit.reporting.templates import content_hash, environment, read_web, viewer_data

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
    size = len(page.encode()) / 1e6
    if size > LARGEST_MEGABYTES:
        raise PmvitError(f"the report would have {size:.1f} MB, more than {LARGEST_MEGABYTES}: shorten the comparison")
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
        others = comparison_section(comparison, where)
    style, script = read_web("style.css"), "\n".join(map(read_web, SCRIPTS))
    return (
        environment()
        .get_template("report.html")
        .render(
            title=facts.config["model"]["architecture"],
            subtitle=summary.subtitle(facts),
            cards=sections.cards((facts.costs[0].gflops, facts.costs[1].gflops), evaluation, speed),
            what=summary.what(facts),
            accuracy=accuracy,
            speed=timed,
            learning=learning,
            comparison=others,
            blocks=facts.blocks,
            no_blocks=facts.no_blocks,
            viewer=viewer_data(facts.blocks, facts.model, pictures) if facts.blocks is not None else None,
            commands=summary.commands(facts),
            settings=summary.settings(facts),
            versions=versions(),
            style=style,
            script=script,
            style_hash=content_hash(style),
            script_hash=content_hash(script),
        )
    )
