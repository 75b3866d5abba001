"""What several verbs do: make models and loaders of what the user named, measure, show what it costs."""

import atexit
import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from pmvit.cli.options import MERGE_COST_OPTIONS, PLAN_OPTIONS, SCORE_OPTIONS, given
from pmvit.cli.screen import console as console
from pmvit.cli.screen import fail as fail
from pmvit.cli.screen import print_json as print_json
from pmvit.errors import PmvitError

if TYPE_CHECKING:
    from torch import nn

    from pmvit.card import CardDetails
    from pmvit.measuring import MergeCosts, Scores
    from pmvit.measuring.flops import Flops
    from pmvit.planning import Plan

app = typer.Typer()  # the verbs register here
PLANNERS = (None, "scored", "measured")  # what --method may say, once it is settled, for a plan to be made


@dataclass(frozen=True)
class Processes:
    """Which of how many processes this is, and where it computes."""

    index: int
    count: int
    device: str

    @property
    def is_main(self) -> bool:
        return self.index == 0


def processes(device: str) -> Processes:
    """The processes that `accelerate launch` or torchrun started, connected; only the first one prints."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return Processes(0, 1, device)
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu")
    atexit.register(state.destroy_process_group)
    console.quiet = state.process_index > 0
    return Processes(state.process_index, state.num_processes, str(state.device))


def training_device(cpu: bool) -> str:
    """Where training computes unless told otherwise: on the GPU if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() and not cpu else "cpu"


def split_folders(data: str, val: str | None) -> tuple[str, str | None]:
    """Training and validation images: as named, `train` and `val` (or `test`) below one folder, or parts with masks."""
    from pmvit.data.segmentation import has_masks, has_validation

    if has_masks(data):
        return data, val or (data if has_validation(data) else None)
    if (Path(data) / "train").is_dir():
        found = [Path(data) / name for name in ("val", "validation", "test") if (Path(data) / name).is_dir()]
        return str(Path(data) / "train"), val or (str(found[0]) if found else None)
    return data, val


def meter(model: "nn.Module") -> "Callable[[Plan], float]":
    """Measures on random images of the model's size; nothing is measured before a plan has to be."""
    import torch

    from pmvit.hosts import host_of
    from pmvit.runtime.bench.timing import speedup_meter

    device = next(model.parameters()).device
    return speedup_meter(model, torch.randn(16, *host_of(model).input_size(), device=device))


def settle_method(options: dict[str, Any], paper: bool) -> bool:
    """Whether the paper's choices are asked for: `--method paper` is `--paper`, and makes a plan from scores."""
    if options["method"] == "paper":
        options["method"] = "scored"
        return True
    return paper


def follow_paper(options: dict[str, Any], paper: bool) -> None:
    """Score as the paper's code does, unless told otherwise."""
    if paper and options["abs_per_sample"] is None:
        options["abs_per_sample"] = False


def scores_file(output: Path) -> Path:
    """Where the scores of a compressed model go: into its folder, or beside its file."""
    return output.with_suffix(".scores.json") if output.suffix == ".safetensors" else output / "scores.json"


def merge_costs_file(output: Path) -> Path:
    """Where the merge costs of a compressed model go: into its folder, or beside its file."""
    return output.with_suffix(".prices.json") if output.suffix == ".safetensors" else output / "prices.json"


def read_measurements(path: Path) -> "Scores | MergeCosts":
    """The scores or the merge costs in a file, whichever it says it has."""
    import pmvit
    from pmvit.measuring.merge_costs import FORMAT

    try:
        has_prices = json.loads(path.read_text(encoding="utf-8"))["format"] == FORMAT
    except (OSError, ValueError, TypeError, KeyError):
        has_prices = False  # and what else is wrong with the file, loading it will say
    return pmvit.MergeCosts.load(path) if has_prices else pmvit.Scores.load(path)


def plan_options_of(options: dict[str, Any], paper: bool) -> dict[str, Any]:
    """Fields of a `PlanConfig`: the options that were given, over the paper's choices if asked for."""
    from pmvit.planning import PAPER

    chosen = given(options, PLAN_OPTIONS)
    if "weight_rule" in chosen:
        chosen["weights"] = chosen.pop("weight_rule")
    if "skip" in chosen:
        chosen["skip"] = block_numbers(chosen["skip"])
    return {**(PAPER if paper else {}), **chosen}


def block_numbers(texts: list[str]) -> tuple[int, ...]:
    """The blocks that --skip names."""
    if texts == ["none"]:
        return ()
    try:
        return tuple(int(text) for text in texts)
    except ValueError:
        raise PmvitError(f"--skip: expected the number of a block, or none alone; got {' '.join(texts)}") from None


def open_model(
    name: str,
    weights: Path | None,
    arguments: list[str] | None,
    preparation: list[str] | None,
    device: str,
    segmenter: dict[str, Any] | None = None,
) -> "nn.Module":
    """Make a model of what the user named; `segmenter` are those of its options that were given."""
    from pmvit.loading import create_model

    if segmenter and not name.startswith("segmenter:"):
        raise PmvitError(f"{', '.join(segmenter)}: expected beside segmenter:NAME alone; got the model {name}")
    source = source_of(name, weights, arguments, segmenter)
    model = create_model(name, weights, **source["arguments"])
    cast("Any", model).pretrained_cfg.update(pairs("--data-arg", preparation))
    return model.to(device)


def source_of(
    name: str, weights: Path | None, arguments: list[str] | None, segmenter: dict[str, Any] | None
) -> dict[str, Any]:
    """Where a model is from, as `record_source` takes it."""
    more = {"image_size" if option == "size" else option: value for option, value in (segmenter or {}).items()}
    given = {**pairs("--model-arg", arguments), **more}
    return {"source": name, "weights": None if weights is None else str(weights), "arguments": given}


def card_details(model: "nn.Module", name: str, weights: Path | None) -> "CardDetails":
    """What a model card may say of a model that was named so: the command, and where its weights are from if known."""
    from pmvit.card import CardDetails

    command = shlex.join(["pmvit", *sys.argv[1:]])
    library, colon, rest = name.partition(":")
    if weights is not None or Path(name).exists():
        return CardDetails(command=command)
    if colon:
        return CardDetails(command=command, base_model=rest if library in ("hf", "hf-hub") else None)
    known = getattr(model, "pretrained_cfg", {})
    return CardDetails(command=command, base_model=known.get("hf_hub_id"), license=known.get("license"))


def pairs(option: str, texts: list[str] | None) -> dict[str, Any]:
    """Options given as name=value, the values as JSON where they are."""
    parts = [text.partition("=") for text in texts or []]
    for name, equals, _ in parts:
        if not (name and equals):
            raise PmvitError(f"{option}: expected name=value, got {name!r}")
    return {name: _value(text) for name, _, text in parts}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def names_in(text: str) -> list[str]:
    """Names that were given with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def whole_numbers(text: str) -> list[int]:
    """Batch sizes that were given with commas."""
    sizes = text.split(",")
    if wrong := [size for size in sizes if not size.strip().isdigit() or int(size) < 1]:
        raise PmvitError(f"--batch: expected batch sizes with commas, as in 1,16; got {wrong[0]!r}")
    return [int(size) for size in sizes]


def run_score(
    model: "nn.Module", data: str, output: Path, options: dict[str, Any], here: Processes, **reading: Any
) -> "Scores":
    """Score and write the scores; partial sums are kept beside them, so that a stopped run goes on where it was."""
    import pmvit
    from pmvit.files import check_writable
    from pmvit.loading import open_loader

    check_writable(output)
    config = pmvit.ScoreConfig(**given(options, SCORE_OPTIONS))
    masks = {"first_label": options.get("first_label")}
    share = {"shuffle": True, **masks, "process": here.index, "processes": here.count, **reading}
    loader = open_loader(model, data, labels=config.needs_labels, **share)
    partial = output.with_name(output.name + ".partial")
    try:
        scores = pmvit.score(model, loader, config, checkpoint=partial, progress=here.is_main)
    except KeyboardInterrupt:
        fail("stopped; the same command goes on from the last batch", code=130)
    if here.is_main:
        scores.save(output)
        partial.unlink(missing_ok=True)
    if loader.broken:
        console.print(loader.broken.summary(), style="yellow")
    return scores


def run_merge_costs(
    model: "nn.Module", data: str, output: Path, options: dict[str, Any], here: Processes, **reading: Any
) -> "MergeCosts":
    """Price merges and write the merge costs."""
    import pmvit
    from pmvit.files import check_writable
    from pmvit.loading import open_loader

    check_writable(output)
    loader = open_loader(model, data, labels=False, shuffle=True, first_label=options.get("first_label"), **reading)
    merge_costs = pmvit.measure_merge_costs(model, loader, progress=here.is_main, **given(options, MERGE_COST_OPTIONS))
    merge_costs.save(output)
    if loader.broken:
        console.print(loader.broken.summary(), style="yellow")
    return merge_costs


def print_info(plan: "Plan", before: "Flops", after: "Flops") -> None:
    """What a plan does, and what it costs."""
    from pmvit.evaluation.tables import format_number
    from pmvit.planning.drawing import table

    console.print(table(plan))
    share = f"{format_number(after.module_macs / after.macs, '.2%')} of the total"
    cost = f"{format_number(after.module_macs / 1e6, '.2f')} MFLOPs"
    print_costs(before, after, ("merge + reconstruct", "-", cost, share))


def print_costs(before: "Flops", after: "Flops", *rows: tuple[str, ...]) -> None:
    """GFLOPs and parameters of a model and of what was made of it, and more rows."""
    from pmvit.evaluation.tables import format_number

    ratio = f"{format_number(before.macs / after.macs, '.2f')}x fewer"
    counts = (f"{format_number(cost.parameters / 1e6, '.3f')} M" for cost in (before, after))
    costs = [
        ("GFLOPs (MACs)", *(format_number(cost.gflops, ".3f") for cost in (before, after)), ratio),
        ("parameters", *counts, format_number(after.parameters / before.parameters - 1, "+.2%")),
    ]
    console.table(("", "original", "compressed", "ratio"), [*costs, *rows])


def blocks_of(plan: "Plan") -> dict[int, dict[str, int]]:
    """What each block keeps, merges and prunes."""
    return {
        index: {
            "kept": layer.num_kept,
            "kept_in_mlp": (layer.mlp or layer).num_kept,
            "merged": layer.num_merged,
            "pruned": layer.num_pruned,
        }
        for index, layer in plan.layers.items()
    }
