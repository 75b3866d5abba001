"""Eight bits on top of fewer tokens: ViT-Tiny and DeiT-Tiny as files, in float and in eight bits, whole and adaptive.

    python -m experiments.int8            # agreement, top-1, divergence
    python -m experiments.int8 --speed    # and speed of these very files: on a machine that does nothing else

Plans are made, and eight bits calibrated, on `imagenet/train`, what the files answer is measured on images of
`imagenet/val`, below the folder that PMVIT_DATA names. Rows are kept in `int8.json` as they are measured, so that a
stopped run goes on, the files below `runs/int8`; the tables go to `int8.md`.
"""

import argparse
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import nn

import pmvit
from experiments.adaptive import ADAPTIVE, WithAdaptive
from experiments.common import INTERVALS, ORIGINAL, Row, Rows, page, percent
from experiments.paired import answers, lost, numbers, with_interval
from experiments.without_tuning import DATA, MODELS
from pmvit.files import write_text
from pmvit.numbers.estimates import Estimate
from pmvit.numbers.tables import NOT_MEASURED, format_number, markdown_table
from pmvit.runtime.bench.timing import interleave, run_to_end, speedup
from pmvit.runtime.export.run import Exported
from pmvit.runtime.export.targets import RUNTIMES, Run, runtime_called

NAME = Path(__file__).stem
RESULTS = Path(__file__).with_suffix(".json")
FOLDER = Path("runs") / NAME
IMAGES = 500
SHARE = 0.68  # of the FLOPs of the blocks: 0.86 of 1.25 GFLOPs
TITLES = {"onnx": "ONNX Runtime", "openvino": "OpenVINO"}
PLANS = {ORIGINAL: ORIGINAL, ADAPTIVE: "adaptive plan"}
BITS = {32: "float", 8: "eight bits"}
ROUNDS = {1: 100, 16: 20}  # of timing, by batch


class Subject:
    """One model, its plan, and the files of both; they are made when they are first asked for."""

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def candidates(self) -> WithAdaptive:
        return WithAdaptive(self.name, IMAGES)

    def file(self, plan: str, runtime: str, bits: int) -> Path:
        return FOLDER / f"{self.name}-{plan}-{bits}{RUNTIMES[runtime].suffix}"

    def model(self, plan: str) -> nn.Module:
        return self.candidates.model if plan == ORIGINAL else self.candidates.make(plan, SHARE)

    def export(self, plan: str, runtime: str, bits: int) -> Exported:
        file, images = self.file(plan, runtime, bits), DATA / "imagenet" / "train"
        return pmvit.export(self.model(plan), file, to=runtime, images=images, int8=bits == 8)

    def open(self, plan: str, runtime: str, bits: int) -> Run:
        """A file, made if it is not there, ready to run."""
        if not self.file(plan, runtime, bits).exists():
            self.export(plan, runtime, bits)
        return runtime_called(runtime).open(self.file(plan, runtime, bits), torch.get_num_threads())

    def row(self, plan: str, runtime: str, bits: int) -> Row:
        """Export a model, and let the file answer."""
        exported = self.export(plan, runtime, bits)
        run, batches = self.open(plan, runtime, bits), self.candidates.batches
        found = torch.cat([run(images) for images, _ in batches])
        return {
            "gflops": pmvit.flops(self.model(plan)).gflops,
            "megabytes": exported.megabytes,
            "quantized": next((trial.way for trial in exported.tried if trial.kept), None),
            "predictions": found.argmax(-1).tolist(),
            **answers(found, torch.cat([labels for _, labels in batches]), self.candidates.reference),
        }

    def speeds(self, runtime: str, batch: int) -> Row:
        """Times as fast as the original in float, all files taking turns."""
        images = self.candidates.batches[0][0][:batch]
        runs = {f"{plan}, {bits}": self.open(plan, runtime, bits) for plan in PLANS for bits in BITS}
        times = interleave({name: partial(run_to_end, run, images) for name, run in runs.items()}, ROUNDS[batch])
        return {"speeds": {name: speedup(times, name, f"{ORIGINAL}, 32") for name in runs}}


def measure(rows: Rows, speed: bool) -> None:
    """Measure the rows that are not there yet and write them one by one."""
    for name in MODELS:
        subject = Subject(name)
        for runtime in TITLES:
            for plan in PLANS:
                for bits in BITS:
                    key = {"model": name, "runtime": runtime, "plan": plan, "bits": bits}
                    rows.add(key, partial(subject.row, plan, runtime, bits))
            for batch in ROUNDS if speed else ():
                key = {"model": name, "runtime": runtime, "batch": batch}
                rows.add(key, partial(subject.speeds, runtime, batch))


def markdown(rows: list[Row]) -> str:
    """The tables, from the measured rows alone."""
    text = (
        f"Files of `pmvit.export`, whole and with an adaptive plan at {SHARE} of the FLOPs of the blocks, in float and "
        f"in eight bits, on {IMAGES} images of ImageNet's validation set. Plans are made, eight bits calibrated, and "
        "what stays in float is chosen on training images without labels. Points lost, agreement and KL are to the "
        "original in PyTorch; *to float* is the agreement with the file of the same model in float, and *KL, to "
        f"float* the difference of the two files' KL. {INTERVALS}"
    )
    parts = []
    for name in MODELS:
        own = [row for row in rows if row["key"]["model"] == name and "correct" in row]
        if own:
            original = percent(numbers(own[0], "original").mean())
            parts.append(f"## {name}: original {original}")
            parts.append(markdown_table(COLUMNS, [_line(row, own) for row in own]))
        timed = [row for row in rows if row["key"]["model"] == name and "speeds" in row]
        if timed:
            parts.append("Times as fast as the original in float, the same files taking turns:")
            titles = [f"{PLANS[plan]}, {BITS[bits]}" for plan in PLANS for bits in BITS][1:]
            parts.append(markdown_table(("runtime", *titles, "product of the two"), [_speeds(row) for row in timed]))
    if not any("speeds" in row for row in rows):
        parts.append("Speed is not measured: `python -m experiments.int8 --speed`.")
    return page(NAME, "Eight bits on top of fewer tokens", rows, text, *parts)


COLUMNS = (
    *("runtime", "model", "numbers", "in eight bits", "GFLOPs", "MB", "top-1", "points lost", "agreement", "KL"),
    *("to float", "KL, to float"),
)


def _line(row: Row, rows: list[Row]) -> list[str]:
    key = row["key"]
    (exact,) = (each for each in rows if each["key"] == {**key, "bits": 32})
    to_float = [NOT_MEASURED, NOT_MEASURED]
    if key["bits"] == 8:
        same = torch.tensor(row["predictions"]) == torch.tensor(exact["predictions"])
        to_float = [percent(same.double().mean())]
        to_float.append(with_interval(numbers(row, "kl") - numbers(exact, "kl"), "+.4f"))
    return [
        TITLES[key["runtime"]],
        PLANS[key["plan"]],
        BITS[key["bits"]],
        row["quantized"] or NOT_MEASURED,
        format_number(row["gflops"], ".2f"),
        format_number(row["megabytes"], ".1f"),
        percent(numbers(row, "correct").mean()),
        with_interval(lost(row), ".1f"),
        percent(numbers(row, "agrees").mean()),
        with_interval(numbers(row, "kl"), ".4f"),
        *to_float,
    ]


def _speeds(row: Row) -> list[str]:
    """What files gain; and what fewer tokens and eight bits would gain if neither knew of the other."""
    whole, tokens, both = (
        Estimate(*row["speeds"][name]) for name in (f"{ORIGINAL}, 8", f"{ADAPTIVE}, 32", f"{ADAPTIVE}, 8")
    )
    product = f"{format_number(whole.value * tokens.value, '.2f')}x"
    return [
        f"{TITLES[row['key']['runtime']]}, batch {row['key']['batch']}",
        str(whole),
        str(tokens),
        str(both),
        product,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Eight bits on top of fewer tokens.")
    parser.add_argument("--speed", action="store_true", help="time the files, too")
    rows = Rows(RESULTS)
    measure(rows, parser.parse_args().speed)
    write_text(RESULTS.with_suffix(".md"), markdown(rows.rows))


if __name__ == "__main__":
    main()
