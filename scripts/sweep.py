"""Try every model of the supported families and write the table in the documentation.

    python -m scripts.sweep -o docs/architectures.md
    python -m scripts.sweep -o docs/architectures.md --family "hf vlm"   # this one alone; the others stay as they are

Each model is created at reduced size (few, narrow blocks, a small image; everything else as its library has it),
scored (SAM and ViTDet: measured), planned at keep 0.7, compressed and decompressed. What is checked is in `try_model`.
"""

import argparse
import copy
import gc
import re
from collections import Counter
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pmvit
from pmvit.config.measuring import Loss
from pmvit.hosts import Host, host_of
from pmvit.hosts.outputs import gives_logits, predict
from pmvit.measuring import MergeCosts, Scores
from pmvit.measuring.probe import measurable
from pmvit.merged_mlp import mlp_matrices_of
from pmvit.planning import LayerPlan, Plan
from pmvit.prune_merge import PruneMerge
from pmvit.runtime.bench.variants import in_place_plan
from scripts.sweep_models import FAMILIES, Candidate, candidates

NOT_TRIED = [
    "Not supported: `Siglip2Model` with its own classes (NaFlex: every image of a batch has a grid of its own; the "
    "checkpoints of fixed size load as `SiglipModel`, which is), DPT-hybrid (a convolutional stem inside "
    "transformers), DPT of segmentation_models_pytorch on encoders that are no plain ViT, and vision towers that take "
    "the patches of all images in one row (Qwen2-VL, Qwen3-VL), some of them in windows (Qwen2.5-VL).",
]


@dataclass(frozen=True)
class Outcome:
    """What became of one architecture: `reason` is empty if every check held."""

    family: str
    architecture: str
    reason: str
    details: str = ""


def randomise(model: nn.Module) -> None:
    """Give zero-initialised parts (biases, heads, layer scales) values, so that no mistake hides behind a zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(0.2 * noise)


def check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def difference(output: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((output - expected).abs().max() / expected.abs().max())


def change(model: nn.Module, plan: Plan, images: Tensor) -> float:
    """What a plan changes; where float32 shows a change, float64 tells rounding from a mistake."""
    error = difference(predict(pmvit.compress(model, plan), images), predict(model, images))
    if error < 1e-5:
        return error
    model, images = copy.deepcopy(model).double(), images.double()
    return difference(predict(pmvit.compress(model, plan), images), predict(model, images))


def reordered(host: Host) -> Plan:
    """Every block that can runs on its tokens in another order."""
    layouts = host.layouts()
    plan = in_place_plan(layouts[0].grid, len(layouts), tuple(layout.grid for layout in layouts))
    return replace(plan, layers={index: plan.layers[index] for index, each in enumerate(layouts) if not each.only_mlp})


def check_mlps(model: nn.Module, images: Tensor) -> None:
    """Where MLPs can run on groups of their own: on tokens in another order they change nothing."""
    host = host_of(model)
    blocks = [model.get_submodule(name) for name in host.block_names()]
    if any(host.part_names(block).mlp is None for block in blocks):
        return
    plan = in_place_plan(host.layout.grid, len(blocks))
    layers = {index: replace(LayerPlan.keep_all(order.num_tokens), mlp=order) for index, order in plan.layers.items()}
    plan = replace(plan, layers=layers)
    small = pmvit.compress(model, plan)
    found = [
        mlp_matrices_of(block, host.part_names(block).mlp) for block in map(small.get_submodule, host.block_names())
    ]
    check(all(matrices is not None for matrices in found), "groups of an MLP are left out")
    error = change(model, plan, images)
    check(error < 1e-5, f"an MLP on tokens in another order changes the output by {error:.1e} of its size")


def try_model(candidate: Candidate) -> Outcome:
    """Score, plan, compress, compare and decompress one model; any exception becomes the reason."""
    torch.manual_seed(0)
    family, name, _ = candidate
    try:
        model = candidate.make()
        randomise(model)
        host = host_of(model)
        layout = host.layout
        names = host.block_names()
        grids = tuple(layout.grid for layout in host.layouts())
        images = torch.randn(2, *host.input_size())
        with torch.inference_mode():
            logits = predict(model, images)
        loss: Loss = "labels" if gives_logits(model) and logits.dim() == 2 else "embedding"
        measured: Scores | MergeCosts
        options: dict[str, Any] = {}
        if "scored" in measurable(host):
            batch, options = (images, torch.tensor([0, 1])), {"prune": 0.1}
            measured = pmvit.measure(model, [batch], method="scored", loss=loss, progress=False)
            check(measured.values.shape == (len(names), layout.num_patches), "scores have the wrong shape")
        else:
            measured = pmvit.measure(model, [images], method="measured", progress=False)
        small, biased = (
            pmvit.compress(model, pmvit.plan(measured, keep=0.7, attention_bias=bias, **options))
            for bias in (False, True)
        )
        with torch.inference_mode():
            for compressed in (small, biased):
                output = predict(compressed, images)
                check(output.shape == logits.shape and bool(output.isfinite().all()), "compressed: not finite")
                check(difference(output, logits) > 1e-6, "compression changed nothing")
            merges = any(isinstance(module, PruneMerge) for module in small.modules())
            check(
                not merges or difference(predict(small, images), predict(biased, images)) > 1e-6,
                "the bias changes nothing",
            )
            error = change(model, Plan.keep_all(layout.grid, len(names), grids=grids), images)
            check(error < 1e-5, f"an all-kept plan changes the output by {error:.1e} of its size")
            error = change(model, reordered(host), images)
            check(error < 1e-5, f"tokens in another order change the output by {error:.1e} of its size")
            check_mlps(model, images)
        blocks = [model.get_submodule(block) for block in names]
        pmvit.decompress(pmvit.compress(model, pmvit.plan(measured, keep=0.7), inplace=True))
        check(all(model.get_submodule(n) is b for n, b in zip(names, blocks, strict=True)), "decompress makes blocks")
        with torch.inference_mode():
            check(torch.equal(predict(model, images), logits), "decompress changed the output")
    except Exception as error:
        return Outcome(family, name, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    finally:
        gc.collect()
    return Outcome(family, name, "", f"{' x '.join(map(str, layout.grid))} + {layout.num_prefix}")


def versions() -> str:
    names = ("timm", "transformers", "torchvision", "segmentation_models_pytorch")
    return ", ".join(f"{name} {version(name)}" for name in names)


def markdown(outcomes: list[Outcome]) -> str:
    """The table of the documentation."""
    passed = Counter(o.family for o in outcomes if not o.reason)
    tried = Counter(o.family for o in outcomes)
    lines = [
        "# Supported architectures",
        "",
        f"Made by `python -m scripts.sweep -o docs/architectures.md` with {versions()}: every architecture of these "
        "families is created at reduced size, scored (SAM and ViTDet: measured), compressed at keep 0.7 with and "
        "without the attention bias, run, and decompressed. An all-kept plan and one that only reorders the tokens "
        "must give the original output to 1e-5 (in float64 where float32 rounds by more).",
        "",
        f"**{sum(passed.values())} of {sum(tried.values())} architectures pass.**",
        "",
        "| family | what | tried | passed |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{family}` | {what} | {tried[family]} | {passed[family]} |" for family, what in FAMILIES.items()]
    lines += ["", *NOT_TRIED]
    failures = [o for o in outcomes if o.reason]
    if failures:
        lines += ["", "| does not pass | why |", "|---|---|"]
        lines += [f"| `{o.architecture}` | {o.reason} |" for o in failures]
    lines += ["", "<details><summary>All that pass (tokens at the reduced size: grid + prefix)</summary>", ""]
    for family in FAMILIES:
        names = [f"`{o.architecture}` ({o.details})" for o in outcomes if o.family == family and not o.reason]
        lines += [f"**{family}**: {', '.join(names)}", ""]
    lines.append("</details>")
    return "\n".join(lines) + "\n"


def written(page: str) -> list[Outcome]:
    """What a page says of the families in it, all of whose architectures pass."""
    if "| does not pass |" in page:
        raise SystemExit("expected a page on which all pass; others are there without their family: leave out --family")
    lines = re.findall(r"^\*\*(.+?)\*\*: (.+)$", page, flags=re.MULTILINE)
    found = [(family, *each) for family, line in lines for each in re.findall(r"`(.+?)` \((.+?)\)", line)]
    return [Outcome(family, architecture, "", details) for family, architecture, details in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="try this one alone; may be repeated")
    arguments = parser.parse_args()
    asked = arguments.family or list(FAMILIES)
    outcomes = [try_model(candidate) for candidate in candidates() if candidate.family in asked]
    if arguments.family:
        before = written(arguments.output.read_text(encoding="utf-8"))
        outcomes += [outcome for outcome in before if outcome.family not in asked]
    arguments.output.write_text(markdown(outcomes), encoding="utf-8")
    for family in asked:
        reasons = [o.reason for o in outcomes if o.family == family]
        print(f"{family}: {reasons.count('')} of {len(reasons)}")
    print(f"{sum(not o.reason for o in outcomes)} of {len(outcomes)} architectures pass")
    for outcome in outcomes:
        if outcome.reason:
            print(f"  {outcome.architecture}: {outcome.reason}")


if __name__ == "__main__":
    main()
