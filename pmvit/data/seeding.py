"""Random numbers that depend on what they are for, not on what came before: the root of runs that can be resumed."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_for(*what: int) -> int:
    """A seed from numbers such as (seed, epoch, image)."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch, on every device."""
    _seed_host(seed)
    torch.manual_seed(seed)


def _seed_host(seed: int) -> None:
    """Seed what draws on the CPU: a millisecond cheaper than `torch.manual_seed`, which tells every device."""
    random.seed(seed)
    np.random.seed(seed)  # timm's mixup and augmentation draw from this one
    torch.default_generator.manual_seed(seed)


@contextmanager
def seeded(seed: int, restore: bool = True) -> Iterator[None]:
    """Seed what draws on the CPU for a while, and put it back; a worker, in which nothing else draws, can leave it."""
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state()) if restore else None
    _seed_host(seed)
    try:
        yield
    finally:
        if states is not None:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
