"""Every table and figure of the paper: measure what is missing, write all pages.

    make experiments
    python -m experiments [--data PATH] [--model NAME ...] [--images N] [--tune-data PATH] ...

One process for all, so that scores and models that several have in common are made once. A run that was stopped goes
on where it was; each experiment says how many rows it has and how many it measured now.
"""

from importlib import import_module

from experiments import figure3
from experiments.common import run

NAMES = (
    "figure4_threshold",  # what it measures is read by the pages of Tables I and III
    "table1_deit_swin",
    "table2_mae",
    "table3_augreg",
    "table4_overhead",
    "table_complexity",
    "table5_scorers",
    "table6_weights",
    "table8_iterations",
    "table7_matrices",
    "table9_random_crop",
    "table10_distillation",
)


def main() -> None:
    for name in NAMES:
        module = import_module(f"experiments.{name}")
        run(module.NAME, module.measure, module.markdown)
    figure3.main(figure3.MEASURED)


if __name__ == "__main__":
    main()
