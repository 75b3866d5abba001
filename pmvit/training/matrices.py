"""M and R while the model learns: parameters of their own group, learnable for some epochs, then frozen (Table VII)."""

from typing import Any

from torch import nn

from pmvit.config import FinetuneConfig
from pmvit.prune_merge import TokenMatrices


def matrix_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The weights of M and R of every compressed block."""
    wrappers = [module for module in model.modules() if isinstance(module, TokenMatrices)]
    return [weights for module in wrappers for weights in (module.merge_weights, module.reconstruct_weights)]


def parameter_groups(model: nn.Module, config: FinetuneConfig) -> list[dict[str, Any]]:
    """Weights with decay, those without (biases, norms, what the host says), and M and R; each group has a `name`.

    The schedule sets the learning rate of every group: that of a group is the scheduled one times its `lr_scale`.
    """
    matrices = matrix_parameters(model)
    own_group = {id(parameter) for parameter in matrices}
    exempt: set[str] = set(getattr(model, "no_weight_decay", set)())
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if id(parameter) in own_group or not parameter.requires_grad:
            continue
        has_decay = parameter.ndim >= 2 and name not in exempt
        (decayed if has_decay else free).append(parameter)
    groups = [
        {"name": "weights", "params": decayed, "weight_decay": config.weight_decay, "lr_scale": 1.0},
        {"name": "no decay", "params": free, "weight_decay": 0.0, "lr_scale": 1.0},
        {"name": "matrices", "params": matrices, "weight_decay": 0.0, "lr_scale": config.matrix_lr_factor},
    ]
    return [group for group in groups if group["params"]]


def set_learnable(model: nn.Module, learnable: bool) -> None:
    """Let M and R learn, or stop them: a frozen matrix has no gradient, so that no optimizer touches it."""
    for parameter in matrix_parameters(model):
        parameter.requires_grad_(learnable)
        if not learnable:
            parameter.grad = None
