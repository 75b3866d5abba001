"""Collect the pages that experiments and benchmarks wrote into one page of the documentation.

    python -m scripts.results

makes the tables of the README, too. Nothing there is typed by hand. A new page needs one line in `ORDER`, which gives
it a place and a title; until it has one, it stands at the end.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath

from pmvit.errors import PmvitError
from pmvit.files import write_text
from scripts import readme

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/results.md"
FOLDERS = ("experiments", "benchmarks")
ORDER = {
    "Classification": {
        "experiments/equal_speed.md": "At equal speed, not tuned",
        "experiments/comparison.md": "Side by side with other methods",
        "experiments/adaptive.md": "Plans that adapt to the image, not tuned",
        "experiments/measured_planner.md": "Measured plans, not tuned",
        "experiments/calibration.md": "Measured plans, calibrated without labels",
        "experiments/measured_tuned.md": "Measured plans, tuned",
        "experiments/without_tuning.md": "Plans from scores, not tuned",
        "experiments/pets.md": "Compressed and tuned on Oxford Pets",
        "experiments/token_distillation.md": "Token-level distillation",
    },
    "Segmentation and feature maps": {
        "experiments/pets_masks.md": "Segmenter on the Pets masks",
        "experiments/figure3.md": "mIoU against cost (the paper's Fig. 3)",
        "experiments/adaptive_features.md": "Embeddings and all tokens with adaptive plans, not tuned",
        "experiments/feature_maps.md": "Feature maps after compression",
    },
    "Speed": {
        "benchmarks/results.md": "Eager PyTorch",
        "benchmarks/deployment.md": "Every runtime",
        "benchmarks/adaptive_speed.md": "Adaptive plans in every runtime",
    },
    "The paper's tables": {
        "experiments/table1_deit_swin.md": "Table I: DeiT and Swin",
        "experiments/table2_mae.md": "Table II: ViT-Base and others",
        "experiments/table3_augreg.md": "Table III: AugReg, not tuned",
        "experiments/table4_overhead.md": "Table IV: overhead of the operations",
        "experiments/table5_scorers.md": "Table V: scorers",
        "experiments/table6_weights.md": "Table VI: weight rules",
        "experiments/table7_matrices.md": "Table VII: learnable and frozen matrices",
        "experiments/table8_iterations.md": "Table VIII: batches to score on",
        "experiments/table9_random_crop.md": "Table IX: random crops",
        "experiments/table10_distillation.md": "Table X: self-distillation",
        "experiments/figure4_threshold.md": "Fig. 4: how much to prune",
    },
    "Cost": {
        "experiments/table_complexity.md": "What merging and reconstructing cost",
        "experiments/segmenter_cost.md": "Segmenter ViT-L/16 at 640 x 640",
    },
}
REST = "More"
HEAD = """# Results

`python -m scripts.results` made this page of the pages that experiments and benchmarks write beside themselves. Each
says how it was measured; the command makes it again.
"""
HEADING = re.compile(r"(#+) (.+)")
LINK = re.compile(r"\]\(([^)#:]+)\)")
COMMAND = re.compile(r"`((?:python -m|make) [^`]+)`")
COMMIT = re.compile(r"\bcommit `?([0-9a-f]{7,40})\b")


def name_of(path: str) -> str:
    """What a page's part of the results is linked by: `experiments/pets.md` is `#pets`, other folders' say which."""
    folder, _, file = path.partition("/")
    stem = file.removesuffix(".md")
    return stem if folder == "experiments" else f"{folder}-{stem}"


def collect(root: Path = ROOT) -> str:
    """The text of the page, from what lies below `root` now.

    Raises:
        PmvitError: If `ORDER` names a page that is not there.
    """
    there = sorted(str(path.relative_to(root)) for folder in FOLDERS for path in (root / folder).glob("*.md"))
    declared = [path for pages in ORDER.values() for path in pages]
    if missing := sorted(set(declared) - set(there)):
        raise PmvitError(f"expected a page at {missing[0]}; there is none: run what makes it, or take it out of ORDER")
    texts = {path: (root / path).read_text(encoding="utf-8") for path in there}
    rest = {path: _title(texts[path]) for path in there if path not in declared}
    sections = {**ORDER, **({REST: rest} if rest else {})}
    index = ["| | made with |", "|---|---|"]
    parts = []
    for section, pages in sections.items():
        parts.append(f"## {section}")
        for path, title in pages.items():
            index.append(f"| [{title}](#{name_of(path)}) | {_made_with(texts[path])} |")
            body = "\n".join(_lines(texts[path], path, there)).strip()
            parts.append(f'<a id="{name_of(path)}"></a>\n\n### {title}\n\n{body}')
    return "\n\n".join([HEAD.strip(), "\n".join(index), *parts]) + "\n"


def _title(text: str) -> str:
    found = HEADING.match(text)
    return found[2] if found else "Untitled"


def _made_with(text: str) -> str:
    command, commit = COMMAND.search(text), COMMIT.search(text)
    made_with = f"`{command[1]}`" if command else "-"
    return f"{made_with}, commit `{commit[1]}`" if commit else made_with


def _lines(text: str, path: str, there: list[str]) -> Iterator[str]:
    """The page without its title, its headings two levels deeper, its links seen from docs/."""
    folder = Path(path).parent

    def relink(found: re.Match[str]) -> str:
        target = normpath(folder / found[1])
        return f"](#{name_of(target)})" if target in there else f"](../{target})"

    for line in text.replace(" made this page", " made what follows").splitlines():
        heading = HEADING.fullmatch(line)
        if heading is None:
            yield LINK.sub(relink, line)
        elif heading[1] != "#":
            yield f"##{line}"


if __name__ == "__main__":
    write_text(PAGE, collect())
    write_text(readme.PAGE, readme.filled(readme.PAGE.read_text(encoding="utf-8")))
    print(f"wrote {PAGE.relative_to(ROOT)}, and the tables of {readme.PAGE.relative_to(ROOT)}")
