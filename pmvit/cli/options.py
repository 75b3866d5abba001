"""What the verbs are told: their arguments and options, each said once."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer

from pmvit.cli.completion import VALUES, complete_model, value_of
from pmvit.cli.screen import keep_output_for_json
from pmvit.errors import PmvitError


def usable_device(context: typer.Context, device: str) -> str:
    """A device that this PyTorch computes on."""
    if device != "cpu" and not context.resilient_parsing:
        import torch

        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).strip().splitlines()[0]
            raise PmvitError(f"--device: expected one that PyTorch can use here; got {device} ({reason})") from None
    return device


MODEL_HELP = (
    "A timm name or hf-hub:owner/name; hf:owner/name (transformers); "
    "torchvision:name; segmenter:name; or a saved model."
)
ModelName = Annotated[str, typer.Argument(help=MODEL_HELP, autocompletion=complete_model)]
Saved = Annotated[Path, typer.Argument(help="A model saved by pmvit: a folder or a .safetensors file.")]
Original = Annotated[
    str | None,
    typer.Option("--original", help="Where the original is, a path or a name; else it is found where it came from."),
]
WeightsFile = Annotated[Path | None, typer.Option("--weights", help="Weights file; without it timm fetches its own.")]
ModelArguments = Annotated[
    list[str] | None, typer.Option("--model-arg", help="More for timm.create_model, as name=value; may be repeated.")
]
DataArguments = Annotated[
    list[str] | None, typer.Option("--data-arg", help="How images are prepared, as in mean=[0.5,0.5,0.5]; repeatable.")
]
DATA_HELP = "Folder of images, in one subfolder a class or alone; hf:NAME@SPLIT, hf-stream:NAME@SPLIT; or *.tar shards."
MASKS_HELP = "With a segmenter: a folder in the layout of ADE20K, Cityscapes, Pascal-Context, or images and masks."
Data = Annotated[str, typer.Option("--data", help=f"{DATA_HELP} {MASKS_HELP}")]
Validation = Annotated[
    str | None, typer.Option("--val", help="Images to validate on; if not given, --data/val or --data/test.")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Where to write.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Images a batch.")]
Workers = Annotated[int, typer.Option("--workers", min=0, help="Processes that read images.")]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        help="cpu, cuda, cuda:1, mps, ...",
        autocompletion=value_of("device"),
        callback=usable_device,
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="CPU threads; as many as PyTorch takes if left out.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document and nothing else.", callback=keep_output_for_json)
]

SCORE_OPTIONS = {
    "iterations": Annotated[int | None, typer.Option(min=1, help="Batches to score at most; 500 if not given.")],
    "scorer": Annotated[str | None, typer.Option(help="grad_attn, attn, class_attn, grad_class_attn, grad or random.")],
    "loss": Annotated[
        str | None, typer.Option(help="labels; or predicted, entropy, which need no labels; embedding without classes.")
    ],
    "abs_per_sample": Annotated[
        bool | None, typer.Option("--abs-per-sample/--abs-per-batch", help="Where scores are made absolute.")
    ],
}
MERGE_COST_OPTIONS = {
    "images": Annotated[int | None, typer.Option(min=1, help="measured: images to use at most; 1024 if not given.")],
    "parts": Annotated[
        str | None, typer.Option(help="measured: split (attention and MLP by themselves; default) or whole blocks.")
    ],
    "groups": Annotated[str | None, typer.Option(help="measured: groups of neighbours (default) or of any tokens.")],
    "mirror": Annotated[
        bool | None, typer.Option("--mirror/--no-mirror", help="measured: mirror images count as well (default).")
    ],
    "nested": Annotated[
        bool | None, typer.Option("--nested/--no-nested", help="measured: what is merged stays merged (default).")
    ],
    "early": Annotated[
        float | None,
        typer.Option(help="measured: raise costs of the first block so much, later ones less; by 5."),
    ],
}
PLAN_OPTIONS = {
    "method": Annotated[
        str | None,
        typer.Option(help="measured (merge costs; default), scored (Eq. 9; Swin's), paper (its choices); tome, ..."),
    ],
    "keep": Annotated[float | None, typer.Option(help="Share of the patch tokens to keep.")],
    "prune": Annotated[float | None, typer.Option(help="Share of the patch tokens to prune; the rest merge.")],
    "gflops": Annotated[float | None, typer.Option(help="Budget in GFLOPs (MACs), instead of --keep.")],
    "flops_share": Annotated[float | None, typer.Option(help="Budget as a share of the original's FLOPs.")],
    "speedup": Annotated[
        float | None, typer.Option(help="Budget as a speed-up measured on this machine, eager, in batches of 16.")
    ],
    "scope": Annotated[str | None, typer.Option(help="global or local.")],
    "normalize_layers": Annotated[
        bool | None, typer.Option("--normalize-layers/--no-normalize-layers", help="Scores of a layer over their norm.")
    ],
    "layer_decay": Annotated[float | None, typer.Option(help="Scores of layer l times 1 - decay * l.")],
    "grouping": Annotated[str | None, typer.Option(help="grid, row or segment.")],
    "weight_rule": Annotated[str | None, typer.Option(help="sum, average, normalize, max, mean, ones or gaussian.")],
    "reconstruct": Annotated[str | None, typer.Option(help="residual or pinv.")],
    "attention_bias": Annotated[
        bool | None, typer.Option("--attention-bias/--no-attention-bias", help="Attention to a group by its log size.")
    ],
    "least_step": Annotated[
        float | None, typer.Option(help="measured: share of its tokens that a block has to merge to do so; 0.08.")
    ],
    "skip": Annotated[
        list[str] | None, typer.Option(help="A block to leave alone, repeatable; or none. A segmenter skips four.")
    ],
}
METHOD_OPTIONS = {
    "r": Annotated[str | None, typer.Option(help="tome, ...: tokens to merge a block, or one number for each: 9,9,8.")],
    "method_arg": Annotated[
        list[str] | None, typer.Option(help="tome, ...: another of its options, as blocks=[3,6,9]; repeatable.")
    ],
}
SEGMENTER_OPTIONS = {
    "size": Annotated[int | None, typer.Option(min=1, help="segmenter: side of its images and windows, in pixels.")],
    "decoder": Annotated[str | None, typer.Option(help="segmenter: mask or linear.")],
    "classes": Annotated[int | None, typer.Option(min=2, help="segmenter: classes of a pixel.")],
}
FirstLabel = Annotated[
    int | None, typer.Option(min=0, max=255, help="Number of the first class in plain masks; 0 if not given.")
]
MASK_OPTIONS = {"first_label": FirstLabel}
FINETUNE_OPTIONS = {
    "epochs": Annotated[int | None, typer.Option(help="Passes over the training images.")],
    "batch_size": Annotated[int | None, typer.Option(help="Images a step, over all processes.")],
    "accumulate": Annotated[int | None, typer.Option(help="Passes a step, if one does not fit into memory.")],
    "optimizer": Annotated[str | None, typer.Option(help="One of timm's optimizers.")],
    "lr": Annotated[float | None, typer.Option(help="Highest learning rate.")],
    "min_lr": Annotated[float | None, typer.Option(help="Learning rate at the end.")],
    "warmup_epochs": Annotated[float | None, typer.Option(help="Epochs in which the learning rate rises.")],
    "scheduler": Annotated[str | None, typer.Option(help="cosine, tanh, poly, step or multistep.")],
    "weight_decay": Annotated[float | None, typer.Option(help="On weights; never on M and R.")],
    "clip": Annotated[float | None, typer.Option(help="Largest norm of the gradient; 0 for any.")],
    "ema": Annotated[float | None, typer.Option(help="Decay of a moving average of the weights; 0 for none.")],
    "alpha": Annotated[float | None, typer.Option(help="Weight of the divergence from the original (Eq. 11).")],
    "temperature": Annotated[float | None, typer.Option(help="Of the distributions that are compared.")],
    "labels": Annotated[
        bool | None, typer.Option("--labels/--label-free", help="Without labels: the divergence alone.")
    ],
    "label_smoothing": Annotated[float | None, typer.Option(help="Share of a label spread over all classes.")],
    "token_alpha": Annotated[float | None, typer.Option(help="Weight of token-level distillation.")],
    "token_blocks": Annotated[list[int] | None, typer.Option(help="A block whose tokens are compared; repeatable.")],
    "matrices": Annotated[str | None, typer.Option(help="frozen, learnable or learnable+frozen.")],
    "freeze_matrices_after": Annotated[int | None, typer.Option(help="Epochs in which M and R learn.")],
    "matrix_lr_factor": Annotated[float | None, typer.Option(help="Learning rate of M and R, as a multiple.")],
    "crop_scale": Annotated[tuple[float, float] | None, typer.Option(help="Shares of an image that crops show.")],
    "resize_scale": Annotated[
        tuple[float, float] | None,
        typer.Option(help="With masks: least and largest size, of that which covers a crop."),
    ],
    "hflip": Annotated[float | None, typer.Option(help="Probability that an image is mirrored.")],
    "color_jitter": Annotated[float | None, typer.Option(help="Strength of colour changes.")],
    "auto_augment": Annotated[str | None, typer.Option(help="timm's policy, as rand-m9-mstd0.5-inc1; or none.")],
    "random_erasing": Annotated[float | None, typer.Option(help="Probability that a part is erased.")],
    "mixup": Annotated[float | None, typer.Option(help="Alpha of mixup.")],
    "cutmix": Annotated[float | None, typer.Option(help="Alpha of cutmix.")],
    "cpu": Annotated[bool | None, typer.Option("--cpu/--no-cpu", help="Train on the CPU even beside a GPU.")],
    "mixed_precision": Annotated[str | None, typer.Option(help="no, fp16 or bf16; else as accelerate is set up.")],
    "channels_last": Annotated[bool | None, typer.Option("--channels-last/--channels-first", help="Memory format.")],
    "compile": Annotated[bool | None, typer.Option("--compile/--no-compile", help="With torch.compile.")],
    "seed": Annotated[int | None, typer.Option(help="Of everything random.")],
    "workers": Annotated[int | None, typer.Option(help="Processes that read images.")],
    "checkpoint_every": Annotated[int | None, typer.Option(help="Steps between checkpoints within an epoch.")],
    "keep_checkpoints": Annotated[int | None, typer.Option(help="How many of the last ones are kept.")],
    "log_with": Annotated[str | None, typer.Option(help="A tracker of accelerate, as tensorboard.")],
}
CALIBRATE_OPTIONS = {
    name: FINETUNE_OPTIONS[name] for name in ("epochs", "batch_size", "lr", "hflip", "cpu", "seed", "workers")
}
Preset = Annotated[
    str | None,
    typer.Option(
        help="deit_tiny, deit_small, mae_base, swin_tiny, segmenter, calibrate, quick; options override it.",
        autocompletion=value_of("preset"),
    ),
]
EpochImages = Annotated[int | None, typer.Option(help="Images that make an epoch, if not all; for streams.")]
Learning = Annotated[
    str,
    typer.Option("--learn", help="What tuning may change of M and R: group, dense.", autocompletion=value_of("learn")),
]
Paper = Annotated[bool, typer.Option("--paper", help="The paper's choices wherever an option is not given.")]

for _group in (SCORE_OPTIONS, MERGE_COST_OPTIONS, PLAN_OPTIONS, SEGMENTER_OPTIONS, FINETUNE_OPTIONS):
    for _name, _option in _group.items():
        if _name in VALUES:
            get_args(_option)[1].autocompletion = value_of(_name)

Command = TypeVar("Command", bound=Callable[..., None])


def with_options(*groups: dict[str, Any]) -> Callable[[Command], Command]:
    """Give a command the options of these groups, all of them `None` if not given, in place of its `**options`."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for group in groups
            for name, annotation in group.items()
        ]
        command.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in (*own, *more)}
        return command

    return decorate


def given(options: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """Those options of a group that were given."""
    return {name: options[name] for name in group if options[name] is not None}
