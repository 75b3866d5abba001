"""How much each token of each layer matters: Eq. 9 through the value tensor, and the scorers of the ablation.

The score of key token k is the sum over queries q, averaged over heads, of `A[q, k] * dL/dA[q, k]`. With `O = A V` and
G the gradient of O, `dL/dA = G V^T`, so that sum is exactly `<V_k, dL/dV_k>`: Eq. 9 needs the values and their
gradient and never the attention map. Fused attention stays on and no N x N tensor exists. The parameters want no
gradient while scoring, which makes a scoring step cheaper than a training step.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from json import dumps
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pmvit._modes import evaluation_mode, frozen_parameters
from pmvit.cost import BlockCost, ModelCost, model_cost
from pmvit.errors import PmvitError
from pmvit.files import check_fields, config_from, read_document, write_text
from pmvit.models import adapter_for
from pmvit.progress import track

Scorer = Literal["grad_attn", "attn", "class_attn", "grad_class_attn", "grad", "random"]
Loss = Literal["labels", "predicted", "entropy"]

FORMAT, PARTIAL_FORMAT, VERSION = "pmvit-scores", "pmvit-partial-scores", 1
SECONDS_BETWEEN_CHECKPOINTS = 30.0


@dataclass(frozen=True)
class ScoreConfig:
    """What is measured.

    Attributes:
        scorer: `grad_attn` is Eq. 9. The others are the paper's ablation (Table V): `attn` (attention received),
            `class_attn` (attention received from the class token), `grad_class_attn` (Eq. 9 for the class token's
            query alone), `grad` (Taylor expansion on the tokens, Eq. 8), `random`.
        iterations: Batches to use at most; a loader that ends earlier ends the scoring.
        loss: Cross-entropy on the `labels`, on the model's own `predicted` class, or the `entropy` of its prediction;
            the last two need no labels.
        abs_per_sample: Take the absolute value for each image instead of for each batch.
        seed: For the `random` scorer.
    """

    scorer: Scorer = "grad_attn"
    iterations: int = 500
    loss: Loss = "labels"
    abs_per_sample: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, choices in (("scorer", self.scorer, Scorer), ("loss", self.loss, Loss)):
            if value not in get_args(choices):
                raise PmvitError(f"{name}: expected one of {', '.join(get_args(choices))}; got {value!r}")
        if self.iterations < 1:
            raise PmvitError(f"iterations: expected 1 or more, got {self.iterations}")


@dataclass(frozen=True)
class Scores:
    """Importance of every patch token in every block, and what planning has to know of the model.

    Attributes:
        values: One row a block, one column a patch token, float64.
        grid: Rows and columns of the patch grid.
        num_prefix: Tokens before the patch tokens; they have no score.
        cost: What each block of the model costs.
        config: How the scores were measured.
        iterations: Batches that were used.
        images: Images that were used.
        model: Fingerprint of the scored weights.
    """

    values: Tensor
    grid: tuple[int, int]
    num_prefix: int
    cost: ModelCost
    config: ScoreConfig
    iterations: int
    images: int
    model: str

    def save(self, path: str | Path, kind: str = FORMAT) -> None:
        """Write the scores as JSON."""
        document = {"format": kind, "version": VERSION, **asdict(replace(self, values=torch.empty(0)))}
        document["values"] = self.values.tolist()
        write_text(Path(path), dumps(document) + "\n")

    @staticmethod
    def load(path: str | Path, kind: str = FORMAT) -> "Scores":
        """Read what `save` wrote.

        Raises:
            PmvitError: If the file is not a whole and consistent scores file.
        """
        where = str(path)
        document = read_document(Path(path), kind, VERSION)
        check_fields(document, ("format", "version", *Scores.__dataclass_fields__), where)
        try:
            values = torch.tensor(document["values"], dtype=torch.float64)
            cost = ModelCost(document["cost"]["outside"], tuple(BlockCost(**b) for b in document["cost"]["blocks"]))
            height, width = document["grid"]
        except (TypeError, ValueError, KeyError) as error:
            raise PmvitError(f"{where}: the scores are malformed ({error}): score the model again") from None
        if values.shape != (len(cost.blocks), height * width):
            raise PmvitError(
                f"{where}: expected scores for {len(cost.blocks)} blocks of {height} x {width} tokens, "
                f"got {tuple(values.shape)}: score the model again"
            )
        return Scores(
            values=values,
            grid=(height, width),
            num_prefix=document["num_prefix"],
            cost=cost,
            config=config_from(ScoreConfig, document["config"], f"{where}: config"),
            iterations=document["iterations"],
            images=document["images"],
            model=document["model"],
        )


def score_values(values: Tensor, gradient: Tensor) -> Tensor:
    """Eq. 9, signed, for each image: `<V_k, dL/dV_k>` averaged over heads; (batch, heads, N, d) gives (batch, N)."""
    return (values.float() * gradient.float()).sum((1, 3)) / values.shape[1]


def score_tokens(tokens: Tensor, gradient: Tensor) -> Tensor:
    """Eq. 8, signed, for each image: the mean over the width of `Z * dL/dZ`; (batch, N, D) gives (batch, N)."""
    return (tokens.float() * gradient.float()).mean(-1)


def attention_map(query: Tensor, key: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Softmax of the scaled products of queries and keys: A of Eq. 1, written out."""
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


class Recorder(TorchFunctionMode):
    """Collects the per-image scores of every layer while a batch runs forward and backward.

    It listens where the host calls `scaled_dot_product_attention`, so it serves every model that does.
    """

    def __init__(self, scorer: Scorer, blocks: list[nn.Module], num_prefix: int) -> None:
        super().__init__()
        self.scorer = scorer
        self.num_prefix = num_prefix
        self.layer: int | None = None
        self.values: list[list[Tensor]] = [[] for _ in blocks]
        self.scored: list[Tensor | None] = [None] * len(blocks)
        self.hooks = []
        for layer, block in enumerate(blocks):
            self.hooks.append(block.register_forward_pre_hook(self._enter(layer)))
            self.hooks.append(block.register_forward_hook(self._leave))

    def remove_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _enter(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
        def enter(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            self.layer = layer
            tokens, *others = arguments
            if layer == 0:
                tokens = tokens.detach().requires_grad_(torch.is_grad_enabled())
            if self.scorer == "grad":
                values = tokens.detach()  # a hook that held the tensor it hangs on would keep the graph alive
                tokens.register_hook(lambda gradient: self._add(layer, score_tokens(values, gradient)))
            return (tokens, *others)

        return enter

    def _leave(self, *_: Any) -> None:
        self.layer = None

    def _add(self, layer: int, scores: Tensor) -> None:
        self.values[layer].append(scores.detach()[:, self.num_prefix :])

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: tuple[Any, ...] = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        if function is not F.scaled_dot_product_attention or self.layer is None:
            return function(*arguments, **keywords)
        return self._attention(self.layer, function, *arguments, **keywords)

    def _attention(
        self,
        layer: int,
        attend: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        scale = options.get("scale")
        if self.scorer == "attn":
            attention = attention_map(query, key, attn_mask, scale)
            self._add(layer, attention.float().sum(2).mean(1))
            return attention @ value
        output = attend(query, key, value, attn_mask=attn_mask, **options)
        values = value.detach()  # a hook that held the tensor it hangs on would keep the graph alive
        if self.scorer == "grad_attn" and value is not self.scored[layer]:
            self.scored[layer] = value  # differential attention uses one value tensor twice; its gradient comes once
            value.register_hook(lambda gradient: self._add(layer, score_values(values, gradient)))
        elif self.scorer in ("class_attn", "grad_class_attn"):
            mask = None if attn_mask is None else attn_mask[..., :1, :]
            row = attention_map(query[:, :, :1].detach(), key.detach(), mask, scale)[:, :, 0]
            if self.scorer == "class_attn":
                self._add(layer, row.float().mean(1))
            else:
                output.register_hook(lambda gradient: self._add(layer, _class_row(row, values, gradient)))
        return output

    def collect(self) -> Tensor:
        """The scores of this batch, (layers, batch, patches); a block with several attentions gets their mean."""
        silent = [layer for layer, values in enumerate(self.values) if not values]
        if silent:
            raise PmvitError(
                f"block {silent[0]} made no call of torch.nn.functional.scaled_dot_product_attention, where scores are "
                "read: switch the model to its `sdpa` attention"
            )
        result = torch.stack([torch.stack(values).mean(0) for values in self.values])
        self.values = [[] for _ in self.values]
        self.scored = [None] * len(self.scored)
        return result


def _class_row(row: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    """`A * dL/dA` of the class token's query, averaged over heads, where `dL/dA = G V^T`."""
    gradient_of_row = torch.einsum("bhd,bhnd->bhn", gradient[:, :, 0].float(), value.float())
    return (row.float() * gradient_of_row).mean(1)


def _loss(config: ScoreConfig, logits: Tensor, labels: Tensor | None) -> Tensor:
    """The loss, summed over the images, so that each image's gradient is its own."""
    if config.loss == "entropy":
        log_probabilities = logits.log_softmax(-1)
        return -(log_probabilities.exp() * log_probabilities).sum()
    if config.loss == "predicted":
        labels = logits.argmax(-1)
    if labels is None:
        raise PmvitError('expected batches of (images, labels), got images alone: use loss="predicted" or "entropy"')
    if labels.numel() and int(labels.max()) >= logits.shape[-1]:
        raise PmvitError(
            f"expected labels below {logits.shape[-1]}, the number of the model's classes; got {int(labels.max())}: "
            'is the data meant for this head? Without fitting labels, use loss="predicted"'
        )
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def unpack(batch: Any) -> tuple[Tensor, Tensor | None]:
    """Split a batch of a loader into images and labels: a pair, or images alone."""
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise PmvitError(f"expected batches of images or of (images, labels); got {type(batch).__name__}")


def _summed_over_processes(total: Tensor, images: int) -> tuple[Tensor, int]:
    """Add up what every process has for this batch; with one process, what it has."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return total, images
    count = torch.tensor(float(images), device=total.device, dtype=total.dtype)
    torch.distributed.all_reduce(total)
    torch.distributed.all_reduce(count)
    return total, int(count)


def _fingerprint(model: nn.Module) -> str:
    """A short name for the model's class and weights, to tell whether scores are continued on the same model."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in model.named_parameters():
        total = parameter.detach().double().sum().item()
        digest.update(f"{name}{tuple(parameter.shape)}{total!r}".encode())
    return digest.hexdigest()[:16]


def score(
    model: nn.Module,
    loader: Iterable[Any],
    config: ScoreConfig | None = None,
    *,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    **options: Any,
) -> Scores:
    """Measure the importance of every token in every block (Eq. 9). The model is left as it was.

    Args:
        model: An uncompressed model.
        loader: Yields `(images, labels)`, or images where the loss needs no labels.
        config: What to measure; `options` are its fields and override it.
        checkpoint: Where partial sums are kept. If the file exists, scoring goes on after its last batch: the loader
            then has to yield the same batches in the same order.
        progress: Show a progress bar.

    Raises:
        PmvitError: If scores are not finite or all zero (the message names the layer), or the input does not fit.
    """
    config = replace(config or ScoreConfig(), **options)
    adapter = adapter_for(model)
    layout = adapter.layout(model)
    if "class_attn" in config.scorer and layout.num_prefix == 0:
        raise PmvitError(f"the scorer {config.scorer} needs a class token, and this model has none: use grad_attn")
    blocks = [model.get_submodule(name) for name in adapter.block_names(model)]
    shape = (len(blocks), layout.num_patches)
    start = Scores(
        values=torch.zeros(shape, dtype=torch.float64),
        grid=layout.grid,
        num_prefix=layout.num_prefix,
        cost=model_cost(model),
        config=config,
        iterations=0,
        images=0,
        model=_fingerprint(model),
    )
    if config.scorer == "random":
        generator = torch.Generator().manual_seed(config.seed)
        return replace(start, values=torch.rand(shape, generator=generator, dtype=torch.float64))
    store = Path(checkpoint) if checkpoint is not None else None
    sums = _resume(start, store) if store is not None and store.exists() else start
    with ExitStack() as states:
        states.enter_context(evaluation_mode(model))
        states.enter_context(frozen_parameters(model))
        states.enter_context(adapter.for_scoring(model))
        recorder = Recorder(config.scorer, blocks, layout.num_prefix)
        states.callback(recorder.remove_hooks)
        total = _number_of_batches(loader, config.iterations)
        batches = islice(loader, sums.iterations, config.iterations)
        shown = track(batches, "score", total, done=sums.iterations, show=progress)
        for sums in _accumulate(model, recorder, shown, sums, store):
            pass
    if sums.iterations == 0:
        raise PmvitError("expected at least one batch of images; the loader is empty")
    scores = replace(sums, values=sums.values / sums.iterations)
    _check(scores.values)
    return scores


def _accumulate(
    model: nn.Module, recorder: Recorder, batches: Iterable[Any], sums: Scores, store: Path | None
) -> Iterator[Scores]:
    """Add the scores of each batch to the sums, which are written to `store` now and then and when interrupted."""
    device = next(model.parameters()).device
    saved = time.monotonic()
    try:
        for batch in batches:
            images, labels = unpack(batch)
            images = images.to(device, non_blocking=True)
            labels = None if labels is None else labels.to(device, non_blocking=True)
            per_image = _score_batch(model, recorder, images, labels, sums.config)
            if sums.config.abs_per_sample:
                per_image = per_image.abs()
            total, count = _summed_over_processes(per_image.sum(1).double(), len(images))
            values = sums.values + (total / count).abs().cpu()
            sums = replace(sums, values=values, iterations=sums.iterations + 1, images=sums.images + count)
            if store is not None and time.monotonic() - saved > SECONDS_BETWEEN_CHECKPOINTS:
                sums.save(store, PARTIAL_FORMAT)
                saved = time.monotonic()
            yield sums
    finally:
        if store is not None and sums.iterations:
            sums.save(store, PARTIAL_FORMAT)


def _score_batch(
    model: nn.Module, recorder: Recorder, images: Tensor, labels: Tensor | None, config: ScoreConfig
) -> Tensor:
    needs_gradient = config.scorer.startswith("grad")
    with torch.inference_mode(False), torch.set_grad_enabled(needs_gradient):
        with recorder:
            logits = model(images)
        if needs_gradient:
            _loss(config, logits, labels).backward()
    return recorder.collect()


def _number_of_batches(loader: Iterable[Any], iterations: int) -> int | None:
    try:
        return min(iterations, len(loader))  # type: ignore[arg-type]  # that it may have no length is the point
    except TypeError:
        return iterations


def _resume(start: Scores, store: Path) -> Scores:
    """The partial sums in `store`, if they belong to this model and configuration."""
    sums = Scores.load(store, PARTIAL_FORMAT)
    for what, here, there in (
        ("weights", start.model, sums.model),
        ("configuration", replace(start.config, iterations=1), replace(sums.config, iterations=1)),
    ):
        if here != there:
            raise PmvitError(f"{store} holds partial scores of other {what} ({there}, not {here}): delete it to start anew")
    return replace(sums, config=start.config)


def _check(values: Tensor) -> None:
    for layer, row in enumerate(values):
        if not torch.isfinite(row).all():
            raise PmvitError(
                f"block {layer}: the scores are not finite: does the model give finite logits for these images?"
            )
        if not row.any():
            raise PmvitError(
                f"block {layer}: all scores are zero, so its gradient vanishes: are the weights loaded, "
                "or is the loss already zero?"
            )
