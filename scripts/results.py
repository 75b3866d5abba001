"""Collect the pages that experiments and benchmarks wrote into pages of the documentation, by subject.

    python -m scripts.results

makes the first page of results, the leaderboard and the tables of the README, too. Nothing there is typed by hand. A
new page needs one line in `ORDER`, which gives it a place and a title; until it has one, it stands on a page `More`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath

from pmvit.errors import PmvitError
from pmvit.files import write_text
from scripts import leaderboard, readme

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/results.md"
FOLDERS = ("experiments", "benchmarks")
ORDER = {
    "Classification": {
        "experiments/equal_speed.md": "At equal speed, not tuned",
        "experiments/comparison.md": "Side by side with other methods",
        "experiments/adaptive.md": "Plans that adapt to the image, not tuned",
        "experiments/any_size.md": "One measurement, images of any size",
        "experiments/without_images.md": "Adaptive plans without images, not tuned",
        "experiments/measured_planner.md": "Measured plans, not tuned",
        "experiments/calibration.md": "Measured plans, calibrated without labels",
        "experiments/measured_tuned.md": "Measured plans, tuned",
        "experiments/without_tuning.md": "Plans from scores, not tuned",
        "experiments/pets.md": "Compressed and tuned on Oxford Pets",
        "experiments/pets_methods.md": "Methods tuned alike on Oxford Pets",
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
        "experiments/scale.md": "Larger models, on paper",
    },
}
REST = "More"
HEAD = """# Results

What a user needs first: what is kept at equal speed, at equal cost, and how much faster that is. `python -m
scripts.results` made this page, and those linked below, of what experiments and benchmarks wrote down; the last column
has the command that measures a row again. Every method side by side: the [leaderboard](leaderboard.md).
"""
ALL = """## Everything that was measured

By subject, each with the command that makes it again. In brackets on these pages: 95 % intervals.
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


def file_of(section: str) -> str:
    """The page of a subject: that of `The paper's tables` is `results_paper.md`."""
    words = re.findall(r"[a-z]{4,}", section.lower())
    return f"results_{words[0]}.md"


def collect(root: Path = ROOT) -> dict[str, str]:
    """The pages of the documentation by name, from what lies below `root` now.

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
    places = {path: f"{file_of(section)}#{name_of(path)}" for section, pages in sections.items() for path in pages}
    index = ["| | made with |", "|---|---|"]
    made = {}
    for section, pages in sections.items():
        index.append(f"| **[{section}]({file_of(section)})** | |")
        parts = [f"# {section}", "[All results](results.md)"]
        for path, title in pages.items():
            index.append(f"| [{title}]({places[path]}) | {_made_with(texts[path])} |")
            body = "\n".join(_lines(texts[path], path, places)).strip()
            parts.append(f'<a id="{name_of(path)}"></a>\n\n## {title}\n\n{body}')
        made[file_of(section)] = "\n\n".join(parts) + "\n"
    return {"index": "\n".join(index), **made}


def pages(root: Path = ROOT) -> dict[Path, str]:
    """All that is made, by where it lies."""
    collected = collect(root)
    links = LINK.sub(lambda found: f"](../{found[1]})", readme.tables(root).strip())
    front = "\n\n".join([HEAD.strip(), links, ALL.strip(), collected.pop("index")]) + "\n"
    made = {"results.md": front, "leaderboard.md": leaderboard.page(root), **collected}
    return {PAGE.with_name(name): text for name, text in made.items()}


def _title(text: str) -> str:
    found = HEADING.match(text)
    return found[2] if found else "Untitled"


def _made_with(text: str) -> str:
    command, commit = COMMAND.search(text), COMMIT.search(text)
    made_with = f"`{command[1]}`" if command else "-"
    return f"{made_with}, commit `{commit[1]}`" if commit else made_with


def _lines(text: str, path: str, places: dict[str, str]) -> Iterator[str]:
    """The page without its title, its headings a level deeper, its links seen from docs/."""
    folder = Path(path).parent

    def relink(found: re.Match[str]) -> str:
        target = normpath(folder / found[1])
        return f"]({places.get(target, f'../{target}')})"

    for line in text.replace(" made this page", " made what follows").splitlines():
        heading = HEADING.fullmatch(line)
        if heading is None:
            yield LINK.sub(relink, line)
        elif heading[1] != "#":
            yield f"#{line}"


if __name__ == "__main__":
    for page, text in pages().items():
        write_text(page, text)
    write_text(readme.PAGE, readme.filled(readme.PAGE.read_text(encoding="utf-8")))
    print("wrote docs/results*.md and docs/leaderboard.md, and the tables of README.md")
