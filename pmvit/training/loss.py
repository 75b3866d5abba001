"""The loss of fine-tuning (Eq. 11): cross-entropy, divergence from the original, and agreement of the token maps."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.config import FinetuneConfig
from pmvit.data.batches import IGNORED, check_labels
from pmvit.errors import PmvitError
from pmvit.hosts import host_of


def divergence(logits: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(q || p) of the tempered distributions, the mean over images, times the squared temperature (Eq. 11).

    Each pixel of a dense prediction, (batch, height, width, classes), has a distribution of its own and counts alike.
    The square keeps the size of the gradient the same at every temperature.
    """
    log_p = (logits.float() / temperature).log_softmax(-1)
    log_q = (target.float() / temperature).log_softmax(-1)
    return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1).mean() * temperature**2


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """CE(y, p) of Eq. 11, the mean over images, or over those pixels that are labelled; classes are last in logits.

    Labels are class numbers, one per image, or one per pixel with 255 for those that do not count; or distributions.
    """
    if labels.is_floating_point():  # mixup smooths its distributions itself
        return F.cross_entropy(logits.float(), labels)
    if labels.dim() != logits.dim() - 1:
        what = "image" if logits.dim() == 2 else "pixel"
        raise PmvitError(f"expected one label per {what} for this model; got labels of shape {tuple(labels.shape)}")
    check_labels(labels, logits.shape[-1])
    if logits.dim() == 2:
        return F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)
    scores = logits.float().movedim(-1, 1)
    if scores.shape[2:] != labels.shape[1:]:  # some models label fewer pixels than they take
        scores = F.interpolate(scores, size=labels.shape[1:], mode="bilinear")
    sums = F.cross_entropy(scores, labels, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum")
    return sums / (labels != IGNORED).sum().clamp(min=1)  # a batch without any labelled pixel costs nothing


def token_distance(tokens: Tensor, target: Tensor) -> Tensor:
    """Mean squared difference of two token maps, each token normalised: 0 if equal, 2 if unrelated."""
    width = (tokens.shape[-1],)
    return F.mse_loss(F.layer_norm(tokens.float(), width), F.layer_norm(target.float(), width))


def cosine_distance(output: Tensor, target: Tensor) -> Tensor:
    """One minus the cosine of two embeddings, the mean over images."""
    return (1 - F.cosine_similarity(output.float().flatten(1), target.float().flatten(1))).mean()


def finetune_loss(
    config: FinetuneConfig,
    logits: Tensor,
    labels: Tensor | None,
    teacher_logits: Tensor | None = None,
    tokens: Mapping[int, Tensor] | None = None,
    teacher_tokens: Mapping[int, Tensor] | None = None,
    has_classes: bool = True,
) -> dict[str, Tensor]:
    """`CE(y, p) + alpha KL(q || p)` (Eq. 11) plus the token term, as `loss` and its parts by name.

    Labels are as `cross_entropy` takes them, and not read where `config.labels` is off. Without the teacher's logits
    the divergence is left out; if they are no logits but embeddings, their cosine distance takes its place. Tokens are
    those of the chosen blocks, of the compressed model and of the original.
    """
    parts: dict[str, Tensor] = {}
    if config.labels:
        if labels is None:
            raise PmvitError("expected batches of (images, labels), got images alone: tune with labels=False")
        parts["ce"] = cross_entropy(logits, labels, config.label_smoothing)
    if teacher_logits is not None:
        if has_classes:
            parts["kl"] = divergence(logits, teacher_logits, config.temperature)
        else:
            parts["cosine"] = cosine_distance(logits, teacher_logits)
    if tokens and teacher_tokens:
        parts["tokens"] = torch.stack([token_distance(tokens[i], teacher_tokens[i]) for i in tokens]).mean()
    alpha = config.alpha if config.labels else 1.0
    weights = {"ce": 1.0, "kl": alpha, "cosine": alpha, "tokens": config.token_alpha}
    weighted = (weights[name] * part for name, part in parts.items())
    return {"loss": sum(weighted, logits.new_zeros((), dtype=torch.float32)), **parts}


@contextmanager
def tapped_tokens(model: nn.Module, blocks: Sequence[int] | None = None) -> Iterator[dict[int, Tensor]]:
    """Within this context, a dictionary of what blocks put out in the last forward pass, by their numbers as given.

    Args:
        model: Whose blocks they are.
        blocks: Numbers of blocks, negative ones from the last; all of them if not given.
    """
    names, maps = host_of(model).block_names(), {}

    def keep(block: int, _module: nn.Module, _arguments: Any, output: Any) -> None:
        maps[block] = output[0] if isinstance(output, tuple) else output

    with ExitStack() as hooks:
        for block in range(len(names)) if blocks is None else blocks:
            if not -len(names) <= block < len(names):
                raise PmvitError(f"token_blocks: expected blocks of 0 ... {len(names) - 1}, got {block}")
            module = model.get_submodule(names[block])
            hooks.enter_context(module.register_forward_hook(partial(keep, block)))
        yield maps
