"""Plans as text: a table, and one small grid a block."""

import io
import math
import shutil
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from pmvit.planning.adaptive import AdaptivePlan
from pmvit.planning.plan import LayerPlan, Plan

KEPT, MERGED, DROPPED = "█", "▒", "·"
SYMBOLS = {"kept": KEPT, "merged": MERGED, "pruned": DROPPED}
WIDEST_GRID_TO_PRINT, WIDEST_BAR = 32, 28


def table(plan: Plan | AdaptivePlan) -> Table:
    """Tokens kept, merged and pruned in each block, and kept in its MLP where that has groups of its own.

    Of an adaptive plan: how many merge before each block, and how many the block runs on.
    """
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    if isinstance(plan, AdaptivePlan):
        for name in ("block", "merge before", "tokens", "share"):
            result.add_column(name, justify="right")
        result.add_column("")
        for index, (r, tokens) in enumerate(zip(plan.merges, plan.tokens, strict=True)):
            share = tokens / plan.metric.num_patches
            result.add_row(str(index), str(r or "-"), str(tokens), f"{share:.1%}", KEPT * round(WIDEST_BAR * share))
        return result
    is_split = any(layer.mlp is not None for layer in plan.layers.values())
    for name in ("block", "kept", *(["in the MLP"] if is_split else []), "merged", "pruned", "share kept"):
        result.add_column(name, justify="right")
    for index in range(plan.depth):
        layer = plan.layers.get(index, LayerPlan.keep_all(plan.num_patches(index)))
        in_mlp = [str((layer.mlp or layer).num_kept)] if is_split else []
        if index not in plan.layers:
            result.add_row(str(index), str(layer.num_kept), *in_mlp, "-", "-", "not compressed")
        else:
            rest = (str(layer.num_merged), str(layer.num_pruned), f"{layer.share_kept:.1%}")
            result.add_row(str(index), str(layer.num_kept), *in_mlp, *rest)
    return result


def sizes_text(plan: AdaptivePlan) -> str:
    """Which grid an adaptive plan is for, and of which images it was measured."""
    grid, measured = (" x ".join(map(str, each)) for each in (plan.metric.grid, plan.measured_at))
    return grid if grid == measured else f"{grid} (measured at {measured}; as large shares merge)"


def describe_adaptive(plan: AdaptivePlan) -> str:
    """What it is, and the table."""
    text = io.StringIO()
    console = Console(file=text, width=100, color_system=None, force_jupyter=False)
    console.print(
        f"Adaptive plan for {plan.depth} blocks; patch tokens: {sizes_text(plan)}. A block runs on {plan.keep:.1%} of "
        "them; which ones merge, every image chooses",
        highlight=False,
    )
    console.print(table(plan))
    return text.getvalue()


def describe(plan: Plan) -> str:
    """The table and, for grids that fit a terminal, the drawing."""
    widest = max((grid[-1] for grid in plan.grids), default=plan.grid[-1])
    text = io.StringIO()
    console = Console(file=text, width=100, color_system=None, force_jupyter=False)  # plain text, in a notebook, too
    console.print(
        f"Plan for {plan.depth} blocks of {_sizes(plan)} patch tokens: keeps {plan.keep:.1%} of those of "
        f"{len(plan.layers)} blocks, reconstruct {plan.reconstruct}"
        + (", attention bias" if plan.attention_bias else ""),
        highlight=False,
    )
    console.print(table(plan))
    columns, _ = shutil.get_terminal_size((100, 24))
    drawing = draw(plan, columns) if widest <= WIDEST_GRID_TO_PRINT else "(the grid is wide: plan.draw() draws it)"
    return text.getvalue() + drawing


def draw(plan: Plan, columns: int = 100) -> str:
    """Grids side by side, as many as fit in `columns` characters; of videos, one frame below the other."""
    legend = f"{KEPT} kept   {MERGED} merged   {DROPPED} pruned"
    bands = []
    for grid, alike in groupby(sorted(plan.layers), key=lambda index: plan.grids[index]):
        width = max(grid[-1], len("block 00"))
        grids = [_grid(plan, index, width) for index in alike]
        a_line = max(1, (columns + 2) // (width + 2))
        for start in range(0, len(grids), a_line):
            rows = zip(*grids[start : start + a_line], strict=True)
            bands.append("\n".join("  ".join(row).rstrip() for row in rows))
    return "\n\n".join([*bands, legend])


def _sizes(plan: Plan) -> str:
    """The grids, each once, in the order of the blocks."""
    return ", ".join(" x ".join(map(str, grid)) for grid in dict.fromkeys(plan.grids or (plan.grid,)))


def _grid(plan: Plan, index: int, width: int) -> list[str]:
    symbols = [SYMBOLS[state] for state in plan.layers[index].states()]
    *frames, rows, columns = (1, *plan.grids[index])
    lines = ["".join(symbols[start : start + columns]) for start in range(0, len(symbols), columns)]
    for frame in range(math.prod(frames) - 1, 0, -1):  # an empty line between two
        lines.insert(frame * rows, "")
    return [line.ljust(width) for line in (f"block {index}", *lines)]
