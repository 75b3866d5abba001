"""Files that version 0.1.0 wrote are read to the bit, gone on from, and refused where a later version wrote them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import pmvit
from pmvit import methods
from pmvit.compression import plan_of
from pmvit.config import FinetuneConfig, PlanConfig
from pmvit.hosts import OLD_FAMILIES, host_class
from pmvit.measuring import MergeCosts, Scores, TokenMetric
from pmvit.planning import Plan
from pmvit.planning.adaptive import AdaptivePlan
from pmvit.saving.commands import read_commands
from pmvit.training import Finetuned
from pmvit.wrapping import fingerprint
from tests.fixture_parts import (
    COMMAND,
    FINETUNE,
    RUN,
    batches,
    facts_of_plan,
    measured_in,
    outputs_of,
    tensors_of,
    write_pictures,
)
from tests.helpers import pmvit_here

FIXTURES = Path(__file__).parent / "fixtures"
EXPECTED: dict[str, Any] = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))
MODELS: dict[str, Any] = EXPECTED["models"]
NEEDED = {"saved_hf": "transformers", "saved_hf_swin": "transformers", "saved_dpt": "segmentation_models_pytorch"}
LATER = 99  # a version that there is not yet


def document(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((FIXTURES / name).read_text(encoding="utf-8"))
    return result


def saved(name: str) -> Any:
    """The model of a fixture; what it cannot be loaded without is installed, or the test skipped."""
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    return pmvit.load(FIXTURES / name)


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all fixtures with the pictures that the runs saw; the current folder, to which their paths lead."""
    shutil.copytree(FIXTURES, tmp_path, dirs_exist_ok=True)
    write_pictures(tmp_path / "pictures")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- saved models ---


def test_every_saved_model_is_expected() -> None:
    assert {path.name for path in FIXTURES.glob("saved_*")} == set(MODELS)
    assert len({entry["family"] for entry in MODELS.values()}) == 9


@pytest.mark.parametrize("name", MODELS)
def test_saved_models_load_to_the_bit(name: str) -> None:
    model, expected = saved(name), MODELS[name]
    assert tensors_of(model) == expected["tensors"]
    plan = plan_of(model)
    assert (None if plan is None else facts_of_plan(plan)) == expected["plan"]
    got, outputs = torch.tensor(outputs_of(model)), torch.tensor(expected["outputs"])
    assert (got - outputs).abs().max() < 1e-5 * max(1.0, float(outputs.abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_loaded_models_are_saved_again(name: str, tmp_path: Path) -> None:
    model = saved(name)
    pmvit.save(model, tmp_path / name)
    again = pmvit.load(tmp_path / name)
    assert tensors_of(again) == MODELS[name]["tensors"]
    assert plan_of(again) == plan_of(model)


@pytest.mark.parametrize("name", MODELS)
def test_hosts_are_found_by_their_old_names(name: str) -> None:
    path = FIXTURES / name
    text = metadata_of(path)["config.json"] if path.is_file() else (path / "config.json").read_text(encoding="utf-8")
    family = json.loads(text)["family"]
    assert family == MODELS[name]["family"]
    assert host_class(OLD_FAMILIES[family]).matches(saved(name))


def test_the_fixtures_hold_what_they_are_for() -> None:
    split, paper, method = (saved(name) for name in ("saved_model", "saved_model.safetensors", "saved_method"))
    layers = split.compression.what.layers.values()
    assert any(layer.mlp is not None for layer in layers)
    assert any(layer.mlp is None for layer in saved("saved_features").compression.what.layers.values())
    assert (split.compression.what.reconstruct, split.compression.what.attention_bias) == ("residual", True)
    assert (paper.compression.what.reconstruct, paper.compression.learn) == ("pinv", "dense")
    tome = method.compression.what
    assert isinstance(tome, methods.Tome)
    assert (tome.r, document("saved_method/config.json")["method"]["options"]["r"]) == (6, 6)
    assert {entry[0] for entry in MODELS["saved_dpt"]["tensors"].values()} == {"bfloat16", "int64"}


def test_adaptive_models_metrics_and_plans_are_read_to_the_bit(tmp_path: Path) -> None:
    expected = document("expected_adaptive.json")
    model: Any = saved("adaptive_model")
    for name in ("adaptive_model", "again"):
        assert tensors_of(model) == expected["tensors"]
        assert outputs_of(model) == pytest.approx(expected["outputs"], abs=1e-5)
        pmvit.save(model, tmp_path / name)
        model = pmvit.load(tmp_path / name)
    metric, plan = TokenMetric.load(FIXTURES / "metric.safetensors"), model.compression.what
    assert list(plan.merges) == expected["merges"]
    assert AdaptivePlan.load(FIXTURES / "plan_adaptive.safetensors").merges == plan.merges
    made = pmvit.plan(metric, keep=0.6)
    assert (made.merges, made.metric.cost) == (plan.merges, plan.metric.cost)
    assert torch.equal(metric.projections, plan.metric.projections)
    small = pmvit.compress(saved("saved_original"), made)
    assert outputs_of(small) == pytest.approx(expected["outputs"], abs=1e-5)


# --- plans, scores, prices ---


@pytest.mark.parametrize("name", EXPECTED["plans"])
def test_plans_load_and_are_written_alike(name: str, tmp_path: Path) -> None:
    plan = Plan.load(FIXTURES / name)
    assert facts_of_plan(plan) == EXPECTED["plans"][name]
    plan.save(tmp_path / name)
    assert Plan.load(tmp_path / name) == plan


def test_plans_fit_what_they_were_made_for() -> None:
    assert Plan.load(FIXTURES / "plan_split.json") == saved("saved_model").compression.what
    swin = Plan.load(FIXTURES / "plan_swin.json")
    assert swin == saved("saved_swin").compression.what
    assert swin.grids == ((8, 8), (8, 8), (4, 4), (4, 4))
    small = pmvit.compress(saved("saved_original"), Plan.load(FIXTURES / "plan.json"))
    assert [layer.num_pruned for layer in small.compression.what.layers.values()].count(0) < 3


def everything_but_values(scores: Scores) -> dict[str, Any]:
    return {name: value for name, value in asdict(scores).items() if name != "values"}


@pytest.mark.parametrize("name", ["scores.json", "scores_swin.json"])
def test_scores_load_and_are_written_alike(name: str, tmp_path: Path) -> None:
    scores, written = Scores.load(FIXTURES / name), document(name)
    assert [scores.of(layer).tolist() for layer in range(len(scores.values))] == written["values"]
    for field in ("num_prefix", "iterations", "images", "model", "data"):
        assert getattr(scores, field) == written[field]
    assert asdict(scores.config) == {**written["config"], "limit": None}
    assert json.loads(json.dumps(asdict(scores.cost))) == written["cost"]
    scores.save(tmp_path / name)
    again = Scores.load(tmp_path / name)
    assert torch.equal(again.values, scores.values)
    assert everything_but_values(again) == everything_but_values(scores)


def test_windows_of_scores_are_read() -> None:
    windows = Scores.load(FIXTURES / "scores_swin.json").windows
    assert [window and (window.size, window.shift) for window in windows[:2]] == [((4, 4), (0, 0)), ((4, 4), (2, 2))]


def test_partial_scores_are_gone_on_from(folder: Path) -> None:
    """Two of three batches are in the file: with the third, the scores are those of all of them at once."""
    partial = folder / "scores.json.partial"
    assert document("scores.json.partial")["iterations"] == 2
    seen: list[Any] = [None, None, batches()[2]]  # a batch that is done already is not read again
    scores = pmvit.measure(saved("saved_original"), seen, method="scored", checkpoint=partial, progress=False)
    whole = Scores.load(folder / "scores.json")
    assert torch.allclose(scores.values, whole.values, rtol=1e-5)
    assert everything_but_values(scores) == everything_but_values(whole)


def test_prices_load_and_are_written_alike(tmp_path: Path) -> None:
    prices, written = MergeCosts.load(FIXTURES / "prices.json"), document("prices.json")
    assert [list(merge) for merge in prices.merges] == written["merges"]
    config = {**written["config"], "limit": written["config"]["images"]}
    assert {**asdict(prices.config), "images": prices.config.limit} == config
    assert (prices.images, prices.data, list(prices.grid)) == (12, written["data"], written["grid"])
    prices.save(tmp_path / "merge_costs.json")
    assert MergeCosts.load(tmp_path / "merge_costs.json") == prices


def test_fingerprints_stay_the_same() -> None:
    """Scores, prices and runs know their model by it."""
    found = fingerprint(saved("saved_original"))
    assert {document(name)["model"] for name in ("scores.json", "prices.json", "run/run.json")} == {found}


# --- runs ---


WHOLE: dict[str, list[float]] = EXPECTED["finetune"]  # of a run that was not stopped


def check_stopped(run: Path) -> None:
    assert measured_in(run) == {"loss": WHOLE["loss"][:4], "cross_entropy": WHOLE["cross_entropy"][:1]}


def check_finished(run: Path) -> None:
    found = measured_in(run)
    for name, numbers in WHOLE.items():
        assert found[name] == pytest.approx(numbers, rel=1e-4), name


def tune(**options: Any) -> Finetuned:
    given = {**FINETUNE, "progress": False, "resume": True, "command": COMMAND, **options}
    return pmvit.finetune(
        pmvit.load("saved_model"), train=COMMAND["data"], val=COMMAND["val"], output="finetune", **given
    )


@pytest.mark.parametrize("step", [4, 2], ids=["after an epoch", "within an epoch"])
def test_fine_tuning_is_resumed(folder: Path, step: int) -> None:
    """From a checkpoint of then to the end, with the numbers of a run that was not stopped."""
    run = folder / "finetune"
    check_stopped(run)
    for later in [path for path in (run / "checkpoints").iterdir() if int(path.stem[-8:]) > step]:
        later.unlink()
    before = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    result = tune()
    assert result.steps == 8
    assert result.last is not None
    check_finished(run)
    after = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert after[:step] == before[:step]
    plan = plan_of(pmvit.load("saved_model"))
    assert plan is not None
    assert plan_of(pmvit.load(run / "last")) == plan


def test_fine_tuning_is_resumed_from_the_command_line(folder: Path) -> None:
    """Model and images are found by what the run keeps of its command."""
    result = pmvit_here("finetune", "--resume", "finetune", "--json", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["steps"] == 8
    check_finished(folder / "finetune")


def test_another_run_is_told_from_the_one_in_the_folder(folder: Path) -> None:
    with pytest.raises(pmvit.PmvitError, match=r"holds a run with lr = 0.001, not 0.002"):
        tune(lr=0.002)
    check_stopped(folder / "finetune")


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_finished_run_is_read_back(folder: Path) -> None:
    before, written = contents(folder / "run"), document("run/results.json")
    result = pmvit_here(*RUN, "--json", cwd=folder)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    for stage, row in written.items():
        assert found["gflops"][stage] == row.pop("gflops")
        assert found["evaluations"][stage] == {"reference": None, **row}  # it was not recorded then
    after = contents(folder / "run")
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    assert changed <= {"commands.json"}


def test_a_run_goes_on_after_its_fine_tuning(folder: Path) -> None:
    (folder / "run" / "results.json").unlink()
    before = contents(folder / "run")
    result = pmvit_here(*RUN, "--json", cwd=folder)
    assert result.returncode == 0, result.stderr
    for stage, row in document("run/results.json").items():
        found = json.loads(result.stdout)["evaluations"][stage]
        assert set(found) - set(row) == {"reference"}  # which was not recorded then
        for name, value in ((name, value) for name, value in found.items() if name in row):
            close = None if row[name] is None else pytest.approx(row[name], rel=1e-3, abs=1e-6)
            assert value == close, (stage, name)
    tensors = [name for name in before if name.endswith(".safetensors")]
    assert {name: contents(folder / "run")[name] for name in tensors} == {name: before[name] for name in tensors}


def test_commands_are_read() -> None:
    (command,) = read_commands(FIXTURES / "run")
    assert command["command"] == " ".join(["pmvit", *RUN])
    assert command["versions"]["pmvit"] == "0.1.0"
    assert read_commands(FIXTURES / "saved_model") == []


def test_a_report_shows_what_was_measured_for_it(folder: Path) -> None:
    page = pmvit.report("saved_model", "report.html", progress=False).read_text(encoding="utf-8")
    measures = {row["name"]: row for row in document("report.json")["evaluation"]["measures"]}
    assert all(f"{value:.3f}" in page for value in measures["cross_entropy"]["compressed"])
    assert "measures accuracy before and after" not in page
    (folder / "report.json").unlink()
    page = pmvit.report("saved_model", "report.html", progress=False).read_text(encoding="utf-8")
    assert "measures accuracy before and after" in page


# --- files of a later version ---


def raise_version(path: Path) -> None:
    """Let a document, or that in the metadata of a safetensors file, say that a later version wrote it."""
    if path.suffix != ".safetensors":
        path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "version": LATER}))
        return
    metadata = metadata_of(path)
    name = next(name for name in ("config.json", "pmvit-checkpoint") if name in metadata)
    metadata[name] = json.dumps({**json.loads(metadata[name]), "version": LATER})
    save_file(load_file(path), path, metadata)


def run_again() -> None:
    config = document("run/run.json")
    tuning: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in config["finetune"].items()
    }
    pmvit.run(
        pmvit.load("saved_original"),
        train=config["train"],
        val=config["val"],
        output="run",
        plan_config=PlanConfig(keep=0.6),
        finetune_config=replace(FinetuneConfig(), **tuning),
        progress=False,
    )


def score_again() -> None:
    pmvit.measure(
        pmvit.load("saved_original"), batches(), method="scored", checkpoint="scores.json.partial", progress=False
    )


READERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "saved_model/config.json": ("pmvit-model", lambda: pmvit.load("saved_model")),
    "saved_model.safetensors": ("pmvit-model", lambda: pmvit.load("saved_model.safetensors")),
    "plan.json": ("pmvit-plan", lambda: Plan.load("plan.json")),
    "scores.json": ("pmvit-scores", lambda: Scores.load("scores.json")),
    "scores.json.partial": ("pmvit-partial-scores", score_again),
    "prices.json": ("pmvit-prices", lambda: MergeCosts.load("prices.json")),
    "finetune/finetune.json": ("pmvit-finetune", tune),
    "finetune/checkpoints/*": ("pmvit-checkpoint", tune),
    "run/run.json": ("pmvit-run", run_again),
    "run/commands.json": ("pmvit-commands", lambda: read_commands(Path("run"))),
    "report.json": ("pmvit-report", lambda: pmvit.report("saved_model", "report.html", progress=False)),
}


@pytest.mark.parametrize("name", READERS)
def test_files_of_a_later_version_are_refused(folder: Path, name: str) -> None:
    kind, read = READERS[name]
    found = list(folder.glob(name))
    assert found
    for path in found:
        raise_version(path)
    with pytest.raises(pmvit.PmvitError, match=rf"version \d of {kind}, got {LATER}"):
        read()


def test_a_plan_that_was_changed_in_a_saved_model_is_refused(folder: Path) -> None:
    raise_version(folder / "saved_model" / "plan.json")
    with pytest.raises(pmvit.PmvitError, match=r"plan\.json is not what was saved"):
        pmvit.load("saved_model")
