"""Bring a compressed model to the Hugging Face Hub, and open it from there as anybody would.

    hf auth login
    python examples/hub_round_trip.py owner/name --private

The model is the built-in one of `pmvit demo`, compressed and evaluated here. `HF_ENDPOINT` names another hub.
"""

import argparse
from dataclasses import asdict

import torch

import pmvit
from pmvit.data.demo import demo_loader, demo_model
from pmvit.saving.card import CardDetails


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo", help="owner/name on the hub, or owner/name@branch")
    parser.add_argument("--private", action="store_true", help="nobody else may see it, if it is new")
    parser.add_argument("--keep", type=float, default=0.6)
    arguments = parser.parse_args()

    model = demo_model()
    measured = pmvit.measure(model, demo_loader("train", 16, 64), progress=False)
    small = pmvit.compress(model, pmvit.plan(measured, keep=arguments.keep))
    evaluations = {
        name: asdict(pmvit.evaluate(each, demo_loader("test", 32, 128), progress=False))
        for name, each in (("original", model), ("compressed", small))
    }

    card = CardDetails(measured=evaluations, dataset="fashion_mnist", license="apache-2.0")
    commit = pmvit.push_to_hub(small, arguments.repo, private=arguments.private or None, card=card)
    print(f"pushed: {commit.commit_url}")

    name = f"hf-hub:{arguments.repo}"
    loaded = pmvit.load(name)
    images, _ = next(iter(demo_loader("test", 8, 8)))
    with torch.inference_mode():
        difference = (loaded(images) - small(images)).abs().max().item()
    before, after = (pmvit.flops(each).gflops for each in (model, loaded))
    print(f"pmvit.load({name!r}): {before:.3f} -> {after:.3f} GFLOPs, largest difference of a logit {difference}")
    print(f"top-1: {evaluations['original']['top1']:.1%} -> {evaluations['compressed']['top1']:.1%}")


if __name__ == "__main__":
    main()
