"""Models go to the hub and come back: the real client, and a hub on this machine that speaks its protocol."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import save_file
from torch import nn

import pmvit
from pmvit.compression import compression_of, record_source
from pmvit.loading import create_model, original_model
from pmvit.saving.card import CardDetails, completed
from pmvit.saving.hub import MOST_BYTES, HubPlace
from tests.helpers import compressed, pmvit_here, small_plan, small_vit
from tests.hub_server import Hub, Repo

IMAGE = torch.randn(1, 3, 96, 96, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def small() -> nn.Module:
    """A compressed model; tests do not change it."""
    return compressed()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IMAGE)
    return found


def refusal(what: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(pmvit.PmvitError) as caught:
        what(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def held(hub: Hub, repo: str = "me/small", revision: str = "main") -> dict[str, bytes]:
    files = hub.repos[repo].files(revision)
    assert files is not None
    return files


# --- there and back ---


def test_a_model_comes_back_with_the_same_logits_and_is_fetched_once(hub: Hub, small: nn.Module) -> None:
    commit = pmvit.push_to_hub(small, "me/small", message="First")
    assert commit.commit_url.startswith(f"{hub.url}/me/small/commit/")
    assert set(held(hub)) == {".gitattributes", "README.md", "config.json", "model.safetensors", "plan.json"}
    loaded = pmvit.load("hf-hub:me/small")
    assert torch.equal(logits(loaded), logits(small))
    assert torch.equal(logits(create_model("hf-hub:me/small")), logits(small))
    assert hub.count("GET", "/resolve/") == 3  # configuration, weights, plan: the card is not needed
    assert original_model(loaded) is not None


def test_a_folder_is_pushed_with_its_card_and_nothing_of_this_machine(hub: Hub, tmp_path: Path) -> None:
    small = compressed()
    (tmp_path / "private").mkdir()
    weights = tmp_path / "private" / "weights.safetensors"
    save_file(small_vit().state_dict(), weights)
    record_source(small, "vit_tiny_patch16_224", str(weights), {"img_size": 96})
    pmvit.save(small, tmp_path / "out", card=CardDetails(measured={"compressed": {"top1": 0.5, "images": 8}}))
    (tmp_path / "out" / "scores.json").write_text("{}")
    pushed = pmvit_here("push", "out", "me/small", "--private", "--json", cwd=tmp_path)
    assert pushed.returncode == 0, pushed.stderr
    assert json.loads(pushed.stdout)["model"] == "hf-hub:me/small"
    files = held(hub)
    assert "scores.json" not in files
    assert "commands.json" not in files
    assert files["README.md"] == (tmp_path / "out" / "README.md").read_bytes()
    assert not [name for name, data in files.items() if b"private" in data and name != "README.md"]
    assert hub.repos["me/small"].private
    compression = compression_of(pmvit.load("hf-hub:me/small"))
    assert compression is not None
    assert (compression.original.source, compression.original.weights) == (
        "vit_tiny_patch16_224",
        "weights.safetensors",
    )
    shown = pmvit_here("info", "hf-hub:me/small", "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["compressed"]["macs"] == pmvit.flops(small).macs


def test_revisions_are_told_apart(hub: Hub, small: nn.Module) -> None:
    other = pmvit.compress(small_vit(), small_plan(small_vit(), keep=0.8))
    commit = pmvit.push_to_hub(small, "me/small")
    pmvit.push_to_hub(other, "me/small@lighter")
    pmvit.push_to_hub(other, "me/small@lighter")  # nothing has changed
    assert torch.equal(logits(pmvit.load("hf-hub:me/small")), logits(small))
    assert torch.equal(logits(pmvit.load("hf-hub:me/small@lighter")), logits(other))
    pmvit.push_to_hub(small_vit(), "me/small")  # not compressed: the plan goes
    assert "plan.json" not in held(hub)
    assert compression_of(pmvit.load("hf-hub:me/small")) is None
    assert torch.equal(logits(pmvit.load(f"hf-hub:me/small@{commit.oid}")), logits(small))


def test_a_download_that_broke_off_goes_on_where_it_was(hub: Hub, small: nn.Module) -> None:
    pmvit.push_to_hub(small, "me/small")
    hub.cut_after = len(held(hub)["model.safetensors"]) // 2
    assert torch.equal(logits(pmvit.load("hf-hub:me/small")), logits(small))
    assert len(hub.ranges) == 1
    assert hub.ranges[0].startswith("bytes=")
    assert not hub.ranges[0].startswith("bytes=0-")


def test_without_a_network_what_was_fetched_is_opened(
    hub: Hub, small: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    pmvit.push_to_hub(small, "me/small")
    pmvit.load("hf-hub:me/small")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert torch.equal(logits(pmvit.load("hf-hub:me/small")), logits(small))
    assert len(hub.asked) == asked
    told = refusal(pmvit.load, "hf-hub:me/other")
    assert told.endswith(
        "(HF_HUB_OFFLINE is set): fetch it where there is a network, or pass a folder that pmvit saved"
    )


# --- refused ---


def test_what_the_hub_refuses_is_said_in_a_line(hub: Hub, small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    pmvit.push_to_hub(small, "me/small", private=True)
    assert "there is no revision 'other' of it" in refusal(pmvit.load, "hf-hub:me/small@other")
    for name in ("me/none", "hf-hub:me", "hf-hub:me/small@", "a b/c"):
        refusal(pmvit.push_to_hub if name == "a b/c" else pmvit.load, name, *(["x"] if name == "a b/c" else []))
    assert "`hf auth login`" in refusal(pmvit.load, "hf-hub:me/none")
    assert "may write there" in refusal(pmvit.push_to_hub, small, "others/small")
    assert "is private, not public" in refusal(pmvit.push_to_hub, small, "me/small", private=False)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not know your token" in refusal(pmvit.load, "hf-hub:me/small")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    monkeypatch.delenv("HF_TOKEN")
    assert "log in with `hf auth login`" in refusal(pmvit.load, "hf-hub:me/small")
    assert "log in with `hf auth login`" in refusal(pmvit.push_to_hub, small, "me/new")
    hub.repos["me/small"].private, hub.repos["me/small"].gated = False, True
    assert f"ask on {hub.url}/me/small" in refusal(pmvit.load, "hf-hub:me/small")


@pytest.mark.parametrize(("file", "size"), [("config.json", 2**30), ("plan.json", 2**30), ("model.safetensors", 2**40)])
def test_files_that_are_too_large_are_not_fetched(file: str, size: int, hub: Hub, small: nn.Module) -> None:
    pmvit.push_to_hub(small, "me/small")
    hub.told_sizes[file] = size
    assert f"got {size:,}: it is not fetched" in refusal(pmvit.load, "hf-hub:me/small")
    assert hub.count("GET", f"/{file}") == 0
    assert size < MOST_BYTES or file == "model.safetensors"


def test_only_the_files_that_pmvit_writes_are_fetched_and_these_are_a_strangers(
    hub: Hub, small: nn.Module, tmp_path: Path
) -> None:
    pmvit.push_to_hub(small, "me/small")
    foreign = {"modeling.py": b"raise SystemExit", "pytorch_model.bin": b"\x80\x04.", "scores.json": b"{}"}
    hub.repos["me/small"].write("main", dict(foreign))
    pmvit.load("hf-hub:me/small")
    there = {path.name for path in (tmp_path / "cache").rglob("snapshots/*/*")}
    assert there == {"config.json", "model.safetensors", "plan.json"}
    changed = held(hub)["plan.json"].replace(b'"keep": 0.5', b'"keep": 0.6')
    hub.repos["me/small"].write("main", {"plan.json": changed})
    assert "it was changed" in refusal(pmvit.load, "hf-hub:me/small")
    hub.repos["me/small"].write("main", {"plan.json": None})
    assert "expected plan.json in hf-hub:me/small; it is missing" in refusal(pmvit.load, "hf-hub:me/small")


# --- other libraries ---


def test_the_configuration_says_whether_a_repository_is_timms(hub: Hub, small: nn.Module, tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=96, embed_dim=48, depth=2, num_heads=3, num_classes=7)
    timm.models.save_for_hf(
        model, str(tmp_path / "timm"), model_args={"img_size": 96, "embed_dim": 48, "depth": 2, "num_heads": 3}
    )
    files = {path.name: path.read_bytes() for path in (tmp_path / "timm").iterdir()}
    hub.repos["me/plain"] = Repo(revisions={"main": dict(files), "v1": dict(files)})
    for name in ("hf-hub:me/plain", "hf-hub:me/plain@v1"):
        assert torch.equal(logits(create_model(name)), logits(model.eval()))
    assert "its config.json is not pmvit's" in refusal(pmvit.load, "hf-hub:me/plain")
    assert "another library's is there" in refusal(pmvit.push_to_hub, small, "me/plain")
    assert held(hub, "me/plain") == files
    assert "brings its weights" in refusal(create_model, _pushed(small), num_classes=3)


def _pushed(model: nn.Module) -> str:
    pmvit.push_to_hub(model, "me/small")
    return HubPlace.of("me/small").name


def test_a_card_of_somebody_elses_stays(hub: Hub, small: nn.Module) -> None:
    hub.repos["me/small"] = Repo()
    hub.repos["me/small"].write("main", {"README.md": b"---\nlicense: mit\n---\n"})
    with pytest.warns(pmvit.errors.PmvitWarning, match="is not pmvit's and stays"):
        pmvit.push_to_hub(small, "me/small")
    assert held(hub)["README.md"] == b"---\nlicense: mit\n---\n"
    pmvit.load("hf-hub:me/small")


# --- the card ---


def test_an_evaluation_goes_into_the_card(hub: Hub, tmp_path: Path) -> None:
    small = compressed()
    record_source(small, "deit_tiny_patch16_224.fb_in1k")
    pmvit.save(small, tmp_path / "out")
    found = {
        "images": 50,
        "top1": 0.72,
        "top5": 0.9,
        "agreement": 0.95,
        "reference_top1": 0.74,
        "reference": "original",
    }
    (tmp_path / "evaluation.json").write_text(json.dumps(found))
    options = ["--evaluation", "evaluation.json", "--dataset", "imagenet-1k"]
    pushed = pmvit_here("push", "out", "me/small", *options, cwd=tmp_path)
    assert pushed.returncode == 0, pushed.stderr
    text = held(hub)["README.md"].decode()
    card: Any = ModelCard(text)
    assert (card.data.library_name, card.data.base_model) == ("pmvit", "timm/deit_tiny_patch16_224.fb_in1k")
    assert (card.data.base_model_relation, card.data.license) == ("quantized", "apache-2.0")
    results = {each.metric_name: each.metric_value for each in card.data.eval_results}
    assert results == {"top-1 accuracy": 0.72, "top-5 accuracy": 0.9}
    assert {each.dataset_type for each in card.data.eval_results} == {"imagenet-1k"}
    assert text.count("## Accuracy") == 1
    assert "| original | 74.00% |" in text
    assert "| this model | 72.00% |" in text
    assert "not measured" not in text
    assert text.index("## Accuracy") < text.index("## Tokens in each block")
    again = completed(text, CardDetails(measured={"this model": {"images": 9, "top1": 0.5}}, license="mit"))
    assert again.count("## Accuracy") == 1
    assert "| this model | 50.00% | 9 |" in again
    assert "72.00%" not in again
    header: Any = ModelCard(again).data
    assert ([each.metric_value for each in header.eval_results], header.license) == ([0.5], "mit")
    assert header.base_model == "timm/deit_tiny_patch16_224.fb_in1k"
    assert "this one is not, and stays as it is" in refusal(completed, "# Mine\n", CardDetails(license="mit"))
