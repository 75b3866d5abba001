"""Draw what the tower of a vision-language model merges of photographs, and count what the language model loses by it.

    python -m scripts.vlm_picture --data DATA -o docs/vlm.png

The model is a small LLaVA: its tower has the weights of timm's ViT-Tiny (`DATA/weights`), its language model random
ones, which nothing here runs. Photographs are those of Oxford-IIIT Pet (`DATA/pets/images`).
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from torch import nn

import pmvit
from pmvit.data.batches import first_images
from pmvit.data.opening import open_loader
from pmvit.loading import create_model
from pmvit.reporting.pictures.visualize import visualize
from tests.hosts.layouts import hugging_face_vit

SHARES = (0.8, 0.7, 0.6)  # of the tower's FLOPs
SHOWN = (3, 6, 10)  # blocks
PHOTOGRAPHS = (40, 700)  # of the test photographs, by their names


def llava_on(classifier: nn.Module) -> Any:
    """A LLaVA whose vision tower is the `ViTModel` in a classifier."""
    from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    tower: Any = classifier.get_submodule("vit")
    text = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    config = LlavaConfig(vision_config=tower.config, text_config=text, image_token_index=127)
    model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.load_state_dict(tower.state_dict(), strict=False)  # it has a pooler that nothing reads
    return model.eval()


def join(pictures: list[Path], output: Path) -> None:
    """Pictures one below the other, of few enough colours for a page."""
    opened = [Image.open(picture).convert("RGB") for picture in pictures]
    sheet = Image.new("RGB", (max(each.width for each in opened), sum(each.height for each in opened)), "white")
    top = 0
    for each in opened:
        sheet.paste(each, (0, top))
        top += each.height
    sheet.quantize(192).save(output, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=200, help="to measure on; as many others to compare on")
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    folder = arguments.data / "pets/images"
    model = llava_on(
        hugging_face_vit(
            create_model("vit_tiny_patch16_224", arguments.data / "weights/vit_tiny_patch16_224.safetensors")
        )
    )
    images, others = (
        first_images(
            open_loader(model, str(folder / part), labels=False, batch_size=50, shuffle=True), arguments.images
        )
        for part in ("train", "test")
    )
    adaptive = pmvit.measure(model, images.split(50))
    fixed = pmvit.measure(model, images.split(50), method="measured")
    whole = pmvit.flops(model).gflops
    made: dict[float, dict[str, nn.Module]] = {}
    for share in SHARES:
        made[share] = {
            "adaptive": pmvit.compress(model, pmvit.plan(adaptive, flops_share=share)),
            "fixed": pmvit.compress(model, pmvit.plan(fixed, flops_share=share)),
        }
    print(f"tower: {whole:.3f} GFLOPs; cosine of what the language model reads, {len(others)} photographs")
    for share, models in made.items():
        for name, small in models.items():
            cosine = pmvit.evaluate(small, others.split(50), reference=model).cosine
            print(f"{share:.0%} {name}: {pmvit.flops(small).gflops:.3f} GFLOPs, {cosine:.4f}")
    with TemporaryDirectory() as drawn:
        photographs = [sorted((folder / "test").glob("*/*.jpg"))[number] for number in PHOTOGRAPHS]
        pictures = []
        for number, photograph in enumerate(photographs):
            result = visualize(
                made[SHARES[-1]]["adaptive"],
                photograph,
                Path(drawn) / str(number),
                what=["blocks"],
                blocks=SHOWN,
                formats="png",
            )
            pictures += [picture for written in result.images.values() for picture in written]
        join(pictures, arguments.output)


if __name__ == "__main__":
    main()
