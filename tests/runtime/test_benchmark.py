"""The benchmark: what it compares is what it says, and what it prints can be believed."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import pmvit
from pmvit.planning import Plan
from pmvit.prune_merge import PruneMerge
from pmvit.runtime.bench.run import overhead
from pmvit.runtime.bench.variants import VARIANTS, in_place_plan, variant
from pmvit.runtime.blocks.graph import PartialBlock
from tests.helpers import pmvit_here, small_plan, small_vit


@pytest.fixture(scope="module")
def small() -> Any:
    return pmvit.compress(small_vit(), small_plan(small_vit()))


def test_variants_are_what_they_say(small: Any) -> None:
    images = torch.randn(2, 3, 96, 96)
    made = {name: variant(name, small, "eager") for name in VARIANTS}
    with torch.inference_mode():
        outputs = {name: model(images) for name, model in made.items()}
        plain = small_vit()(images)
    for name in ("original", "original-optimized"):
        assert torch.allclose(outputs[name], plain, atol=1e-4)
    for name in ("compressed", "optimized"):
        assert torch.allclose(outputs[name], small(images), atol=1e-4)
    macs = {name: pmvit.flops(model).macs for name, model in made.items()}
    assert macs["optimized"] < macs["compressed"]
    assert macs["bound"] < macs["compressed"]  # the same blocks without the operations
    assert abs(macs["tome"] - macs["compressed"]) < 0.15 * macs["compressed"]
    assert variant("compressed", small, "graph")(images).shape == (2, 7)


def test_bound_runs_as_many_tokens_in_every_block(small: Any) -> None:
    seen: list[int] = []
    model: Any = variant("bound", small, "eager")
    for block in model.blocks:
        block.block.register_forward_pre_hook(lambda _module, tokens: seen.append(tokens[0].shape[1]))
    with torch.inference_mode():
        model(torch.randn(1, 3, 96, 96))
    assert seen == [wrapper.centres.numel() for wrapper in small.blocks]


def test_direct_leaves_pruned_tokens_alone(small: Any) -> None:
    model: Any = variant("direct", small, "eager")
    tokens = torch.randn(1, 37, 48)
    with torch.inference_mode():
        output = model.blocks[0](tokens)
    is_kept = torch.zeros(37, dtype=torch.bool)
    is_kept[small.blocks[0].centres] = True
    assert torch.equal(output[:, ~is_kept], tokens[:, ~is_kept])
    assert not torch.equal(output[:, is_kept], tokens[:, is_kept])


def test_rows_have_everything_and_are_written(small: Any, tmp_path: Path) -> None:
    result = pmvit.benchmark(
        small, against=["optimized", "bound"], batches=[1], rounds=5, progress=False, threads=1, memory=True
    )
    assert [(row.variant, row.batch) for row in result.rows] == [
        ("original", 1),
        ("optimized", 1),
        ("bound", 1),
    ]
    for row in result.rows:
        assert row.p50 is not None and row.p95 is not None and row.throughput is not None  # noqa: PT018
        assert row.p50 <= row.p95
        assert row.throughput == pytest.approx(row.batch / row.p50)
        assert row.memory is not None and 0 < row.memory < 1000  # noqa: PT018
        assert row.speedup is not None and row.gflops is not None  # noqa: PT018
        assert row.efficiency == pytest.approx(row.speedup.value * row.gflops / (result.rows[0].gflops or 0))
    assert result.rows[0].speedup == (1.0, 1.0, 1.0)
    assert result.environment["threads"] == 1
    result.write(tmp_path)
    assert len(json.loads((tmp_path / "benchmark.json").read_text())["rows"]) == 3
    assert (tmp_path / "benchmark.md").read_text().count("| eager |") == 3
    with Image.open(tmp_path / "benchmark.png") as picture:
        assert picture.width > 300


def test_the_baseline_is_the_true_original_where_that_is_at_hand(small: Any) -> None:
    tuned, wider = copy.deepcopy(small), small_vit(embed_dim=96)
    with torch.no_grad():
        next(tuned.parameters()).add_(0.1)
    asked: list[tuple[Any, Any, str]] = [
        (small, None, "the original"),
        (tuned, None, "the same weights uncompressed"),
        (tuned, small_vit(), "the original"),
        (tuned, wider, "another model"),
    ]
    for model, original, title in asked:
        result = pmvit.benchmark(model, original=original, against=[], batches=[1], rounds=3, progress=False)
        assert result.environment["original"] == title
        assert result.rows[0].gflops == pytest.approx(pmvit.flops(original or small_vit()).gflops)


@pytest.mark.parametrize("host", ["beit_base_patch16_224", "eva02_tiny_patch14_224", "vit_relpos_small_patch16_224"])
def test_other_hosts_run_and_what_cannot_is_a_row(host: str) -> None:
    model = small_vit(host, patch_size=16)
    small = pmvit.compress(model, small_plan(model))
    result = pmvit.benchmark(
        small, against=["compressed", "optimized", "bound", "direct", "tome"], batches=[1], rounds=3, progress=False
    )
    failures = {row.variant: row.failure for row in result.rows if row.failure is not None}
    assert list(failures) == ["tome"]
    assert "plain blocks" in failures["tome"]
    assert "does not run: PmvitError: expected a timm VisionTransformer" in result.to_markdown()


def test_only_the_optimised_have_other_blocks_than_the_library(small: Any) -> None:
    for name in VARIANTS:
        model = variant(name, small, "graph")
        rewritten = [module for module in model.modules() if isinstance(module, PartialBlock)]
        assert len(rewritten) == (3 if name in ("optimized", "original-optimized") else 0)


def test_overhead_has_everything_in_place_and_changes_nothing(small: Any) -> None:
    placed: Any = pmvit.compress(small_vit(), in_place_plan((6, 6), 3))
    images = torch.randn(2, 3, 96, 96)
    with torch.inference_mode():
        assert torch.allclose(placed(images), small_vit()(images), atol=1e-4)
    assert all(wrapper.num_groups == 36 for wrapper in placed.blocks)
    rows = overhead(small, batch=2, rounds=3, threads=1).rows
    assert [row.variant for row in rows][:2] == ["original", "prune and merge"]
    assert len(rows) == 7
    kept = pmvit.compress(small_vit(), Plan.keep_all((6, 6), 3))
    assert not any(isinstance(module, PruneMerge) for module in kept.modules())
    assert all(row.failure is None for row in rows)


def test_wrong_input_is_said(small: Any) -> None:
    for options, message in (
        ({"against": ["nobody"]}, "variants among"),
        ({"runtimes": ["abacus"]}, "expected one of onnx"),
        ({"batches": []}, "batch sizes of 1 and more"),
        ({"images": torch.zeros(1, 3, 9, 9)}, "as the model takes them"),
        ({"against": {"mine": small}, "batches": [1]}, "original model: there is no model of that name"),
    ):
        with pytest.raises(pmvit.PmvitError, match=message):
            pmvit.benchmark(small, **options)
    with pytest.raises(pmvit.PmvitError, match="not compressed"):
        pmvit.benchmark(small_vit())


def test_the_command_line(small: Any, tmp_path: Path) -> None:
    pmvit.save(small, tmp_path / "out")
    command = ("benchmark", tmp_path / "out", "--rounds", 3, "--no-memory")
    result = pmvit_here(*command, "--batch", 2, "--json")
    assert result.returncode == 0, result.stderr
    variants = [row["variant"] for row in json.loads(result.stdout)["rows"]]
    assert variants == ["original", "compressed", "optimized", "bound"]
    wrong = pmvit_here(*command, "--batch", "two")
    assert wrong.returncode == 1
    assert "as in 1,16" in wrong.stderr


def test_memory_that_was_free_before_is_not_counted_as_saved(small: Any, tmp_path: Path) -> None:
    """A program whose imports leave a hundred megabytes to the C library, which gives them back when it is asked."""
    pmvit.save(small, tmp_path / "small")
    (tmp_path / "program.py").write_text(
        "from pathlib import Path\n"
        "from pmvit.runtime.bench.memory import peak_memory\n"
        "junk = [bytes(1000) for _ in range(100_000)]\n"
        "last = junk.pop()  # behind the others, so that these cannot be given back by themselves\n"
        "del junk\n"
        "if __name__ == '__main__':\n"
        f"    print(peak_memory('compressed', Path({str(tmp_path / 'small')!r}), 'eager', None, (1, 3, 96, 96), 1))\n"
    )
    said = subprocess.run([sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "None" or float(said.stdout) > 0
