"""What a report says of a model in words: what it is, what was done to it, and how to do it again."""

import json

from pmvit.compression import compression_of, plan_of
from pmvit.hosts import host_of
from pmvit.measuring.flops import Flops
from pmvit.reporting.saved_model import SavedModel
from pmvit.saving.commands import this_command


def subtitle(saved: SavedModel) -> str:
    """One sentence on what was done to the model."""
    compression, plan = compression_of(saved.model), plan_of(saved.model)
    title = compression.what.title if compression is not None else ""
    if plan is None:
        return f"Compressed by {title}."
    tuned = " and fine-tuned" if saved.tuning is not None or saved.metrics else ""
    return f"Compressed by {title}{tuned}: its blocks run on {100 * plan.keep:.0f} % of the patch tokens."


def what(saved: SavedModel, costs: tuple[Flops, Flops], compared_with: str) -> list[tuple[str, str]]:
    """What was compressed, and how, in short."""
    host, (before, after) = host_of(saved.model), costs
    channels, height, width = host.input_size()
    layouts = host.layouts()
    grids = ", ".join(f"{rows} × {columns}" for rows, columns in dict.fromkeys(layout.grid for layout in layouts))
    said = [
        ("Model", saved.config["model"]["architecture"]),
        ("Input", f"{height} × {width} pixels, {channels} channel{'s' if channels > 1 else ''}"),
        ("Blocks", f"{len(layouts)}, on {grids} patches"),
        ("Multiply-accumulates", f"{before.macs / 1e9:.3f} G → {after.macs / 1e9:.3f} G"),
        ("Parameters", f"{before.parameters / 1e6:.2f} M → {after.parameters / 1e6:.2f} M"),
    ]
    compression, plan = compression_of(saved.model), plan_of(saved.model)
    if plan is not None:
        said.append(("Merging and putting back", f"{100 * after.module_macs / after.macs:.2f} % of the cost"))
        back = {"residual": "each group's update", "pinv": "the pseudo-inverse"}
        said.append(("Put back by", back[plan.reconstruct]))
    elif compression is not None:
        options = json.loads(compression.what.to_json())["options"]
        told = ", ".join(f"{name} {value}" for name, value in options.items())
        said.append(("Method", f"{compression.what.title}: {told}"))
    said.append(("Compared with", compared_with))
    if saved.reference.name == "uncompressed":
        said.append(("", "The original is not at hand: --original names it."))
    return said


def commands(saved: SavedModel) -> list[str]:
    """The commands that made the model, and the one that makes the report."""
    made = [str(one["command"]) for one in saved.commands]
    command = this_command()
    return [*made, command] if command.startswith("pmvit report") else made


def settings(saved: SavedModel) -> list[tuple[str, list[tuple[str, str]]]]:
    """The configurations that are on record, each with its name."""
    plan = plan_of(saved.model)
    made_by = dict(plan.made_by) if plan is not None else {}
    titles = {"scores": "Scores", "plan": "Plan"}
    found = [(titles.get(name, name), values) for name, values in made_by.items() if isinstance(values, dict)]
    if saved.tuning is not None:
        found.append(("Fine-tuning", saved.tuning.get("config") or {}))
    return [(title, [(name, json.dumps(value)) for name, value in values.items()]) for title, values in found]
