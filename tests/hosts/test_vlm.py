"""Vision-language models of Hugging Face transformers: their towers, in place."""

import copy
import json
import re
from functools import cache, partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor

import pmvit
from pmvit.hosts import find_host, host_of
from pmvit.hosts.outputs import predict
from pmvit.loading import create_model
from pmvit.planning import Plan
from pmvit.runtime.bench.variants import in_place_plan
from scripts import sweep_vlm
from scripts.sweep import randomise
from tests.helpers import pmvit_here, small_plan

transformers = pytest.importorskip("transformers")

VLMS = {name: make for _, name, make in sweep_vlm.makers()}
LLAVA, TWO_LAYERS, REGISTERS, NEXT, _, PALIGEMMA, GEMMA, INTERNVL, _, IDEFICS, _ = VLMS
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}


@cache
def original(name: str) -> Any:
    """Not to be changed."""
    torch.manual_seed(0)
    model: Any = VLMS[name]()
    randomise(model)
    return model


def pixels(name: str) -> dict[str, Tensor]:
    """Two images as the model takes them, or one in five tiles."""
    tiles = torch.randn(5, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    if name.startswith(("LlavaNext", "LlavaOnevision")):
        return {"pixel_values": tiles[None], "image_sizes": torch.tensor([[96, 96]])}
    return {"pixel_values": tiles[None, :2] if name.startswith(("Idefics3", "SmolVLM")) else tiles[:2]}


@cache
def inputs(name: str) -> dict[str, Tensor]:
    """A prompt with as many image tokens as the model makes of `pixels`."""
    with torch.no_grad():
        features = original(name).get_image_features(**pixels(name)).pooler_output
    count = sum(each.shape[:-1].numel() for each in features)
    prompt = torch.tensor([[1, 5, *[sweep_vlm.IMAGE_TOKEN] * count, 6, 7]])
    return {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), **pixels(name)}


def logits(model: Any, name: str, **more: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**{**inputs(name), **more}).logits
    return found


def written(model: Any, name: str) -> list[int]:
    found: list[int] = model.generate(**inputs(name), max_new_tokens=4, do_sample=False)[0].tolist()
    return found


@cache
def adaptive(name: str) -> Any:
    images = torch.randn(4, 3, 48, 48, generator=torch.Generator().manual_seed(2))
    return pmvit.plan(pmvit.measure(original(name), images, progress=False), keep=0.6)


@pytest.mark.parametrize("name", VLMS)
def test_what_is_measured_is_what_the_language_model_reads(name: str) -> None:
    """Of every tile, the tokens that the projector is given, with which class token or without."""
    model, given = original(name), []
    projector = getattr(model.model, "multi_modal_projector", None) or model.model.connector
    hook = projector.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0]))
    with torch.no_grad():
        model.get_image_features(**pixels(name))
        expected = host_of(model).call(pixels(name)["pixel_values"].flatten(0, -4))
    hook.remove()
    if name.startswith("InternVL"):  # it brings four patches together before its projector
        expected = model.model.pixel_shuffle(expected.unflatten(1, (6, 6)), scale_factor=0.5).flatten(1, 2)
    assert torch.equal(given[0], expected)


@pytest.mark.parametrize("name", VLMS)
def test_all_tokens_kept_is_the_original(name: str) -> None:
    """Also where tokens are only reordered, so that every block is wrapped."""
    model, host = original(name), host_of(original(name))
    assert host.key == "hf-vlm"
    for plan in (Plan.keep_all((6, 6), len(host.block_names())), in_place_plan((6, 6), len(host.block_names()))):
        same = pmvit.compress(model, plan)
        assert (logits(same, name) - logits(model, name)).abs().max() < 1e-5
        assert written(same, name) == written(model, name)


@pytest.mark.parametrize("name", VLMS)
def test_fewer_tokens_inside_and_all_of_them_outside(name: str) -> None:
    """Adaptive and fixed: the answer changes, its shape and everything behind the tower does not."""
    model, whole = original(name), pmvit.flops(original(name))
    before = logits(model, name)
    for plan in (adaptive(name), small_plan(model, keep=0.6)):
        small = pmvit.compress(model, plan)
        assert pmvit.flops(small).macs < 0.9 * whole.macs
        after = logits(small, name)
        assert after.shape == before.shape
        assert 1e-3 < (after - before).abs().max() < 10
        assert len(written(small, name)) == len(written(model, name))
        blocks = host_of(model).block_names()
        changed = {key for key, value in small.named_modules() if type(value) is not type(_at(model, key))}
        assert changed
        assert all(any(key.startswith(block) for block in blocks) for key in changed)


def _at(model: Any, name: str) -> Any:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def test_the_flops_are_those_of_the_tower() -> None:
    """Of the layer behind the one that LLaVA reads, too: transformers runs it."""
    model = original(LLAVA)
    assert len(host_of(model).block_names()) == len(model.model.vision_tower.encoder.layers) - 1 == 2
    assert pmvit.flops(model).macs == pmvit.flops(model.model.vision_tower).macs
    assert len(host_of(original(TWO_LAYERS)).block_names()) == 2
    assert len(host_of(original(PALIGEMMA)).block_names()) == 3


def test_the_layer_that_llava_does_not_read_can_go() -> None:
    """As the documentation has it; what is read stays, and the model can still be saved."""
    model = copy.deepcopy(original(LLAVA))
    page = (Path(__file__).parents[2] / "docs/vlm.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^    ```python\n(.*?)^    ```", page, flags=re.DOTALL | re.MULTILINE)
    exec(dedent(code), {"model": model})  # noqa: S102  # the very text that users are shown
    assert torch.equal(logits(model, LLAVA), logits(original(LLAVA), LLAVA))
    assert pmvit.flops(model).macs < pmvit.flops(original(LLAVA)).macs
    assert len(host_of(model).block_names()) == 2
    assert host_of(model).describe()["config"]["vision_feature_layer"] == -1


def test_tiles_of_an_image_merge_each_for_itself() -> None:
    small = pmvit.compress(original(NEXT), adaptive(NEXT))
    tiles = pixels(NEXT)["pixel_values"][0]
    with torch.no_grad():
        together, alone = predict(small, tiles), torch.cat([predict(small, tile[None]) for tile in tiles])
    assert (together - alone).abs().max() < 1e-5


@pytest.mark.parametrize("name", [LLAVA, INTERNVL])
def test_decompress_gives_back_the_very_objects(name: str) -> None:
    model = copy.deepcopy(original(name))
    before = dict(model.named_modules())
    pmvit.compress(model, adaptive(name), inplace=True)
    tower = model.model.vision_tower
    for verb in (model.save_pretrained, tower.save_pretrained):
        with pytest.raises(pmvit.PmvitError, match="lose the compression"):
            verb("anywhere")
    pmvit.decompress(model)
    assert {key: id(value) for key, value in model.named_modules()} == {key: id(value) for key, value in before.items()}
    assert torch.equal(logits(model, name), logits(original(name), name))


@pytest.mark.parametrize("name", [TWO_LAYERS, GEMMA, INTERNVL])
def test_a_whole_model_comes_back_from_its_folder(name: str, tmp_path: Path) -> None:
    """Weights that are one parameter still are, and it still knows when to stop writing."""
    small: Any = pmvit.compress(original(name), adaptive(name))
    small.generation_config = copy.copy(small.generation_config)
    small.generation_config.eos_token_id = [2, 9]
    pmvit.save(small, tmp_path / "saved")
    loaded: Any = pmvit.load(tmp_path / "saved")
    assert torch.equal(logits(loaded, name), logits(small, name))
    assert type(loaded) is type(small)
    assert loaded.generation_config.eos_token_id == [2, 9]
    heads = [(model.get_input_embeddings().weight, model.get_output_embeddings().weight) for model in (small, loaded)]
    assert (heads[0][0] is heads[0][1]) == (heads[1][0] is heads[1][1]) == (name != TWO_LAYERS)
    assert torch.equal(logits(pmvit.decompress(loaded), name), logits(original(name), name))


def test_a_saved_model_says_how_it_writes_and_no_more(tmp_path: Path) -> None:
    host = host_of(original(LLAVA))
    description = host.describe()
    built: Any = host.build(description)
    assert built.generation_config.eos_token_id == 2
    for change, said in (
        ({"generation": {"prompt_lookup_num_tokens": 3}}, "prompt_lookup_num_tokens"),
        ({"generation": {"max_length": 10**9}}, "expected numbers up to"),
        ({"config": {**description["config"], "text_config": {"model_type": "timm_wrapper"}}}, "timm_wrapper"),
    ):
        with pytest.raises(pmvit.PmvitError, match=said):
            host.build({**description, **change})


def test_padding_would_merge_with_the_image() -> None:
    """An image that does not fill its tile is refused; one that does is not, however attention is computed."""
    small = pmvit.compress(original(IDEFICS), adaptive(IDEFICS))
    mask = torch.ones(1, 2, 48, 48, dtype=torch.long)
    expected = logits(small, IDEFICS)
    assert torch.equal(logits(small, IDEFICS, pixel_attention_mask=mask), expected)
    small.set_attn_implementation("eager")
    assert (logits(small, IDEFICS, pixel_attention_mask=mask) - expected).abs().max() < 1e-4
    mask[0, 1, :, 24:] = 0
    with pytest.raises(pmvit.PmvitError, match="expected images that fill their tiles"):
        logits(small, IDEFICS, pixel_attention_mask=mask)
    assert logits(original(IDEFICS), IDEFICS, pixel_attention_mask=mask).isfinite().all()


def qwen(version: str) -> Any:
    sizes = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 16}
    if version == "Qwen2VL":
        sizes = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2}
    config = getattr(transformers, f"{version}Config")(vision_config=sizes, text_config=TINY)
    return getattr(transformers, f"{version}Model")(config)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (partial(qwen, "Qwen2VL"), "takes the patches of all images in one row"),
        (partial(qwen, "Qwen3VL"), "takes the patches of all images in one row"),
        (partial(qwen, "Qwen2_5_VL"), "attends inside windows"),
    ],
)
def test_towers_that_cannot_be_compressed_say_why(make: Any, why: str) -> None:
    with torch.device("meta"):
        model = make()
    assert find_host(model) is not None
    with pytest.raises(pmvit.PmvitError, match=why) as raised:
        pmvit.measure(model, torch.randn(1, 3, 48, 48), progress=False)
    assert "\n" not in str(raised.value)


def test_a_folder_of_transformers_at_the_command_line(tmp_path: Path, pictures: Path) -> None:
    original(REGISTERS).save_pretrained(tmp_path / "hub")
    loaded = create_model(str(tmp_path / "hub"))
    assert torch.equal(logits(loaded, REGISTERS), logits(original(REGISTERS), REGISTERS))
    options = ["--data", str(pictures), "--keep", "0.6", "--limit", "16", "--workers", "0"]
    made = pmvit_here("compress", f"hf:{tmp_path / 'hub'}", *options, "-o", tmp_path / "small")
    assert made.returncode == 0, made.stderr
    small = pmvit.load(tmp_path / "small")
    assert pmvit.flops(small).macs < pmvit.flops(loaded).macs
    assert len(written(small, REGISTERS)) == len(written(loaded, REGISTERS))
    told = pmvit_here("evaluate", tmp_path / "small", "--data", pictures, "--limit", 16, "--workers", 0)
    assert "cosine" in told.stdout
    card = json.loads((tmp_path / "small/config.json").read_text())
    assert card["host"] == "hf-vlm"
