"""Which of several processes this one is."""

import torch
from torch import nn

from dualstore.errors import RecordError

__all__ = ["unwrapped"]


def unwrapped(model: nn.Module) -> tuple[int, int, nn.Module]:
    """Rank, number of ranks and the model itself, of one that may be wrapped in DistributedDataParallel.

    Raises RecordError where several processes train in another way: what becomes of their gradients is not known then.
    """
    distributed = torch.distributed
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return distributed.get_rank(model.process_group), distributed.get_world_size(model.process_group), model.module
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise RecordError(
            f"record: {distributed.get_world_size()} processes train together, but the model is a {type(model).__name__}; "
            "expected DistributedDataParallel around it, whose gradients are the mean over the processes"
        )
    if isinstance(model, nn.DataParallel):
        raise RecordError("record: expected a plain model or DistributedDataParallel, found DataParallel, which copies it")
    return 0, 1, model
