"""Options of `optimize_for_inference`."""

from dataclasses import dataclass
from typing import Literal, TypedDict

from pmvit.config.base import check_choices

Target = Literal["eager", "graph", "onnx"]
Form = Literal["segment", "gather", "matmul"]


class InferenceOptions(TypedDict, total=False):
    """Keywords of `optimize_for_inference`: fields of `InferenceConfig`."""

    target: Target
    tokens: Literal["head", "all"]
    rewrite: bool
    shortcut: bool
    drop_dead: bool
    fuse: bool
    form: Form | Literal["auto"]
    pack: bool | None


@dataclass(frozen=True)
class InferenceConfig:
    """Which passes run, and for what. Blocks on windows (Swin) know `target`, `fuse` and `form`: all tokens are read.

    Attributes:
        target: `eager` for PyTorch as it is; `graph` for compilers and exporters, which want no writing in place;
            `onnx` for ONNX, which has no fused attention that all runtimes know.
        tokens: `head` if only what the head reads is needed of the last block; `all` if tokens are read too, as by a
            segmentation decoder.
        rewrite: Put plain blocks together anew; without, the next two have no blocks to work on.
        shortcut: Compute of the last block only what the head reads.
        drop_dead: Leave out what nothing depends on.
        fuse: Leave a block and enter the next in one matrix.
        form: Of the transitions; `auto` is the cheapest for each (see `transitions.form_of`).
        pack: Lay out the weights of rewritten blocks as oneDNN reads them, for eager PyTorch on a CPU; `None` tries out
            once whether that is faster.
    """

    target: Target = "eager"
    tokens: Literal["head", "all"] = "head"
    rewrite: bool = True
    shortcut: bool = True
    drop_dead: bool = True
    fuse: bool = True
    form: Form | Literal["auto"] = "auto"
    pack: bool | None = None

    def __post_init__(self) -> None:
        check_choices(self)
