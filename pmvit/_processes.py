"""The processes that work on one task, as torch.distributed has them; a single one if it has none."""

import torch


def this_process() -> tuple[int, int]:
    """Which of how many processes this is."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def wait_for_all() -> None:
    """Until all processes are here."""
    if this_process()[1] > 1:
        torch.distributed.barrier()
