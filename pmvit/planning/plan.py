"""`Plan`: which tokens of each block are kept, merged or pruned. Data, independent of any weights."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from pmvit.config.planning import PRUNED, Reconstruct
from pmvit.errors import PmvitError
from pmvit.files import check_fields, parse_document, read_document, write_document

if TYPE_CHECKING:
    from torch import Tensor

FORMAT, VERSION = "pmvit-plan", 1
MOST_BLOCKS = 10_000  # no model has as many: a file may not have us make room for more
NORMS = (1e-8, 4e9)  # of the squared weights of a group: half precision holds such weights, and those of the inverse

TokenState = Literal["kept", "merged", "pruned"]


@dataclass(frozen=True)
class LayerPlan:
    """What happens to the patch tokens of one block.

    Attributes:
        groups: The group of each patch token, -1 where the token is pruned.
        centres: The kept token of each group.
        weights: The weight of each patch token in its group; 0 for pruned tokens.
        mlp: What the block's MLP runs on, if not on these groups: groups that are unions of them.
    """

    groups: tuple[int, ...]
    centres: tuple[int, ...]
    weights: tuple[float, ...]
    mlp: "LayerPlan | None" = None

    @property
    def num_tokens(self) -> int:
        return len(self.groups)

    @property
    def num_kept(self) -> int:
        return len(self.centres)

    @property
    def num_pruned(self) -> int:
        return self.groups.count(PRUNED)

    @property
    def num_merged(self) -> int:
        return self.num_tokens - self.num_kept - self.num_pruned

    @property
    def counts(self) -> dict[str, int]:
        """How many patch tokens are kept, by the block and by its MLP, merged and pruned."""
        in_mlp = (self.mlp or self).num_kept
        return {"kept": self.num_kept, "kept_in_mlp": in_mlp, "merged": self.num_merged, "pruned": self.num_pruned}

    @property
    def is_identity(self) -> bool:
        """Whether every token stays by itself, in place, with weight one: then attention runs as it did."""
        everything = tuple(range(self.num_tokens))
        return self.groups == everything == self.centres and set(self.weights) == {1.0}

    @property
    def num_entries(self) -> int:
        """Tokens in groups: the entries of M, and of R."""
        return self.num_tokens - self.num_pruned

    @property
    def share_kept(self) -> float:
        """Share of the patch tokens that are kept; where the MLP has groups of its own, the mean of both."""
        share = self.num_kept / self.num_tokens
        return share if self.mlp is None else (share + self.mlp.share_kept) / 2

    def tensors(self) -> "tuple[Tensor, Tensor, Tensor]":
        """Groups, centres and weights as tensors."""
        import torch

        return torch.tensor(self.groups), torch.tensor(self.centres), torch.tensor(self.weights)

    def members(self) -> list[list[int]]:
        """The tokens of each group, in order."""
        result: list[list[int]] = [[] for _ in self.centres]
        for token, group in enumerate(self.groups):
            if group != PRUNED:
                result[group].append(token)
        return result

    def states(self) -> list[TokenState]:
        """What becomes of each token."""
        centres = set(self.centres)
        return [
            "kept" if token in centres else "pruned" if group == PRUNED else "merged"
            for token, group in enumerate(self.groups)
        ]

    @staticmethod
    def keep_all(num_tokens: int) -> "LayerPlan":
        """A layer that keeps every token by itself."""
        everything = tuple(range(num_tokens))
        return LayerPlan(everything, everything, (1.0,) * num_tokens)


@dataclass(frozen=True)
class Plan:
    """Layer plans for the blocks of a model, with what made them. It fits any model with these grids and this depth.

    Attributes:
        grid: Patches along each axis of their grid, at the first block.
        depth: Number of blocks of the model.
        layers: The plan of each compressed block, by its index; the others run on all tokens.
        reconstruct: `residual` or `pinv`.
        attention_bias: Whether attention to a group is raised by the logarithm of the group's size.
        made_by: The configurations and measurements the plan came from, for the record.
        grids: The patch grid at each block; the same at all of them if not given.
    """

    kind: ClassVar[str] = "plan"
    title: ClassVar[str] = "Prune and Merge"

    grid: tuple[int, ...]
    depth: int
    layers: Mapping[int, LayerPlan]
    reconstruct: Reconstruct = "residual"
    attention_bias: bool = False
    made_by: Mapping[str, Any] = field(default_factory=dict)
    grids: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "grids", self.grids or (self.grid,) * self.depth)
        if len(self.grids) != self.depth:
            raise PmvitError(f"grids: expected one for each of {self.depth} blocks, got {len(self.grids)}")
        if self.reconstruct not in get_args(Reconstruct):
            raise PmvitError(f"reconstruct: expected {' or '.join(get_args(Reconstruct))}, got {self.reconstruct!r}")
        for index, layer in self.layers.items():
            where = f"block {index}"
            if not 0 <= index < self.depth:
                raise PmvitError(f"{where}: expected a block from 0 to {self.depth - 1}: was the plan made for more?")
            _check_layer(layer, self.num_patches(index), where)
            if layer.mlp is not None:
                _check_layer(layer.mlp, self.num_patches(index), f"{where}, mlp")
                _check_mlp(layer, layer.mlp, self.reconstruct, where)

    def num_patches(self, index: int) -> int:
        """Patch tokens of one block."""
        return math.prod(self.grids[index])

    @property
    def keep(self) -> float:
        """Share of the patch tokens of a compressed block that are kept, on average."""
        if not self.layers:
            return 1.0
        return sum(layer.share_kept for layer in self.layers.values()) / len(self.layers)

    @property
    def measured_on(self) -> str | None:
        """Fingerprint of the model that was measured for the plan, if that is known."""
        found = [entry.get("model") for entry in self.made_by.values() if isinstance(entry, Mapping)]
        return next((name for name in found if isinstance(name, str)), None)

    @property
    def blocks(self) -> dict[int, dict[str, int]]:
        """What each block keeps, merges and prunes, as JSON data."""
        return {index: layer.counts for index, layer in self.layers.items()}

    def __str__(self) -> str:
        from pmvit.planning.drawing import describe

        return describe(self)

    def draw(self, columns: int = 100) -> str:
        """One small grid a block: kept tokens solid, merged ones shaded, pruned ones a dot."""
        from pmvit.planning.drawing import draw

        return draw(self, columns)

    @staticmethod
    def keep_all(
        grid: tuple[int, ...], depth: int, *, grids: tuple[tuple[int, ...], ...] = (), **options: Any
    ) -> "Plan":
        """A plan that keeps every token of every block."""
        counts = [math.prod(each) for each in grids or (grid,) * depth]
        return Plan(grid, depth, dict(enumerate(map(LayerPlan.keep_all, counts))), grids=grids, **options)

    def to_json(self) -> str:
        """The plan as text: JSON, one group a line."""
        head = {
            "format": FORMAT,
            "version": VERSION,
            "grid": list(self.grid),
            "depth": self.depth,
            "reconstruct": self.reconstruct,
            "attention_bias": self.attention_bias,
            "made_by": dict(self.made_by),
        }
        if set(self.grids) - {self.grid}:
            head["grids"] = [list(grid) for grid in self.grids]
        layers = ",\n".join(f'  "{index}": {_layer_to_json(layer)}' for index, layer in sorted(self.layers.items()))
        return json.dumps(head, indent=1)[:-2] + ',\n "layers": {\n' + layers + "\n }\n}\n"

    def tensors(self) -> "dict[str, Tensor]":
        """What is saved beside `to_json`: nothing."""
        return {}

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        write_document(Path(path), self.to_json())

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Read and check a plan.

        Raises:
            PmvitError: If the file is not a whole and consistent plan; the message names the block and the fault.
        """
        return _from_document(read_document(Path(path), FORMAT, VERSION), str(path))

    @staticmethod
    def from_json(text: str, where: str = "plan", tensors: "Mapping[str, Tensor] | None" = None) -> "Plan":
        """Parse and check what `to_json` wrote; there are no tensors beside it."""
        return _from_document(parse_document(text, FORMAT, VERSION, where), where)


def _layer_to_json(layer: LayerPlan) -> str:
    if layer.mlp is not None:
        return f'{_layer_to_json(replace(layer, mlp=None))[:-1]}, "mlp": {_layer_to_json(layer.mlp)}}}'
    lines = []
    for centre, members in zip(layer.centres, layer.members(), strict=True):
        weights = [layer.weights[token] for token in members]
        lines.append("   " + json.dumps({"centre": centre, "members": members, "weights": weights}))
    pruned = [token for token, group in enumerate(layer.groups) if group == PRUNED]
    return '{"groups": [\n' + ",\n".join(lines) + f'\n  ], "pruned": {json.dumps(pruned)}}}'


def _from_document(document: dict[str, Any], where: str) -> Plan:
    names = ("format", "version", "grid", "depth", "reconstruct", "attention_bias", "made_by", "layers")
    check_fields(document, names, where, optional=("grids",))
    depth, layers = document["depth"], document["layers"]
    grid = _parse_grid(document["grid"], f"{where}: grid")
    if not _is_count(depth) or depth > MOST_BLOCKS:
        raise PmvitError(f"{where}: depth: expected a whole number up to {MOST_BLOCKS}, got {depth!r}")
    grids = document.get("grids", [document["grid"]] * depth)
    if not isinstance(grids, list) or len(grids) != depth:
        raise PmvitError(f"{where}: grids: expected a list of one for each of {depth} blocks, got {grids!r}")
    if not isinstance(document["attention_bias"], bool):
        raise PmvitError(f"{where}: attention_bias: expected true or false, got {document['attention_bias']!r}")
    if not isinstance(layers, dict) or not layers.keys() <= set(map(str, range(MOST_BLOCKS))):
        raise PmvitError(f"{where}: layers: expected an object with block numbers as names")
    made_by = document["made_by"]
    if not isinstance(made_by, dict):
        raise PmvitError(f"{where}: made_by: expected an object, got {type(made_by).__name__}")
    parsed = [_parse_grid(each, f"{where}: grids") for each in grids]
    counts = [math.prod(each) for each in parsed]
    counts += [math.prod(grid)] * len(layers)  # for a block beyond the last, which `Plan` names
    return Plan(
        grid=grid,
        depth=depth,
        layers={
            int(i): _parse_layer(layer, counts[min(int(i), depth)], f"{where}: block {i}")
            for i, layer in layers.items()
        },
        reconstruct=document["reconstruct"],
        attention_bias=document["attention_bias"],
        made_by=made_by,
        grids=tuple(parsed),
    )


def _parse_grid(grid: Any, where: str) -> tuple[int, ...]:
    if not (isinstance(grid, list) and grid and all(_is_count(side) and side > 0 for side in grid)):
        raise PmvitError(f"{where}: expected a positive whole number for each axis, got {grid!r}")
    return tuple(grid)


def _parse_layer(data: Any, num_patches: int, where: str) -> LayerPlan:
    check_fields(data, ("groups", "pruned"), where, optional=("mlp",))
    _check_lists(data, ("groups", "pruned"), where)
    groups: dict[int, int] = {}  # by token; a list would be as long as the file says
    weights: dict[int, float] = {}
    centres = []
    for number, group in enumerate(data["groups"]):
        here = f"{where}, group {number}"
        check_fields(group, ("centre", "members", "weights"), here)
        _check_lists(group, ("members", "weights"), here)
        if len(group["members"]) != len(group["weights"]):
            raise PmvitError(f"{here}: {len(group['members'])} members but {len(group['weights'])} weights")
        for token, weight in zip(group["members"], group["weights"], strict=True):
            _claim(groups, token, number, num_patches, here)
            if isinstance(weight, bool) or not isinstance(weight, (int, float)):
                raise PmvitError(f"{here}: expected numbers as weights, got {weight!r}")
            weights[token] = float(weight)
        centres.append(group["centre"])
    for token in data["pruned"]:
        _claim(groups, token, PRUNED, num_patches, f"{where}, pruned")
    if len(groups) != num_patches:
        missing = next(token for token in range(num_patches) if token not in groups)
        raise PmvitError(
            f"{where}: expected {num_patches} tokens in groups or pruned, got {len(groups)} "
            f"(token {missing} is in neither)"
        )
    mlp = _parse_layer(data["mlp"], num_patches, f"{where}, mlp") if "mlp" in data else None
    tokens = range(num_patches)
    of_tokens = tuple(weights.get(token, 0.0) for token in tokens)
    return LayerPlan(tuple(groups[token] for token in tokens), tuple(centres), of_tokens, mlp)


def _check_lists(data: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    for name in names:
        if not isinstance(data[name], list):
            raise PmvitError(f"{where}: {name}: expected a list, got {type(data[name]).__name__}")


def _claim(groups: dict[int, int], token: Any, group: int, num_patches: int, where: str) -> None:
    """Put a token into a group, once."""
    if not _is_count(token) or token >= num_patches:
        raise PmvitError(
            f"{where}: expected tokens from 0 to {num_patches - 1}, got {token!r}: is it another image size?"
        )
    if token in groups:
        taken = "the pruned tokens" if groups[token] == PRUNED else f"group {groups[token]}"
        raise PmvitError(f"{where}: token {token} is in {taken} already; groups must not overlap")
    groups[token] = group


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_layer(layer: LayerPlan, num_patches: int, where: str) -> None:
    if not len(layer.groups) == len(layer.weights) == num_patches:
        raise PmvitError(f"{where}: expected {num_patches} tokens, got {len(layer.groups)}: is it another image size?")
    if not layer.centres:
        raise PmvitError(f"{where}: expected at least one group, got none: a block cannot run on no tokens")
    if set(layer.groups) - {PRUNED} != set(range(len(layer.centres))):
        raise PmvitError(f"{where}: expected every one of its {len(layer.centres)} groups to have a member")
    for group, centre in enumerate(layer.centres):
        if not _is_count(centre) or centre >= num_patches or layer.groups[centre] != group:
            raise PmvitError(f"{where}, group {group}: its centre {centre!r} is not one of its members")
    norms = [0.0] * len(layer.centres)
    for token, (group, weight) in enumerate(zip(layer.groups, layer.weights, strict=True)):
        if not math.isfinite(weight):
            raise PmvitError(f"{where}: the weight of token {token} is {weight}; expected a finite number")
        if group != PRUNED:
            norms[group] += weight * weight
    if not all(norms):
        raise PmvitError(f"{where}, group {norms.index(0.0)}: all its weights are zero; expected one that is not")
    for group, norm in enumerate(norms):
        if not NORMS[0] <= norm <= NORMS[1]:
            raise PmvitError(
                f"{where}, group {group}: its weights are too large or too small to compute with (their squares add up "
                f"to {norm:.3g}); expected weights around 1"
            )


def _check_mlp(layer: LayerPlan, mlp: LayerPlan, reconstruct: Reconstruct, where: str) -> None:
    """See that the groups of an MLP are unions of those of attention, and that each token gets its update."""
    if mlp.mlp is not None:
        raise PmvitError(f"{where}: expected groups for attention and for the MLP, got a third kind inside the MLP's")
    if reconstruct != "residual":
        raise PmvitError(
            f"{where}: its MLP has groups of its own, which takes residual reconstruction; got {reconstruct}: "
            'for that, measure with parts="whole"'
        )
    if layer.num_pruned or mlp.num_pruned:
        raise PmvitError(f"{where}: expected no pruned tokens where the MLP has groups of its own, got some")
    for number, members in enumerate(layer.members()):
        if len({mlp.groups[token] for token in members}) > 1:
            raise PmvitError(f"{where}, mlp: expected unions of attention's groups; group {number} of them is parted")


def record(config: Any) -> dict[str, Any]:
    """A configuration as JSON data, for `made_by`."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config).items()}


def compressed_layers(depth: int, skip: Sequence[int]) -> list[int]:
    """The blocks that are not skipped."""
    for index in skip:
        if not -depth <= index < depth:
            raise PmvitError(f"skip: expected blocks from {-depth} to {depth - 1}, got {index}")
    skipped = {index % depth for index in skip}
    layers = [index for index in range(depth) if index not in skipped]
    if not layers:
        raise PmvitError(f"skip: all {depth} blocks are skipped; expected at least one to compress")
    return layers
