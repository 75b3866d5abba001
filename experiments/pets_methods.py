"""Oxford Pets: methods at equal FLOPs, all tuned alike with self-distillation on a CPU, from one tuned ViT-Tiny.

    python -m experiments.pets_methods

Images and weights come from the folder that PMVIT_DATA names (`pets/images/{train,test}`, `weights`). Every run is
checkpointed below `runs/pets_methods`, so that the command can be stopped and started again; rows land in
`pets_methods.json` as they are measured, in the order of `RUNS`: what matters most comes first. Page and learning
curves are made of the rows that are there, at the start and after every run. Accuracy is that of the last epoch:
nothing is selected on the test images.
"""

from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import pmvit
from experiments.common import INTERVALS, ORIGINAL, Row, Rows, interval, numbers, page, percent
from experiments.paired import answers, logits
from experiments.pets import DATA, EPOCHS, TEST, TRAIN, draw_curves, test_loader
from pmvit.config import FinetuneConfig
from pmvit.config.measuring import Measurement
from pmvit.data.loaders import create_loader
from pmvit.data.sources import open_source
from pmvit.files import write_text
from pmvit.hosts import host_of
from pmvit.loading import create_model
from pmvit.measuring import Measured, measure_by, measure_config, read_measured
from pmvit.methods import Evit, Pitome, Tome
from pmvit.methods.base import Method
from pmvit.methods.budget import method_for
from pmvit.numbers.tables import format_number, markdown_table
from pmvit.training.metrics import read_metrics

from timm.layers import set_fused_attn  # isort: skip  # after pmvit, which lets torchvision import

NAME = "pets_methods"
RESULTS = Path(__file__).with_suffix(".json")
FOLDER = Path("runs") / NAME
RECIPE = FinetuneConfig.preset("quick", epochs=EPOCHS, workers=1, mixed_precision="bf16")
LONGER = "original, tuned on"
BUDGETS = {0.73: 0.6, 0.86: 0.7}  # GFLOPs, and the share of the tokens at which the paper's plan costs so much
PLANS: dict[str, Measurement] = {"adaptive": "adaptive", "measured": "measured", "scored": "scored"}
METHODS: dict[str, type[Method]] = {"tome": Tome, "evit": Evit, "pitome": Pitome}
TITLES = {
    "adaptive": "**adaptive plans** (ours)",
    "measured": "**measured plans** (ours), fixed",
    "scored": "plans from scores (Eq. 9), fixed",
    LONGER: LONGER,
}
COMPRESSED, TUNED = "compressed", "tuned"


class Run(NamedTuple):
    """A model to tune: what it is made by, the GFLOPs it may cost, and the seed of the tuning."""

    method: str
    gflops: float | None
    seed: int = 0

    @property
    def folder(self) -> Path:
        return FOLDER / f"{self.method.replace(', ', '-').replace(' ', '-')}-{self.gflops}-{self.seed}"

    def key(self, stage: str) -> Row:
        seed = self.seed if stage == TUNED else 0
        return {"method": self.method, "gflops": self.gflops, "stage": stage, "seed": seed}


ORIGINAL_RUN = Run(ORIGINAL, None)
RUNS = (
    Run("adaptive", 0.73),
    Run("tome", 0.73),
    Run("evit", 0.73),
    Run("measured", 0.73),
    Run("adaptive", 0.86),
    Run("tome", 0.86),
    Run("adaptive", 0.73, 1),
    Run("tome", 0.73, 1),
    Run("scored", 0.73),
    Run(LONGER, None),
    Run("pitome", 0.73),
    Run("evit", 0.73, 1),
    Run("evit", 0.86),
    Run("adaptive", 0.73, 2),
    Run("tome", 0.73, 2),
    Run("evit", 0.73, 2),
)


class Pets:
    """The tuned original, and what the methods make of it."""

    @cached_property
    def original(self) -> nn.Module:
        """ViT-Tiny fine-tuned to the breeds, without a teacher."""
        torch.manual_seed(0)
        weights = DATA / "weights" / "vit_tiny_patch16_224.safetensors"
        return tuned(create_model("vit_tiny_patch16_224", weights, num_classes=37), None, ORIGINAL_RUN)

    @cached_property
    def labels(self) -> Tensor:
        return torch.cat([labels for _, labels in test_loader(self.original)])

    @cached_property
    def reference(self) -> Tensor:
        """The logits of the original."""
        return logits(self.original, test_loader(self.original))

    def make(self, run: Run) -> nn.Module:
        """The model of a run, not tuned."""
        if run.gflops is None:
            return pmvit.load(ORIGINAL_RUN.folder / "last")
        if run.method in METHODS:
            return pmvit.compress(self.original, method_for(self.original, METHODS[run.method], run.gflops))
        options: dict[str, Any] = {"prune": 0.1} if run.method == "scored" else {}
        plan = pmvit.plan(self._source(PLANS[run.method]), gflops=run.gflops, **options)
        return pmvit.compress(self.original, plan)

    def _source(self, method: Measurement) -> Measured:
        """What plans are made from: measured on training images, and kept for a run that goes on."""
        path = FOLDER / (f"{method}.safetensors" if method == "adaptive" else f"{method}.json")
        if not path.exists():
            config = host_of(self.original).data_config()
            loader = create_loader(open_source(TRAIN, 37), config, batch_size=32, workers=1, shuffle=True)
            measure_by(measure_config(self.original, method, {}), self.original, loader).save(path)
        return read_measured(path)

    def row(self, model: nn.Module) -> Row:
        """What a model says of each test image."""
        found = answers(logits(model, test_loader(model)), self.labels, self.reference)
        return {"gflops": pmvit.flops(model).gflops, **found}

    def compressed(self, run: Run) -> Row:
        return self.row(self.make(run))

    def tuned(self, run: Run) -> Row:
        """What a run ends with, and its accuracy after every epoch."""
        model = self.original if run == ORIGINAL_RUN else tuned(self.make(run), self.original, run)
        curve = [line["top1"] for line in read_metrics(run.folder) if line.get("kind") == "epoch"]
        return {**self.row(model), "curve": curve}


def tuned(model: nn.Module, teacher: nn.Module | None, run: Run) -> nn.Module:
    """The model after the last epoch, for the same recipe."""
    options: dict[str, Any] = {**vars(RECIPE), "seed": run.seed}
    pmvit.finetune(model, teacher=teacher, train=TRAIN, val=TEST, output=run.folder, resume=True, **options)
    return pmvit.load(run.folder / "last")


def measure(rows: Rows) -> None:
    """Measure the rows that are not there yet and write them one by one."""
    set_fused_attn(False)  # on CPUs, training in bfloat16 takes less time without
    pets = Pets()
    rows.add(ORIGINAL_RUN.key(TUNED), partial(pets.tuned, ORIGINAL_RUN))
    for run in RUNS:
        before = rows.added
        if run.gflops is not None:
            rows.add(run.key(COMPRESSED), partial(pets.compressed, run))
        rows.add(run.key(TUNED), partial(pets.tuned, run))
        if rows.added > before:
            publish(rows.rows)


def of_seeds(rows: list[Row], method: str, gflops: float | None, stage: str = TUNED) -> dict[int, Row]:
    """What was measured of a method at a budget, by the seed of the tuning."""
    keys = {"method": method, "gflops": gflops, "stage": stage}
    return {row["key"]["seed"]: row for row in rows if {**row["key"], **keys} == row["key"]}


def tuned_methods(rows: list[Row], gflops: float | None) -> list[str]:
    """The methods that were tuned at a budget, in the order of the page."""
    names = dict.fromkeys(run.method for run in RUNS if run.gflops == gflops)
    return [name for name in names if of_seeds(rows, name, gflops)]


def markdown(rows: list[Row]) -> str:
    """The tables, from the measured rows alone."""
    (original,) = of_seeds(rows, ORIGINAL, None).values()
    reached = format_number(100 * float(numbers([original], "correct").mean()), ".1f")
    text = (
        f"ViT-Tiny/16 at 224 px, {len(original['correct']):,} test images. The original was fine-tuned for {EPOCHS} "
        f"epochs and reaches {reached}; then every method took it to the same FLOPs, and was tuned for {EPOCHS} epochs "
        "more with the original as its teacher: the `quick` preset throughout, computing in bfloat16; measured in "
        "float32. Accuracy is that of the last epoch; nothing was selected on the test images. What the paper's plan "
        f"does with other options is on [another page](pets.md), of another original. {INTERVALS}"
    )
    parts = []
    for gflops, keep in BUDGETS.items():
        methods = tuned_methods(rows, gflops)
        if methods:
            parts.append(f"## {gflops} GFLOPs: what the paper's plan costs at keep {keep}")
            parts.append(markdown_table(COLUMNS, [_line(rows, method, gflops, original) for method in methods]))
    longer = of_seeds(rows, LONGER, None)
    if longer:
        more = numbers(list(longer.values()), "correct") - numbers([original], "correct")
        parts.append(
            f"The original itself, tuned for {EPOCHS} epochs more in the same way: "
            f"{interval(more).text('+.1f', 100)} points."
        )
    missing = [run for run in RUNS if run.seed not in of_seeds(rows, run.method, run.gflops)]
    if missing:
        named = (
            f"{title_of(run.method).replace('*', '')}{f' at {run.gflops}' if run.gflops else ''} (seed {run.seed})"
            for run in missing
        )
        parts.append(f"Not measured: {'; '.join(named)}.")
    parts += ["After each epoch, as it was measured on the way, in bfloat16:", f"![Test accuracy]({NAME}.png)"]
    return page(NAME, "Oxford Pets: methods side by side, tuned", rows, text, *parts)


COLUMNS = (
    *("method", "seeds", "GFLOPs", "not tuned", "tuned", "to the original", "agreement", "KL"),
    *("tuned, to adaptive", "KL, to adaptive"),
)


def _line(rows: list[Row], method: str, gflops: float, original: Row) -> list[str]:
    """A method at a budget; the differences to adaptive plans are over the seeds that both have."""
    found, ours = of_seeds(rows, method, gflops), of_seeds(rows, "adaptive", gflops)
    (before,) = of_seeds(rows, method, gflops, COMPRESSED).values()
    tuned_rows = list(found.values())
    correct, kl = numbers(tuned_rows, "correct"), numbers(tuned_rows, "kl")
    differences = ["-", "-"]
    both = [] if method == "adaptive" else sorted(set(found) & set(ours))
    if both:
        pairs = [[each[seed] for seed in both] for each in (found, ours)]
        better, farther = (numbers(pairs[0], name) - numbers(pairs[1], name) for name in ("correct", "kl"))
        differences = [interval(better).text("+.1f", 100), interval(farther).text("+.3f")]
    return [
        title_of(method),
        str(len(found)),
        format_number(before["gflops"], ".3f"),
        percent(numbers([before], "correct").mean()),
        percent(correct.mean()),
        interval(correct - numbers([original], "correct")).text("+.1f", 100),
        percent(numbers(tuned_rows, "agrees").mean()),
        interval(kl).text(".3f"),
        *differences,
    ]


def title_of(method: str) -> str:
    """A method as the page calls it."""
    return TITLES.get(method) or METHODS[method].title


def draw(rows: list[Row]) -> None:
    """Test accuracy after every epoch, the mean of the seeds, from the compressed model on."""
    (original,) = of_seeds(rows, ORIGINAL, None).values()
    curves = []
    for gflops, style in zip(BUDGETS, ("-", "--"), strict=True):
        for method in tuned_methods(rows, gflops):
            before = of_seeds(rows, method, gflops, COMPRESSED)[0]
            each = torch.tensor([row["curve"] for row in of_seeds(rows, method, gflops).values()])
            start = float(numbers([before], "correct").mean())
            curves.append(
                (f"{title_of(method).replace('**', '')}, {gflops} GFLOPs", style, [start, *each.mean(0).tolist()])
            )
    draw_curves(curves, float(numbers([original], "correct").mean()), RESULTS.with_suffix(".png"))


def publish(rows: list[Row]) -> None:
    """The page and its picture, of what is there."""
    write_text(RESULTS.with_suffix(".md"), markdown(rows))
    draw(rows)


def main() -> None:
    rows = Rows(RESULTS)
    if rows.rows:
        publish(rows.rows)
    measure(rows)


if __name__ == "__main__":
    main()
