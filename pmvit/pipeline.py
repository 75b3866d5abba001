"""`run`: measure, plan, compress, fine-tune and evaluate in one go; started again, it goes on where it was."""

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from pmvit._system import this_process, wait_for_all
from pmvit.compression import compress
from pmvit.config import (
    FinetuneConfig,
    MeasureOptions,
    MergeCostConfig,
    PlanConfig,
    ScoreConfig,
    SpeedConfig,
)
from pmvit.config.measuring import Measurement
from pmvit.config.training import Learn
from pmvit.data.loaders import Broken
from pmvit.data.opening import open_loader, open_validation
from pmvit.errors import PmvitError
from pmvit.evaluation.reference import Reference
from pmvit.evaluation.validation import AnyEvaluation, evaluation_from, validate
from pmvit.files import (
    check_fields,
    check_writable,
    config_from,
    read_document,
    read_json,
    typed,
    write_document,
)
from pmvit.locks import only_writer
from pmvit.measuring import (
    KINDS,
    MeasureConfig,
    Measured,
    check_needs_no_images,
    kind_of,
    measure_by,
    measure_config,
    read_measured,
)
from pmvit.measuring.flops import flops
from pmvit.saving.card import CardDetails, write_card
from pmvit.saving.models import check_savable, load, save
from pmvit.saving.parts import CONFIG_FILE
from pmvit.tradeoff import check_speed, plan_for
from pmvit.training import finetune
from pmvit.training.metrics import CURVES
from pmvit.training.metrics import FILE as METRICS
from pmvit.training.record import CHECKPOINTS
from pmvit.training.record import FILE as FINETUNE_FILE
from pmvit.training.trackers import tracker_names
from pmvit.training.trainer import LAST
from pmvit.wrapping import fingerprint

RUN_FILE, COMPRESSED, RESULTS_FILE = "run.json", "compressed", "results.json"
OLD_MERGE_COSTS = "prices.json"
FORMAT, VERSION = "pmvit-run", 2


def run_files(folder: Path) -> list[Path]:
    """What fine-tuning and `run` have left in a folder beside a model; none if they have not been there."""
    tuning = (FINETUNE_FILE, CHECKPOINTS, METRICS, CURVES, LAST)
    found = [folder / name for name in (*tuning, RUN_FILE, COMPRESSED, RESULTS_FILE) if (folder / name).exists()]
    return found if any((folder / name).exists() for name in (FINETUNE_FILE, RUN_FILE)) else []


def measured_file(output: Path, kind: Measurement) -> Path:
    """Where what is measured for a model goes: into its folder, or beside its file."""
    name = KINDS[kind].file
    return output.with_suffix(f".{name}") if output.suffix == ".safetensors" else output / name


def measure_path(
    config: MeasureConfig,
    model: nn.Module,
    data: str | Path | None,
    output: Path,
    *,
    batch_size: int = 64,
    workers: int = 2,
    first_label: int | None = None,
    progress: bool = True,
) -> tuple[Measured, Broken]:
    """Measure on the images of a path, and write what comes out to a file; also, which images could not be read.

    Without a path, a metric is measured on generated images.
    Several processes share the images of scores, whose partial sums are kept beside the file until all is done, and
    those of a metric. Merge costs, for which a few hundred images are enough, are measured by the first one alone.
    """
    check_writable(output)
    if data is None:
        check_needs_no_images(config)
    process, processes = this_process()
    partial, broken = output.with_name(output.name + ".partial"), Broken()
    is_scored, is_shared = isinstance(config, ScoreConfig), not isinstance(config, MergeCostConfig)
    if is_shared or process == 0:
        reading: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "shuffle": True}
        reading |= {"process": (process, processes)} if is_shared else {}
        reading |= {"workers": 0, "seed": config.seed} if data is None else {}
        needs_labels = isinstance(config, ScoreConfig) and config.needs_labels
        loader = open_loader(model, data, labels=needs_labels, first_label=first_label, **reading)
        store = partial if is_scored else None
        measured = measure_by(config, model, loader, checkpoint=store, progress=progress and process == 0)
        broken = loader.broken
        if process == 0:
            measured.save(output)
            partial.unlink(missing_ok=True)
    wait_for_all()
    return read_measured(output), broken


@dataclass(frozen=True)
class RunResults:
    """Accuracy and cost of the original, of the compressed model before tuning, and of the tuned one."""

    evaluations: dict[str, AnyEvaluation]
    gflops: dict[str, float]


def run(
    model: nn.Module,
    *,
    train: str | Path,
    val: str | Path,
    output: str | Path,
    plan_config: PlanConfig,
    finetune_config: FinetuneConfig | None = None,
    measure_options: MeasureOptions | None = None,
    learn: Learn = "group",
    arguments: dict[str, Any] | None = None,
    measure_batch_size: int = 64,
    epoch_images: int | None = None,
    first_label: int | None = None,
    speed: SpeedConfig | None = None,
    progress: bool = True,
) -> RunResults:
    """Make a faster model of a pretrained one, from measuring to fine-tuned weights, stage by stage.

    The folder gets what was measured, the model as compressed (`compressed/`), the tuned model itself with all that
    `finetune` writes, and `results.json`. A stage that is done is not done again; one that was interrupted goes on.

    Args:
        model: The original.
        train: Training images, for measuring and fine-tuning, as `open_source` takes them.
        val: Images to validate and evaluate on.
        output: The folder.
        plan_config: What to keep.
        finetune_config: How to fine-tune.
        measure_options: How to measure: keywords of `measure`.
        learn: What tuning may change of M and R.
        arguments: What the host library's model was created with, where it cannot be read off the model.
        measure_batch_size: Images a batch, to measure on.
        epoch_images: How many images make an epoch, if not all; a stream that cannot be counted needs it.
        first_label: The number of the first class in plain masks.
        speed: Where the model will run, for a budget in `speedup`. One in `max_drop` is for the images of `val`.
        progress: Show progress bars.

    Raises:
        PmvitError: If the folder holds a run of another model, other images or other options.
    """
    folder = Path(output)
    tuning = finetune_config or FinetuneConfig()
    tracker_names(tuning.log_with)
    method = plan_config.measurement or (None if measure_options else _method_of(folder))
    measuring = measure_config(model, method, measure_options or {})
    process = this_process()
    is_main = process[0] == 0
    evaluated = (folder / RESULTS_FILE).exists()
    if not evaluated:  # what there is to evaluate on is opened now: an error is better found before the work than after
        validation = open_validation(model, val, tuning.labels, tuning.workers, process, first_label)
        check_savable(model, arguments)
    configs: dict[str, Any] = {"measure": asdict(measuring), "plan": asdict(plan_config)}
    configs |= {"finetune": asdict(tuning), "learn": learn}
    if (speed := check_speed(plan_config, speed)) is not None:
        configs["speed"] = asdict(speed)
    with only_writer(folder) if is_main else nullcontext():
        _claim(folder, {"model": fingerprint(model), "train": str(train), "val": str(val), **configs}, is_main)
        source = measured_file(folder, kind_of(measuring))
        if isinstance(measuring, MergeCostConfig) and not source.exists() and (folder / OLD_MERGE_COSTS).exists():
            source = folder / OLD_MERGE_COSTS
        is_there = source.exists()
        wait_for_all()
        if not is_there:
            reading: dict[str, Any] = {"batch_size": measure_batch_size, "workers": tuning.workers}
            measure_path(measuring, model, train, source, first_label=first_label, progress=progress, **reading)
        if is_main and not (folder / COMPRESSED / CONFIG_FILE).exists():
            shown = None
            if plan_config.max_drop is not None:
                shown = open_validation(model, val, tuning.labels, tuning.workers, (0, 1), first_label)
            measured = read_measured(source)
            made = plan_for(plan_config, measured, model=model, data=shown, speed=speed, progress=progress)
            save(compress(model, made, learn=learn), folder / COMPRESSED, arguments=arguments)
        wait_for_all()
        small = load(folder / COMPRESSED)
        finetune(
            small,
            train=train,
            val=val,
            teacher=model,
            output=folder,
            resume=True,
            epoch_images=epoch_images,
            first_label=first_label,
            progress=progress,
            **vars(tuning),
        )
        if not evaluated:
            _evaluate(folder, model, validation, tuning, is_main, progress)
        wait_for_all()
        return read_results(folder)


def _method_of(folder: Path) -> Measurement | None:
    """What the run that a folder holds has measured, so that it goes on with that where nothing else is asked for."""
    if not (folder / RUN_FILE).exists():
        return None
    document = run_record(folder)
    measured = document.get("measure") or document.get("score") or {}
    own: dict[str, Measurement] = {"rank": "adaptive", "numbers": "adaptive", "parts": "measured", "scorer": "scored"}
    found = next((method for field, method in own.items() if field in measured), None)
    if document["version"] == 1 and (folder / OLD_MERGE_COSTS).exists():
        return "measured"  # options of scores were written down then, too
    return found


def run_record(folder: Path) -> dict[str, Any]:
    """The record of the run that a folder is for."""
    document = read_document(folder / RUN_FILE, FORMAT, VERSION)
    options = ("measure", "score", "plan", "finetune", "speed")
    names = ("format", "version", "model", "train", "val", "learn", *options)
    check_fields(document, (), str(folder / RUN_FILE), optional=names)
    for name in document.keys() & set(options):
        typed(dict[str, Any], document[name], f"{folder / RUN_FILE}: {name}")
    return document


def _claim(folder: Path, what: dict[str, Any], is_main: bool) -> None:
    """Write down which run this folder is for, or see that it is for the same one."""
    path = folder / RUN_FILE
    if not path.exists():
        if is_main:
            write_document(path, json.dumps({"format": FORMAT, "version": VERSION, **what}, indent=1))
        return
    document = _upgraded(run_record(folder), what, str(path))
    document["plan"] = {field.name: field.default for field in fields(PlanConfig)} | document.get("plan", {})
    if "speed" in what:  # which was always the same, once
        document.setdefault("speed", asdict(SpeedConfig(batch=16)))
    check_fields(document, ("format", "version", *what), str(path), optional=("speed",))
    for name, here in json.loads(json.dumps(what)).items():
        there = document[name]
        if here != there and name == "finetune":
            continue  # fine-tuning knows itself what may change between two starts
        if here != there:
            raise PmvitError(f"{folder} holds a run with another {name} ({there}, not {here}): choose another folder")


def _upgraded(document: dict[str, Any], what: dict[str, Any], where: str) -> dict[str, Any]:
    """A record as today's version has it: the first one knew options of scores alone, also where none were measured."""
    if document["version"] > 1 or "score" not in document:
        return document
    scores = config_from(ScoreConfig, document.pop("score"), f"{where}: score")
    is_scored = scores != ScoreConfig() or what["measure"].keys() == asdict(scores).keys()
    return {**document, "measure": asdict(scores if is_scored else MergeCostConfig())}


def _evaluate(
    folder: Path, model: nn.Module, loader: Any, tuning: FinetuneConfig, is_main: bool, progress: bool
) -> None:
    device = next(model.parameters()).device
    models = {"original": model, "compressed": load(folder / COMPRESSED), "tuned": load(folder)}
    rows = {}
    for stage, candidate in models.items():
        reference = None if stage == "original" and tuning.labels else Reference(model, "original")
        result = validate(
            candidate.to(device),
            loader,
            reference=reference,
            use_labels=tuning.labels,
            progress=progress and is_main,
        )
        rows[stage] = {**asdict(result), "gflops": flops(candidate).gflops}
    if is_main:
        write_document(folder / RESULTS_FILE, json.dumps(rows, indent=1))
        settings = {"finetune": asdict(tuning)}
        _complete_card(folder, models["tuned"], CardDetails(rows, settings))
        before = {stage: rows[stage] for stage in ("original", "compressed")}
        _complete_card(folder / COMPRESSED, models["compressed"], CardDetails(before))


def _complete_card(folder: Path, model: nn.Module, details: CardDetails) -> None:
    """Write the card of a saved model again, now that it is known how good it is."""
    config = read_json(folder / CONFIG_FILE)
    write_card(folder, model, config, check_savable(model).costs, details)


def read_results(folder: Path) -> RunResults:
    """The results of a run that came to its end."""
    path = folder / RESULTS_FILE
    rows: dict[str, dict[str, Any]] = typed(
        dict[str, dict[str, Any]], read_json(path, "the results of a run"), str(path)
    )
    costs = {stage: typed(float, row.get("gflops"), f"{path}: {stage}: gflops") for stage, row in rows.items()}
    return RunResults({stage: evaluation_from(row, f"{path}: {stage}") for stage, row in rows.items()}, costs)
