"""What the adapters of all of transformers' models have in common: what these put out, and how they are made.

transformers is imported by nobody here: whoever has one of its models has imported it.
"""

from abc import ABC, abstractmethod
from typing import Any

from pmvit.errors import PmvitError
from pmvit.hosts.hf import loading
from pmvit.hosts.hf.tower import PIXEL_CLASSIFIERS, WITH_LOGITS, Tower
from pmvit.hosts.host import Adapter

Host = Any  # the models of transformers: nn.Modules whose attributes have no types


class HuggingFaceModel(Adapter, ABC):
    """A model of transformers with a vision transformer somewhere in it."""

    returns_tensor = False

    @abstractmethod
    def find_tower(self, model: Host) -> Tower | None:
        """The vision transformer in a model, `None` if there is none of this family."""

    def matches(self, model: Host) -> bool:
        is_host = any(base.__module__.startswith("transformers.") for base in type(model).__mro__)
        return is_host and self.find_tower(model) is not None

    def tower(self, model: Host) -> Tower:
        """The vision transformer in a model.

        Raises:
            PmvitError: If there is none of this family.
        """
        found = self.find_tower(model)
        if found is None:
            raise PmvitError(f"expected a model with a {self.family}; {type(model).__name__} has none")
        return found

    def gives_logits(self, model: Host) -> bool:
        return any(name in type(model).__name__ for name in WITH_LOGITS)

    def num_classes(self, model: Host) -> int | None:
        return int(model.config.num_labels) if WITH_LOGITS[0] in type(model).__name__ else None

    def pixel_classes(self, model: Host) -> int | None:
        labels_pixels = any(name in type(model).__name__ for name in PIXEL_CLASSIFIERS)
        return max(int(model.config.num_labels), 2) if labels_pixels else None  # one logit tells two classes apart

    def input_size(self, model: Host) -> tuple[int, int, int]:
        return loading.input_size(model, self.tower(model))

    def describe(self, model: Host, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        return loading.describe(model, self.data_config(model), arguments or {})

    def build(self, description: dict[str, Any]) -> Host:
        return loading.build(description)

    def data_config(self, model: Host) -> dict[str, Any]:
        return loading.data_config(model, self.tower(model))
