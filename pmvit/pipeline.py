"""`run`: score, plan, compress, fine-tune and evaluate in one go; started again, it goes on where it was."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from pmvit._system import this_process, wait_for_all
from pmvit.card import CardDetails, write_card
from pmvit.compression import compress
from pmvit.errors import PmvitError
from pmvit.evaluation.reference import Reference
from pmvit.evaluation.validation import AnyEvaluation, evaluation_from, validate
from pmvit.files import check_fields, read_document, write_text
from pmvit.fingerprint import fingerprint
from pmvit.loading import open_loader, open_validation
from pmvit.measuring import MergeCosts, ScoreConfig, Scores, measure_merge_costs, score
from pmvit.measuring.flops import flops
from pmvit.planning import Plan, PlanConfig, choose_method, plan
from pmvit.prune_merge import Learn
from pmvit.saving import CONFIG_FILE, check_savable, load, save
from pmvit.training import FinetuneConfig, finetune

RUN_FILE, COMPRESSED, RESULTS_FILE = "run.json", "compressed", "results.json"
SCORES_FILE, MERGE_COSTS_FILE = "scores.json", "prices.json"
FORMAT, VERSION = "pmvit-run", 1


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
    score_config: ScoreConfig | None = None,
    plan_config: PlanConfig | None = None,
    finetune_config: FinetuneConfig | None = None,
    learn: Learn = "group",
    arguments: dict[str, Any] | None = None,
    score_batch_size: int = 64,
    epoch_images: int | None = None,
    first_label: int | None = None,
    measure: Callable[[Plan], float] | None = None,
    progress: bool = True,
) -> RunResults:
    """Make a faster model of a pretrained one, from scores or merge costs to fine-tuned weights, stage by stage.

    The folder gets what was measured, the model as compressed (`compressed/`), the tuned model itself with all that
    `finetune` writes, and `results.json`. A stage that is done is not done again; one that was interrupted goes on.

    Args:
        model: The original.
        train: Training images, for scores or merge costs and fine-tuning, as `open_source` takes them.
        val: Images to validate and evaluate on.
        output: The folder.
        score_config: How to score.
        plan_config: What to keep.
        finetune_config: How to fine-tune.
        learn: What tuning may change of M and R.
        arguments: What the host library's model was created with, where it cannot be read off the model.
        score_batch_size: Images a batch, for the scores.
        epoch_images: How many images make an epoch, if not all; a stream that cannot be counted needs it.
        first_label: The number of the first class in plain masks.
        measure: The speed-up of a plan, for a budget in speed-up.
        progress: Show progress bars.

    Raises:
        PmvitError: If the folder holds a run of another model, other images or other options.
    """
    folder = Path(output)
    configs = (score_config or ScoreConfig(), plan_config or PlanConfig(), finetune_config or FinetuneConfig())
    scoring, planning, tuning = configs
    process = this_process()
    is_main = process[0] == 0
    evaluated = (folder / RESULTS_FILE).exists()
    if not evaluated:  # what there is to evaluate on is opened now: an error is better found before the work than after
        validation = open_validation(model, val, tuning.labels, tuning.workers, process, first_label)
        check_savable(model, arguments)
    _claim(folder, _what_it_is(model, train, val, configs, learn), is_main)
    is_measured = choose_method(model, planning, scoring) == "measured"
    source = folder / (MERGE_COSTS_FILE if is_measured else SCORES_FILE)
    is_there = source.exists()
    wait_for_all()
    if not is_there and is_measured and is_main:  # a few hundred images are no work to share
        reading: dict[str, Any] = {"batch_size": score_batch_size, "shuffle": True, "workers": tuning.workers}
        loader = open_loader(model, train, labels=False, first_label=first_label, **reading)
        measure_merge_costs(model, loader, progress=progress).save(source)
    elif not is_there and not is_measured:
        partial = folder / f"{SCORES_FILE}.partial"
        shared: dict[str, Any] = {"process": process[0], "processes": process[1], "workers": tuning.workers}
        shared |= {"batch_size": score_batch_size, "shuffle": True, "first_label": first_label}
        loader = open_loader(model, train, labels=scoring.needs_labels, **shared)
        scores = score(model, loader, scoring, checkpoint=partial, progress=progress and is_main)
        if is_main:
            scores.save(source)
            partial.unlink(missing_ok=True)
    if is_main and not (folder / COMPRESSED / CONFIG_FILE).exists():
        made = plan(MergeCosts.load(source) if is_measured else Scores.load(source), planning, measure=measure)
        save(compress(model, made, learn=learn), folder / COMPRESSED, arguments=arguments)
    wait_for_all()
    small = load(folder / COMPRESSED)
    finetune(
        small,
        train=train,
        val=val,
        teacher=model,
        config=tuning,
        output=folder,
        resume=True,
        epoch_images=epoch_images,
        first_label=first_label,
        progress=progress,
    )
    if not evaluated:
        _evaluate(folder, model, validation, tuning, is_main, progress)
    wait_for_all()
    return read_results(folder)


def _what_it_is(
    model: nn.Module, train: str | Path, val: str | Path, configs: tuple[Any, Any, Any], learn: str
) -> dict[str, Any]:
    scoring, planning, tuning = configs
    described = {"score": asdict(scoring), "plan": asdict(planning), "finetune": asdict(tuning), "learn": learn}
    return {"model": fingerprint(model), "train": str(train), "val": str(val), **described}


def _claim(folder: Path, what: dict[str, Any], is_main: bool) -> None:
    """Write down which run this folder is for, or see that it is for the same one."""
    path = folder / RUN_FILE
    if not path.exists():
        if is_main:
            write_text(path, json.dumps({"format": FORMAT, "version": VERSION, **what}, indent=1) + "\n")
        return
    document = check_fields(read_document(path, FORMAT, VERSION), ("format", "version", *what), str(path))
    for name, here in json.loads(json.dumps(what)).items():
        there = document[name]
        if here != there and name == "finetune":
            continue  # fine-tuning knows itself what may change between two starts
        if here != there:
            raise PmvitError(f"{folder} holds a run with another {name} ({there}, not {here}): choose another folder")


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
        write_text(folder / RESULTS_FILE, json.dumps(rows, indent=1) + "\n")
        settings = {"finetune": asdict(tuning)}
        _complete_card(folder, models["tuned"], CardDetails(rows, settings))
        before = {stage: rows[stage] for stage in ("original", "compressed")}
        _complete_card(folder / COMPRESSED, models["compressed"], CardDetails(before))


def _complete_card(folder: Path, model: nn.Module, details: CardDetails) -> None:
    """Write the card of a saved model again, now that it is known how good it is."""
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    write_card(folder, model, config, check_savable(model).costs, details)


def read_results(folder: Path) -> RunResults:
    """The results of a run that came to its end."""
    rows = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
    costs = {stage: row["gflops"] for stage, row in rows.items()}
    return RunResults({stage: evaluation_from(row) for stage, row in rows.items()}, costs)
