"""Try every architecture of the supported timm families and write the table in the documentation.

    python -m scripts.sweep -o docs/architectures.md

Each architecture is created at reduced size (few, narrow blocks, a small image; everything else as timm has it),
scored, planned at keep 0.7, compressed and decompressed. What is checked is in `try_architecture`.
"""

import argparse
import gc
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pmvit
from pmvit.models import adapter_for
from pmvit.runtime.contenders import in_place_plan
from scripts import sweep_swin

import timm  # isort: skip  # after pmvit, which lets torchvision import
import timm.layers

FAMILIES = {
    "vision_transformer": "VisionTransformer (ViT, CLIP, SigLIP, DINO, DINOv2, AIMv2, ...)",
    "deit": "DeiT, distilled DeiT, DeiT-III",
    "vision_transformer_hybrid": "hybrids (convolutional stem)",
    "vision_transformer_relpos": "ViT with relative position bias",
    "beit": "BEiT",
    "eva": "EVA, EVA-02, DINOv3, Perception Encoder (rotary embedding)",
    **sweep_swin.FAMILIES,
}
DEPTH, HEADS, HEAD_DIM, CLASSES = 2, 6, 16, 11


@dataclass(frozen=True)
class Outcome:
    """What became of one architecture: `reason` is empty if every check held."""

    family: str
    architecture: str
    reason: str
    details: str = ""


def architectures() -> list[tuple[str, str]]:
    """All (family, architecture) pairs of timm's registry."""
    plain = [family for family in FAMILIES if family not in sweep_swin.FAMILIES]
    return [(family, name) for family in plain for name in timm.list_models(module=family)] + sweep_swin.architectures()


def create_reduced(name: str) -> nn.Module:
    """Create an architecture with two blocks of width 96 and a grid of about 6 x 6 tokens."""
    with torch.device("meta"):
        full = timm.create_model(name)
    patch = [side // cells for side, cells in zip(full.patch_embed.img_size, full.patch_embed.grid_size, strict=True)]
    size = {"img_size": (patch[0] * 6, patch[1] * 6)}
    blocks = {"depth": DEPTH, "num_classes": CLASSES}
    narrow = {"embed_dim": HEADS * HEAD_DIM, "num_heads": HEADS}
    grouped = {"num_kv_heads": (HEADS // 2, HEADS)}
    attempts: list[dict[str, Any]] = [
        {**blocks, **narrow, **size},
        {**blocks, **narrow, **size, **grouped},  # grouped-query attention wants one number a block
        {**blocks, **size},  # a stem that fixes the width
    ]
    for arguments in attempts:
        try:
            model: nn.Module = timm.create_model(name, **arguments)
        except (TypeError, AssertionError, RuntimeError, ValueError):
            continue
        return model.eval()
    raise RuntimeError("cannot be created at reduced size")


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


def try_architecture(family: str, name: str) -> Outcome:
    """Score, plan, compress, compare and decompress one architecture; any exception becomes the reason."""
    torch.manual_seed(0)
    try:
        model = sweep_swin.create_reduced(name, CLASSES) if family in sweep_swin.FAMILIES else create_reduced(name)
        randomise(model)
        adapter = adapter_for(model)
        layout = adapter.layout(model)
        grids = tuple(layout.grid for layout in adapter.layouts(model))
        images = torch.randn(2, *adapter.input_size(model))
        labels = torch.tensor([0, 1])
        with torch.inference_mode():
            logits = model(images)
        if logits.dim() != 2:
            return Outcome(family, name, f"its output is {tuple(logits.shape)}, not logits")
        scores = pmvit.score(model, [(images, labels)], progress=False)
        check(scores.values.shape == (len(grids), layout.num_patches), "scores have the wrong shape")
        small = pmvit.compress(model, pmvit.plan(scores, keep=0.7, prune=0.1))
        biased = pmvit.compress(model, pmvit.plan(scores, keep=0.7, prune=0.1, attention_bias=True))
        same = pmvit.compress(model, pmvit.Plan.keep_all(layout.grid, len(grids), grids=grids))
        permuted = pmvit.compress(model, in_place_plan(layout.grid, len(grids), grids))
        with torch.inference_mode():
            for compressed in (small, biased):
                output = compressed(images)
                check(
                    output.shape == logits.shape and bool(output.isfinite().all()), "compressed logits are not finite"
                )
                check(not torch.allclose(output, logits, atol=1e-6), "compression changed nothing")
            check(torch.allclose(same(images), logits, atol=1e-5), "an all-kept plan changes the logits")
            error = ((permuted(images) - logits).abs().max() / logits.abs().max()).item()
            check(error < 1e-5, f"tokens in another order change the logits by {error:.1e} of their size")
        names = adapter.block_names(model)
        blocks = [model.get_submodule(block) for block in names]
        pmvit.decompress(pmvit.compress(model, pmvit.plan(scores, keep=0.7), inplace=True))
        check(all(model.get_submodule(n) is b for n, b in zip(names, blocks, strict=True)), "decompress makes blocks")
        with torch.inference_mode():
            check(torch.equal(model(images), logits), "decompress changed the logits")
    except Exception as error:
        return Outcome(family, name, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    finally:
        gc.collect()
    return Outcome(family, name, "", f"{layout.grid[0]} x {layout.grid[1]} + {layout.num_prefix}")


def markdown(outcomes: list[Outcome]) -> str:
    """The table of the documentation."""
    passed = Counter(o.family for o in outcomes if not o.reason)
    tried = Counter(o.family for o in outcomes)
    lines = [
        "# Supported architectures",
        "",
        f"Made by `python -m scripts.sweep -o docs/architectures.md` with timm {timm.__version__}: every architecture "
        "of these families is created at reduced size, scored, compressed at keep 0.7 with and without the attention "
        "bias, run, and decompressed. An all-kept plan and one that only reorders the tokens must give the original "
        "logits to 1e-5.",
        "",
        f"**{sum(passed.values())} of {sum(tried.values())} architectures pass.**",
        "",
        "| timm module | what | tried | passed |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{family}` | {what} | {tried[family]} | {passed[family]} |" for family, what in FAMILIES.items()]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    outcomes = [try_architecture(family, name) for family, name in architectures()]
    arguments.output.write_text(markdown(outcomes), encoding="utf-8")
    print(f"{sum(not o.reason for o in outcomes)} of {len(outcomes)} architectures pass")
    for outcome in outcomes:
        if outcome.reason:
            print(f"  {outcome.architecture}: {outcome.reason}")


if __name__ == "__main__":
    main()
