"""Build the wheel and the source archive, and use the wheel as a stranger does: in an empty environment.

    python -m scripts.check_wheel [--extras-only]

What is checked: what the archives hold; that a wheel built from the source archive holds the same; that the package
installs, imports, has types and runs its demo without any extra; that a verb which needs an extra names it; and that
every extra can be resolved beside the rest.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # the wheel, not this folder
CONSTRAINTS = ["--constraint", str(ROOT / "constraints.txt")]
OLDER_TORCH = {"litert"}  # litert-torch 0.9 does not take PyTorch 2.13, with which this project is tested
NEEDED = ("pmvit/py.typed", "pmvit/data/demo/vit.safetensors", "pmvit/data/demo/images.safetensors")
UNWANTED = ("__pycache__", ".pyc", "tests/", ".git")
TYPED = """
import pmvit
from pmvit.planning import Plan
from typing_extensions import assert_type

plan = Plan.load("plan.json")
assert_type(plan, Plan)
assert_type(pmvit.flops(pmvit.load("model")).gflops, float)
"""
NEEDS_EXTRA = {
    "onnx": ("export", "{model}", "-o", "m.onnx"),
    "openvino": ("export", "{model}", "-o", "m.xml"),
    "executorch": ("export", "{model}", "-o", "m.pte"),
    "litert": ("export", "{model}", "-o", "m.tflite"),
    "hf": ("compress", "hf:owner/name", "--data", "x", "--keep", "0.5", "-o", "y"),
    "datasets": ("evaluate", "{model}", "--data", "hf:owner/name@test"),
    "webdataset": ("evaluate", "{model}", "--data", "{folder}/shard-000.tar"),
    "tensorboard": ("finetune", "{model}", "--data", "{folder}", "-o", "y", "--log-with", "tensorboard"),
}


def run(command: Sequence[object], folder: Path = ROOT) -> None:
    """Run a command that has to succeed."""
    words = [str(word) for word in command]
    result = subprocess.run(words, text=True, capture_output=True, check=False, cwd=folder, env=CLEAN)
    if result.returncode != 0:
        sys.exit(f"{' '.join(words)}\n{result.stdout}{result.stderr}")


def build() -> tuple[Path, Path]:
    """Both archives, in an empty dist/."""
    shutil.rmtree(DIST, ignore_errors=True)
    run([sys.executable, "-m", "hatchling", "build"])
    (wheel,), (source,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return wheel, source


def names_in_wheel(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def check_contents(wheel: Path, source: Path) -> None:
    names = names_in_wheel(wheel)
    information = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/"
    strange = [name for name in names if not name.startswith(("pmvit/", information))]
    strange += [name for name in names if any(part in name for part in UNWANTED)]
    missing = [name for name in (*NEEDED, f"{information}licenses/LICENSE") if name not in names]
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "pmvit").rglob("*.py")}
    missing += sorted(modules - names)
    if strange or missing:
        sys.exit(f"{wheel.name}: unexpected {strange}, missing {missing}")
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "tests/conftest.py", *NEEDED):
        if name not in inside:
            sys.exit(f"{source.name}: {name} is missing")
    with tempfile.TemporaryDirectory() as folder:
        run([sys.executable, "-m", "pip", "wheel", source, "--no-deps", "--no-build-isolation", "-w", folder])
        (again,) = Path(folder).glob("*.whl")
        if names_in_wheel(again) != names:
            sys.exit(f"the wheel built from {source.name} differs: {names_in_wheel(again) ^ names}")
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB; the same from {source.name}")


def check_without_extras(wheel: Path, folder: Path) -> None:
    """Install into an empty environment, import, check types, run the demo, and ask for what is not there."""
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    python, pmvit = environment / "bin" / "python", environment / "bin" / "pmvit"
    pip = [python, "-m", "pip", "install", "--quiet", *CONSTRAINTS]
    run([*pip, "torch"])
    run([*pip, "--no-deps", "torchvision"])
    run([*pip, wheel])
    run([python, "-c", "import pmvit; [getattr(pmvit, name) for name in pmvit.__all__]"], folder)
    print("installed and imported, every public name")
    (folder / "typed.py").write_text(TYPED)
    run([sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "typed.py"], folder)
    print("its types are seen")
    run([pmvit, "demo", "-o", "model", "--json"], folder)
    print("the demo runs")
    images = folder / "images" / "0"
    images.mkdir(parents=True)
    shutil.copy(folder / "model" / "blocks.png", images)
    (folder / "images" / "shard-000.tar").touch()
    for extra, words in NEEDS_EXTRA.items():
        filled = [word.format(model=folder / "model", folder=folder / "images") for word in words]
        result = subprocess.run([pmvit, *filled], text=True, capture_output=True, check=False, cwd=folder, env=CLEAN)
        said = result.stderr.strip()
        if result.returncode != 1 or f"pip install 'pmvit[{extra}]'" not in said or "\n" in said:
            sys.exit(f"pmvit {' '.join(filled)}: expected one line that names the extra {extra}; got\n{said}")
    print(f"named where they are missing: {', '.join(NEEDS_EXTRA)}")


def check_extras(wheel: Path) -> None:
    """See that every extra can be installed beside the rest."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    extras = [line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Provides-Extra: ")]
    for extra in extras:
        versions = [] if extra in OLDER_TORCH else CONSTRAINTS
        run([sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", *versions, f"{wheel}[{extra}]"])
        print(f"{extra} resolves")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras-only", action="store_true", help="build, and resolve the extras")
    arguments = parser.parse_args()
    wheel, source = build()
    check_contents(wheel, source)
    if not arguments.extras_only:
        with tempfile.TemporaryDirectory() as folder:
            check_without_extras(wheel, Path(folder))
    check_extras(wheel)


if __name__ == "__main__":
    main()
