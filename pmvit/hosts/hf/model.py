"""What the hosts of all of transformers' models have in common: what these put out, and how they are made.

transformers is imported by nobody here: whoever has one of its models has imported it.
"""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

from pmvit.errors import PmvitError
from pmvit.hosts.hf import loading
from pmvit.hosts.hf.tower import PIXEL_CLASSIFIERS, WITH_LOGITS, Tower
from pmvit.hosts.host import AnyModule, Host, Outputs


class HuggingFaceModel(Host, ABC):
    """A model of transformers with a vision transformer somewhere in it."""

    @classmethod
    @abstractmethod
    def find_tower(cls, model: AnyModule) -> Tower | None:
        """The vision transformer in a model, `None` if there is none of this family."""

    @classmethod
    def matches(cls, model: AnyModule) -> bool:
        is_host = any(base.__module__.startswith("transformers.") for base in type(model).__mro__)
        return is_host and cls.find_tower(model) is not None

    @cached_property
    def tower(self) -> Tower:
        """The vision transformer in the model.

        Raises:
            PmvitError: If there is none of this family.
        """
        found = self.find_tower(self.model)
        if found is None:
            raise PmvitError(f"expected a model with a {self.family}; {type(self.model).__name__} has none")
        return found

    def outputs(self) -> Outputs:
        name, config = type(self.model).__name__, self.model.config
        labels_pixels = any(ending in name for ending in PIXEL_CLASSIFIERS)
        return Outputs(
            gives_logits=any(ending in name for ending in WITH_LOGITS),
            num_classes=int(config.num_labels) if WITH_LOGITS[0] in name else None,
            pixel_classes=max(int(config.num_labels), 2) if labels_pixels else None,  # one logit tells two apart
            returns_tensor=False,
        )

    def input_size(self) -> tuple[int, int, int]:
        return loading.input_size(self.model, self.tower)

    def describe(self, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        return loading.describe(self.model, self.data_config(), arguments or {})

    @classmethod
    def build(cls, description: dict[str, Any]) -> AnyModule:
        return loading.build(description)

    def data_config(self) -> dict[str, Any]:
        return loading.data_config(self.model, self.tower)
