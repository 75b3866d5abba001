"""Parameters and FLOPs of the module alone: the paper's table `tab_complex`.

python -m experiments.table_complexity
"""

from functools import partial
from typing import Any, get_args

import pmvit
from experiments.common import Row, Rows, Settings, page, run
from pmvit.config.training import Learn
from pmvit.numbers.tables import format_number, markdown_table

import timm  # isort: skip  # after pmvit, which lets torchvision import

NAME = "table_complexity"
MODELS = {  # the paper's parameters and FLOPs, of the model and of the module in it
    "vit_tiny_patch16_224": ("5.7 M", "0.06 M (1 %)", "1.29 G", "0.22 M (0.02 %)"),
    "vit_small_patch16_224": ("22.1 M", "0.06 M (0.2 %)", "4.68 G", "0.45 M (0.04 %)"),
}
KEEPS = (0.8, 0.7, 0.6)
TEXT = """Counted on the graph that runs, with as many tokens kept in every block and 0.1 of them pruned. *Group* is
the form that merges by sums over each group, one weight of M and one of R a token, the default; *dense* writes M and
R out, as the paper's code does. The paper does not say at which keep it counts. *6 N D* is its own formula for one
block, N the tokens before merging and D the width: what it prints as FLOPs of the module is that of one block, not of
all twelve. What it prints as parameters is close to the dense matrices of one block at keep 0.8. Its last share does
not follow from its figures: 0.45 M are 0.01 % of 4.68 G."""


def measure(rows: Rows, settings: Settings) -> None:
    for name in MODELS:
        for keep in KEEPS:
            for learn in get_args(Learn):
                rows.add({"model": name, "keep": keep, "learn": learn}, partial(count, name, keep, learn))


def count(model: str, keep: float, learn: Learn) -> Row:
    whole_model: Any = timm.create_model(model)
    plan = pmvit.plan(
        pmvit.measure(whole_model, [], method="scored", scorer="random"), keep=keep, prune=0.1, scope="local"
    )
    whole, small = pmvit.flops(whole_model), pmvit.flops(pmvit.compress(whole_model, plan, learn=learn))
    return {
        "parameters": whole.parameters,
        "module_parameters": small.module_parameters,
        "macs": whole.macs,
        "module_macs": small.module_macs,
        "blocks": len(whole_model.blocks),
        "formula": 6 * (1 + whole_model.patch_embed.num_patches) * whole_model.embed_dim,
    }


def markdown(rows: list[Row]) -> str:
    titles = [
        "model",
        "keep",
        "form",
        "parameters",
        "of them M and R",
        "a block",
        "FLOPs",
        "of them the module",
        "a block",
    ]
    lines = []
    for row in rows:
        key = row["key"]
        lines.append(
            [
                key["model"],
                str(key["keep"]),
                key["learn"],
                f"{format_number(row['parameters'] / 1e6, '.1f')} M",
                _part(row["module_parameters"], row["parameters"]),
                f"{format_number(row['module_parameters'] / row['blocks'] / 1e6, '.4f')} M",
                f"{format_number(row['macs'] / 1e9, '.2f')} G",
                _part(row["module_macs"], row["macs"]),
                f"{format_number(row['module_macs'] / row['blocks'] / 1e6, '.3f')} M",
            ]
        )
    formulas = {row["key"]["model"]: row["formula"] for row in rows}
    printed = [[name, *figures, f"{format_number(formulas[name] / 1e6, '.3f')} M"] for name, figures in MODELS.items()]
    paper = markdown_table(
        ["the paper's", "parameters", "of them the module", "FLOPs", "of them the module", "6 N D"], printed
    )
    return page(
        NAME, "Parameters and FLOPs of the module (tab_complex)", rows, TEXT, markdown_table(titles, lines), paper
    )


def _part(of_module: float, of_all: float) -> str:
    return f"{format_number(of_module / 1e6, '.3f')} M ({format_number(of_module / of_all, '.2%')})"


if __name__ == "__main__":
    run(NAME, measure, markdown)
