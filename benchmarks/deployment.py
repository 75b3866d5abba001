"""Speed of compressed models in every runtime, side by side: `python -m benchmarks.deployment`.

Every place (model, runtime, batch) is one interleaved run. Rows land in `deployment.json` and on the page,
`deployment.md`, as they are measured, so that the command can be stopped and started again. Weights do not change
speeds: DeiT-Small's and Swin's are random. DeiT-Small has the plan of DeiT-Tiny, which was measured on 256 real images
and fits wherever the grid is the same; Swin has one from random scores, DINOv2, whose grid is another, one measured on
noise. Models of transformers and torchvision have the size of DeiT-Small and random weights. About 45 minutes on two
cores.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import pmvit
from benchmarks.__main__ import deit_tiny, merge_costs_of, noise
from pmvit.files import write_text
from pmvit.measuring import MergeCosts, Scores
from pmvit.numbers.estimates import Estimate
from pmvit.numbers.tables import format_number

import timm  # isort: skip  # after pmvit, which lets torchvision import

OUTPUT = Path(__file__).with_suffix(".json")
RUNTIMES = ("eager", "onnxruntime", "openvino")
OTHERS = "other methods"
ARCHITECTURES = {"DeiT-Small": "deit_small_patch16_224", "Swin-Tiny": "swin_tiny_patch4_window7_224"}
SMALL: dict[str, Any] = {"num_labels": 1000, "hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6}
Row = dict[str, Any]


def places() -> Iterator[tuple[str, float, str, int, tuple[str, ...]]]:
    """Model, keep, runtime, batch and variants of every run; few variants a run, for they share caches."""
    usual = ("compressed", "optimized", "bound", "original-optimized")
    for keep in (0.6, 0.7):
        for name in ("DeiT-Small", "DeiT-Tiny"):
            for batch in (1, 16):
                for runtime in RUNTIMES:
                    yield name, keep, runtime, batch, usual
    for name in ("ViT-S of transformers", "DINOv2-S of transformers", "ViT-S of torchvision"):
        for batch in (1, 16):
            for runtime in RUNTIMES:
                yield name, 0.6, runtime, batch, usual
    yield "Swin-Tiny", 0.7, "eager", 8, usual
    for name in ("DeiT-Small", "DeiT-Tiny"):
        for batch in (1, 16):
            yield name, 0.6, f"eager, {OTHERS}", batch, ("optimized", "tome", "direct")
    for runtime in ("onnxruntime", "openvino"):
        yield "DeiT-Tiny", 0.6, f"{runtime}, {OTHERS}", 1, ("optimized", "tome", "direct")
        yield "DeiT-Tiny", 0.6, f"{runtime}, int8", 1, ("optimized", "original-int8", "optimized-int8")
    for batch in (2, 8, 32, 64):
        for runtime in RUNTIMES:
            yield "DeiT-Tiny", 0.6, runtime, batch, ("optimized",)


def model_called(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "DeiT-Tiny":
        return deit_tiny()
    if name in ARCHITECTURES:
        return timm.create_model(ARCHITECTURES[name]).eval()
    if name == "ViT-S of torchvision":
        from torchvision.models import VisionTransformer

        vision = VisionTransformer(224, 16, num_layers=12, num_heads=6, hidden_dim=384, mlp_dim=1536)
        return cast("nn.Module", vision.eval())
    import transformers

    if name == "DINOv2-S of transformers":
        dinov2 = transformers.Dinov2Config(**SMALL, image_size=224, patch_size=14)
        return cast("nn.Module", transformers.Dinov2ForImageClassification(dinov2).eval())
    vit = transformers.ViTConfig(**SMALL, intermediate_size=1536)
    return cast("nn.Module", transformers.ViTForImageClassification(vit).eval())


def measured(name: str, model: nn.Module, of_deit: MergeCosts) -> MergeCosts | Scores:
    """What the plan of a model is made from."""
    if name == "Swin-Tiny":
        return pmvit.measure(model, [], method="scored", scorer="random")
    if name == "DINOv2-S of transformers":
        return pmvit.measure(model, [noise(model)], method="measured", progress=False)
    return of_deit


def measure(rows: list[Row]) -> None:
    of_deit = merge_costs_of(deit_tiny())
    for name, keep, runtime, batch, against in places():
        key = (name, keep, runtime, batch)
        if any((row["model"], row["keep"], row["place"], row["batch"]) == key for row in rows):
            continue
        model = model_called(name)
        small = pmvit.compress(model, pmvit.plan(measured(name, model, of_deit), keep=keep))
        rounds = 30 if batch == 1 else 10
        result = pmvit.benchmark(
            small, against=against, runtimes=[runtime.partition(",")[0]], batches=[batch], rounds=rounds
        )
        rows += [{"model": name, "keep": keep, "place": runtime, **asdict(row)} for row in result.rows]
        write_text(OUTPUT, json.dumps({"environment": result.environment, "rows": rows}, indent=1) + "\n")
        write_text(OUTPUT.with_suffix(".md"), markdown(rows, result.environment))
        print(key, {row.variant: str(row.speedup or row.failure) for row in result.rows}, flush=True)


def markdown(rows: list[Row], environment: dict[str, Any]) -> str:
    lines = [
        "# Speed in every runtime",
        "",
        f"`python -m benchmarks.deployment` made this page: torch {environment['torch']}, {environment['threads']} CPU "
        "threads. Times as fast as the original in the same runtime, medians of paired rounds with 95 % bootstrap "
        "intervals; all variants of a line took turns in one run. *Bound* is the equal-token bound: the original's "
        "blocks on as many tokens, sliced away, nothing merged and nothing reconstructed. *Optimised* is what export "
        "writes; *original optimised* is what the passes do for the original. Plans are measured ones, with groups for "
        "attention and for MLPs; Swin's is from scores.",
        "",
        "| model | keep | runtime | batch | FLOPs | compressed | optimised | bound | compressed / bound "
        "| optimised / bound | original optimised |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    by_place: dict[tuple[Any, ...], dict[str, Row]] = {place[:4]: {} for place in places()}
    for row in rows:
        by_place.setdefault((row["model"], row["keep"], row["place"], row["batch"]), {})[row["variant"]] = row
    for place, found in by_place.items():
        if "bound" in found:
            ratio = found["original"]["gflops"] / found["compressed"]["gflops"]
            cells = [str(value) for value in place] + [f"{format_number(ratio, '.2f')}x"]
            cells += [ratio_of(found.get(name), "speedup") for name in ("compressed", "optimized", "bound")]
            cells += [ratio_of(found[name], "of_bound") for name in ("compressed", "optimized")]
            lines.append(f"| {' | '.join(cells)} | {ratio_of(found.get('original-optimized'), 'speedup')} |")
    lines += ["", "## Other methods, at keep 0.6", "", "ToMe has the r that comes nearest in FLOPs.", ""]
    lines += ["| model | runtime | batch | optimised | ToMe | Direct |", "|---|---|---|---|---|---|"]
    for (name, _, runtime, batch), found in by_place.items():
        if "tome" in found:
            cells = [ratio_of(found.get(variant), "speedup") for variant in ("optimized", "tome", "direct")]
            lines.append(f"| {name} | {runtime.partition(',')[0]} | {batch} | {' | '.join(cells)} |")
    lines += ["", "## Fewer tokens and eight bits", ""]
    lines += [
        "| runtime | optimised | original, int8 | optimised, int8 | product of the two |",
        "|---|---|---|---|---|",
    ]
    for (_, _, runtime, _), found in by_place.items():
        if "optimized-int8" in found:
            parts = [found[name] for name in ("optimized", "original-int8", "optimized-int8")]
            product = (
                parts[0]["speedup"][0] * parts[1]["speedup"][0] if all(part["speedup"] for part in parts) else None
            )
            cells = [ratio_of(part, "speedup") for part in parts]
            cells.append(f"{format_number(product, '.2f')}x" if product else "-")
            lines.append(f"| {runtime} (DeiT-Tiny, keep 0.6, batch 1) | {' | '.join(cells)} |")
    lines += ["", "## By batch size: DeiT-Tiny at keep 0.6, optimised", ""]
    batches = sorted({place[3] for place, found in by_place.items() if found})
    lines += [f"| runtime | {' | '.join(str(batch) for batch in batches)} |", f"|---|{'---|' * len(batches)}"]
    for runtime in RUNTIMES:
        cells = [
            ratio_of(by_place.get(("DeiT-Tiny", 0.6, runtime, b), {}).get("optimized"), "speedup") for b in batches
        ]
        lines.append(f"| {runtime} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ratio_of(row: Row | None, field: str) -> str:
    if row is None:
        return "-"
    return str(Estimate(*row[field])) if row[field] is not None else "does not run"


def main() -> None:
    rows: list[Row] = json.loads(OUTPUT.read_text())["rows"] if OUTPUT.exists() else []
    measure(rows)


if __name__ == "__main__":
    main()
