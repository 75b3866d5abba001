"""The model card: what the hub reads, what people read, and what it may not break."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from torch import nn

import pmvit
from pmvit.saving.card import CARD_FILE, CardDetails, escaped, fenced
from tests.helpers import QUIET, compressed, small_plan, small_vit


def card_of(model: nn.Module, folder: Path, **details: Any) -> tuple[dict[str, Any], str]:
    """The header and the text of the card of a model that is saved."""
    pmvit.save(model, folder, card=CardDetails(**details))
    card = ModelCard.load(folder / CARD_FILE)
    return card.data.to_dict(), card.text


def test_the_header_is_what_the_hub_reads(tmp_path: Path) -> None:
    header, _ = card_of(compressed(), tmp_path / "a", base_model='owner/name: "x"', license="mit")
    assert header["library_name"] == "pmvit"
    assert header["pipeline_tag"] == "image-classification"
    assert header["base_model"] == 'owner/name: "x"'
    assert header["license"] == "mit"
    assert {"pmvit", "token-compression"} <= set(header["tags"])
    header, text = card_of(small_vit(num_classes=0), tmp_path / "b")
    assert header["pipeline_tag"] == "image-feature-extraction"
    assert header["license"] == "unknown"
    assert "base_model" not in header
    assert "not compressed" in text


def test_the_text_says_what_was_done_and_what_it_costs(tmp_path: Path) -> None:
    model = small_vit()
    plan = small_plan(model)
    small = pmvit.compress(model, plan)
    _, text = card_of(small, tmp_path, command="pmvit compress x --keep 0.5")
    for index, layer in plan.layers.items():
        assert (
            f"| {index} | 36 | {layer.num_kept} | {layer.num_kept} | {layer.num_merged} | {layer.num_pruned} |" in text
        )
    before, after = pmvit.flops(model), pmvit.flops(small)
    assert f"| {before.gflops:.3f} | {after.gflops:.3f} |" in text
    assert f"{before.macs / after.macs:.2f}x fewer" in text
    assert "Accuracy: not measured." in text
    assert "pmvit compress x --keep 0.5" in text
    assert '"keep": 0.5' in text
    assert f"pmvit {pmvit.__version__}" in text
    assert f"torch {torch.__version__}" in text


def test_fine_tuning_says_how_good_the_model_is(tmp_path: Path, small_batches: Any) -> None:
    result = pmvit.finetune(
        compressed(), train=small_batches, val=small_batches, output=tmp_path, epochs=1, lr=1e-3, **QUIET
    )
    assert result.best is not None
    text = (tmp_path / CARD_FILE).read_text()
    assert "| fine-tuned |" in text
    assert ", compressed and fine-tuned" in text
    assert f"{result.best.headline.split()[-1]}" in text
    assert '"epochs": 1' in text


def test_loading_does_not_care_and_a_text_of_ones_own_stays(tmp_path: Path) -> None:
    small = compressed()
    pmvit.save(small, tmp_path)
    (tmp_path / CARD_FILE).write_text("# My model\n")
    pmvit.save(small, tmp_path)
    assert (tmp_path / CARD_FILE).read_text() == "# My model\n"
    image = torch.randn(1, 3, 96, 96)
    with torch.inference_mode():
        assert torch.equal(pmvit.load(tmp_path)(image), small(image))


def test_text_of_users_is_shown_as_it_is(tmp_path: Path) -> None:
    assert escaped("a|b\n<script> *x* [y](z) &") == r"a\|b \<script\> \*x\* \[y\](z) &amp;"
    assert fenced("a ``` b", "sh") == "````sh\na ``` b\n````"
    header, text = card_of(compressed(), tmp_path, command="pmvit compress '```\n---\nlicense: mit\n'")
    assert header["license"] == "unknown"
    assert "````sh\n" in text
