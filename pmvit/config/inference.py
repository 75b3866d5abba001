"""Options of `optimize_for_inference`, and where speed is measured."""

from dataclasses import dataclass
from typing import Literal, TypedDict

from pmvit.config.base import check_choices, expect

Target = Literal["eager", "graph", "onnx"]
Form = Literal["segment", "gather", "matmul"]
RuntimeName = Literal[
    "eager",
    "compile",
    "onnxruntime",
    "openvino",
    "torch-export",
    "aot-inductor",
    "torchscript",
    "executorch",
    "litert",
]


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


class SpeedOptions(TypedDict, total=False):
    """Keywords of `plan` and `curve`: fields of `SpeedConfig`."""

    runtime: RuntimeName
    batch: int
    threads: int | None
    rounds: int


@dataclass(frozen=True)
class SpeedConfig:
    """Where a model will run, and how its speed is measured there.

    Attributes:
        runtime: Where the model will run.
        batch: How many images it will get at a time.
        threads: CPU threads it will have; as many as PyTorch takes if not given.
        rounds: How often each model takes its turn while speed is measured.
    """

    runtime: RuntimeName = "eager"
    batch: int = 1
    threads: int | None = None
    rounds: int = 20

    def __post_init__(self) -> None:
        check_choices(self)
        expect(self, "batch", self.batch >= 1, "1 or more")
        expect(self, "threads", self.threads is None or self.threads >= 1, "1 or more")
        expect(self, "rounds", self.rounds >= 3, "3 or more")
