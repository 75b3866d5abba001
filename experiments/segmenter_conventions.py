"""Ways to count the FLOPs of Segmenter ViT-L/16 at 640 x 640: which of them may the paper have followed?"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

from pmvit.measuring.flops import ModelCost

ENCODER, CLASSES, SIDE, PATCH, WIDTH, DEPTH = "vit_large_patch16_384", 150, 640, 16, 1024, 24
TOKENS = (SIDE // PATCH) ** 2
PRUNE = 0.1
PAPER = {0.8: 528, 0.7: 456, 0.5: 364}  # GFLOPs by the share of tokens kept
GIGA = 1e9


Decoder = Literal["all", "without attention", "nothing"]


@dataclass(frozen=True)
class Convention:
    """A way to count.

    Attributes:
        skip: Blocks that are not compressed.
        products: How many of attention's two products count, in the encoder.
        decoder: What of the decoder counts.
        dense: M and R as products of whole matrices.
        pruned_of_kept: Pruned tokens are taken off the share r instead of off the rest.
        of_all: r is the share of the tokens of all blocks, so that the compressed ones keep fewer.
    """

    skip: int = 4
    products: int = 2
    decoder: Decoder = "all"
    dense: bool = False
    pruned_of_kept: bool = False
    of_all: bool = False

    def __str__(self) -> str:
        ours = Convention()
        changes = {
            f"{self.skip or 'no'} blocks left alone": self.skip != ours.skip,
            ("no product" if self.products == 0 else "one product") + " of attention": self.products != ours.products,
            "encoder alone" if self.decoder == "nothing" else f"decoder {self.decoder}": self.decoder != ours.decoder,
            "M and R dense": self.dense,
            "pruned tokens taken off r": self.pruned_of_kept,
            "r of the tokens of all blocks": self.of_all,
        }
        return "; ".join(change for change, made in changes.items() if made) or "everything that runs"

    def share(self, keep: float) -> float:
        """Of the tokens that a compressed block runs on."""
        if keep == 1:
            return 1.0
        share = keep - PRUNE if self.pruned_of_kept else keep
        return (share * DEPTH - self.skip) / (DEPTH - self.skip) if self.of_all else share

    def gflops(self, cost: ModelCost, keep: float) -> float:
        """Of the whole model, with the same number of tokens in all compressed blocks: the least for this share."""
        kept = round(self.share(keep) * TOKENS) + 1
        block = cost.blocks[0]

        def of_block(tokens: int) -> float:
            part = tokens / (TOKENS + 1)
            return block.linear * part + block.quadratic * part**2 * self.products / 2

        patches = TOKENS * WIDTH * 3 * PATCH**2
        attention = 2 * 2 * (TOKENS + CLASSES) ** 2 * WIDTH
        decoder = {"all": cost.outside - patches, "nothing": 0}
        decoder["without attention"] = decoder["all"] - attention
        small = of_block(kept) + (2 * kept * (TOKENS + 1) * WIDTH if self.dense and keep < 1 else 0)
        return (self.skip * of_block(TOKENS + 1) + (DEPTH - self.skip) * small + patches + decoder[self.decoder]) / GIGA

    def most(self, cost: ModelCost, keep: float) -> float:
        """With the tokens spread as unevenly as can be: some blocks keep all of theirs, the others none."""
        share = self.share(keep)
        uneven = cost.blocks[0].quadratic * self.products / 2 * (share - share**2)
        return self.gflops(cost, keep) + (DEPTH - self.skip) * uneven / GIGA

    def deviation(self, cost: ModelCost) -> float:
        """How far the paper's figures lie outside of what plans can give, relative to them, at the worst."""
        outside = []
        for keep, printed in PAPER.items():
            least, most = self.gflops(cost, keep), self.most(cost, keep)
            outside.append(max(least - printed, printed - most, 0) / printed)
        return max(outside)

    def keep_for(self, cost: ModelCost, gflops: float) -> float:
        """The share of tokens that costs this much, the same in all compressed blocks."""
        low, high = 0.0, 1.0
        while high - low > 1e-4:
            middle = (low + high) / 2
            low, high = (middle, high) if self.gflops(cost, middle) < gflops else (low, middle)
        return low


ONE_CHANGE = (
    Convention(),
    Convention(decoder="nothing"),
    Convention(decoder="without attention"),
    Convention(products=0),
    Convention(products=1),
    Convention(skip=3),
    Convention(skip=2),
    Convention(skip=0),
    Convention(dense=True),
    Convention(pruned_of_kept=True),
    Convention(of_all=True),
)


def all_conventions() -> Iterator[Convention]:
    decoders: tuple[Decoder, ...] = get_args(Decoder)
    choice = (False, True)
    for skip, products, decoder in product((4, 3, 2, 0), (2, 1, 0), decoders):
        for dense, of_kept, of_all in product(choice, choice, choice):
            if skip or not of_all:  # with all blocks compressed, r is of all blocks anyway
                yield Convention(skip, products, decoder, dense, of_kept, of_all)
