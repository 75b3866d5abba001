"""Damage every kind of file that pmvit reads, thousands of times, and see that it is noticed.

    python -m scripts.fuzz [--mutants 18900] [--seed 0]

Each mutant is one file with one thing wrong about it. Reading it has to give what was written, or a `PmvitError`;
another exception is a failure, and so is another result that nothing was said about. Where a file has no checksum,
because somebody edited it or an older pmvit wrote it, another result is fine as long as it is one.
"""

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from PIL import Image
from torch import nn

import pmvit
from pmvit.compression import compression_of
from pmvit.config import FinetuneConfig, PlanConfig
from pmvit.errors import PmvitError, PmvitWarning
from pmvit.measuring import read_measured
from pmvit.pipeline import read_results, run_record
from pmvit.planning.planner import read_plan
from pmvit.saving.commands import read_commands, running_command
from pmvit.tensors import checksum
from pmvit.training.metrics import keep_metrics
from pmvit.training.record import RunRecord
from pmvit.training.trainer import Trainer
from scripts.mutants import damage, without_seal

import timm  # isort: skip  # after pmvit, which lets torchvision import

SECONDS = 20  # for one mutant
EPOCHS, BATCHES = 1, 2
SHOWN = 20  # failures


@dataclass(frozen=True)
class Subject:
    """A kind of file, and how it is read.

    Attributes:
        name: What it is.
        files: The files to damage, one at a time.
        read: Reads them; what it returns is the same text if it is the same thing.
        edited: Whether the files lose their checksums first.
        share: How many of the mutants are of it, beside the shares of others.
    """

    name: str
    files: tuple[Path, ...]
    read: Callable[[], str]
    edited: bool = False
    share: int = 1


@dataclass
class Outcomes:
    """What became of the mutants of a subject, and the failures in words."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def digest(value: Any) -> str:
    """A text that is the same for the same JSON data and tensors."""
    if isinstance(value, torch.Tensor):
        return checksum({"": value})
    if isinstance(value, dict):
        return hashlib.sha256(repr([(key, digest(entry)) for key, entry in value.items()]).encode()).hexdigest()
    if isinstance(value, (list, tuple)):
        return hashlib.sha256(repr([digest(entry) for entry in value]).encode()).hexdigest()
    return repr(value)


def small_vit() -> nn.Module:
    """Three narrow blocks on 4 x 4 patches."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "num_classes": 4}
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", depth=3, **settings)
    return model.eval()


def write_pictures(folder: Path) -> Path:
    """Four classes of two images of noise."""
    chance = random.Random(0)  # noqa: S311
    for number in range(8):
        path = folder / str(number % 4) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.frombytes("RGB", (32, 32), chance.randbytes(32 * 32 * 3)).save(path)
    return folder


def describe(model: nn.Module) -> str:
    """A saved model in one text."""
    compression = compression_of(model)
    recipe = compression.what.to_json() if compression is not None else ""
    return digest([model.state_dict(), recipe, repr(model)])


def make_subjects(folder: Path) -> list[Subject]:
    """One of each kind of file, written by pmvit."""
    model, images = small_vit(), torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(8) % 4
    options: dict[str, Any] = {"progress": False}
    scores = pmvit.measure(model, [(images, labels)], method="scored", **options)
    costs = pmvit.measure(model, [images], method="measured", **options)
    metric = pmvit.measure(model, [images], method="adaptive", rank=8, **options)
    plans = (pmvit.plan(scores, keep=0.5, prune=0.1), pmvit.plan(costs, keep=0.6), pmvit.plan(metric, keep=0.6))
    measured = {"scores.json": scores, "merge_costs.json": costs, "metric.safetensors": metric}
    planned = {"plan.json": plans[0], "split plan.json": plans[1], "adaptive plan.safetensors": plans[2]}
    for name, thing in {**measured, **planned}.items():
        thing.save(folder / name)
    pmvit.save(pmvit.compress(model, plans[1]), folder / "model")
    pmvit.save(pmvit.compress(model, plans[2]), folder / "model.safetensors")
    pictures, tuned = write_pictures(folder / "pictures"), folder / "run"
    tuning = FinetuneConfig(epochs=EPOCHS, batch_size=8 // BATCHES, workers=0, checkpoint_every=1, cpu=True)
    budget = PlanConfig(keep=0.6)
    where: dict[str, Any] = {"train": pictures, "val": pictures, "output": tuned}
    with running_command(after=None):  # as the command line does, for a record of it beside the model
        pmvit.run(model, plan_config=budget, finetune_config=tuning, **where, **options)
    older = sorted((tuned / "checkpoints").iterdir())[0]
    for name in ("alone", "two"):
        shutil.copytree(tuned / "checkpoints", folder / name / "checkpoints")
    (folder / "alone/checkpoints" / older.name).unlink()

    documents: list[tuple[tuple[str, ...], Callable[[Path], Any]]] = [
        (("plan.json", "split plan.json"), lambda path: read_plan(path).to_json()),
        (("scores.json",), lambda path: list(asdict_of(read_measured(path)))),
        (("merge_costs.json",), lambda path: list(asdict_of(read_measured(path)))),
        (("metric.safetensors",), lambda path: list(asdict_of(read_measured(path)))),
        (("adaptive plan.safetensors",), lambda path: describe_adaptive(read_plan(path))),
        (("run/run.json",), lambda path: run_record(path.parent)),
        (("run/finetune.json",), lambda path: asdict(RunRecord.read(path.parent))),
        (("run/results.json",), lambda path: repr(read_results(path.parent))),
        (("run/commands.json",), lambda path: read_commands(path.parent)),
    ]
    subjects = []
    for names, read in documents:
        files = tuple(folder / name for name in names)
        readers = [lambda read=read, files=files: digest([read(path) for path in files])]
        for edited in (False, True):
            title = Path(names[0]).stem.replace("_", " ").replace("finetune", "fine-tuning record")
            subjects.append(Subject(title, files, readers[0], edited))
    alone, two = (restorer(folder / name, tuned) for name in ("alone", "two"))
    newest = sorted((folder / "two/checkpoints").iterdir())[-1]
    (only,) = (folder / "alone/checkpoints").iterdir()
    parts = tuple(folder / "model" / name for name in ("config.json", "plan.json", "model.safetensors"))
    single = folder / "model.safetensors"
    return [
        *subjects,
        Subject("model folder", parts, lambda: describe(pmvit.load(folder / "model")), share=2),
        Subject("model file", (single,), lambda: describe(pmvit.load(single)), share=2),
        Subject("checkpoint", (only,), alone, share=2),
        Subject("checkpoint", (only,), alone, edited=True),
        Subject("newest of two checkpoints", (newest,), two),
        Subject("metrics.jsonl", (tuned / "metrics.jsonl",), lambda: resumed_metrics(tuned)),
    ]


def asdict_of(measured: Any) -> Iterator[tuple[str, Any]]:
    """The fields of something that was measured."""
    return ((name, digest(value) if name != "config" else asdict(value)) for name, value in vars(measured).items())


def describe_adaptive(plan: Any) -> Any:
    """An adaptive plan with its tensors."""
    return [plan.to_json(), plan.tensors()]


def restorer(folder: Path, tuned: Path) -> Callable[[], str]:
    """Goes back to the newest checkpoint of a folder, as a run that is resumed does."""
    record = RunRecord.read(tuned)
    batches: Any = [None] * BATCHES
    model = pmvit.load(tuned / "compressed")
    trainer = Trainer(model, None, batches, Accelerator(cpu=True), record, folder)

    def restore() -> str:
        place = trainer.restore()
        return digest([repr(place), *trainer.learner.snapshot({})])

    return restore


def resumed_metrics(folder: Path) -> str:
    """Goes on with the lines that are whole; that it can is all that is asked."""
    keep_metrics(folder, EPOCHS * BATCHES)
    return ""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` after so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(subject: Subject, expected: str) -> tuple[str, str]:
    """What reading a mutant gives, and what to say of it if that is a failure."""
    try:
        with time_limit(SECONDS), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = subject.read()
    except PmvitError as error:
        return ("refused", "") if "\n" not in str(error) else ("other", f"more than a line: {error}")
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return "other", f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
    if found == expected:
        return "identical", ""
    if any(issubclass(warning.category, PmvitWarning) for warning in said):
        return "refused", ""  # the one before was taken, and that was said
    return ("edited", "") if subject.edited else ("silent", "another result, and nothing was said")


def fuzz(mutants: int, seed: int, folder: Path) -> dict[str, Outcomes]:
    """Make so many mutants of all kinds of files together, the same ones for the same seed, and read each of them."""
    subjects = make_subjects(folder)
    shares = sum(subject.share for subject in subjects)
    table: dict[str, Outcomes] = {}
    left = mutants
    for number, subject in enumerate(subjects, start=1):
        name = f"{subject.name}, edited" if subject.edited else subject.name
        result = table.setdefault(name, Outcomes())
        originals = {path: path.read_bytes() for path in subject.files}
        start = {path: without_seal(data) if subject.edited else data for path, data in originals.items()}
        for path, data in start.items():
            path.write_bytes(data)
        expected = subject.read()
        count = left if number == len(subjects) else mutants * subject.share // shares
        left -= count
        for turn in range(count):
            chance = random.Random(f"{seed} {name} {turn}")  # noqa: S311
            path = chance.choice(subject.files)
            path.write_bytes(damage(path.name)(start[path], chance))
            kind, why = outcome(subject, expected)
            result.counts[kind] += 1
            if why:
                result.failures.append(f"{name}, {path.name}, mutant {turn}: {why}")
            path.write_bytes(start[path])
        for path, data in originals.items():
            path.write_bytes(data)
    return table


def show(table: dict[str, Outcomes]) -> str:
    """The outcomes as a table in Markdown."""
    kinds = {"identical": "as written", "refused": "refused", "edited": "another, edited", "silent": "silent"}
    kinds["other"] = "other error"
    rows = [("file", "tried", *kinds.values())]
    total: Counter[str] = Counter()
    for name, result in table.items():
        total += result.counts
        rows.append((name, *map(str, (result.counts.total(), *(result.counts[kind] for kind in kinds)))))
    rows.append(("all", *map(str, (total.total(), *(total[kind] for kind in kinds)))))
    rows.insert(1, ("---", *("---:" for _ in rows[0][1:])))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=18_900)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        table = fuzz(arguments.mutants, arguments.seed, Path(folder))
    print(show(table))
    failures = [failure for result in table.values() for failure in result.failures]
    print(f"\n{len(failures)} failures in {time.monotonic() - begun:.0f} s")
    print("\n".join(failures[:SHOWN]))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
