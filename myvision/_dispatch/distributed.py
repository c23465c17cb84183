"""What ``DistributedDataParallel`` must be told of synchronised batch norms."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_CHECK = "_passing_sync_batchnorm_handle"


def accept_on_cpu(synchronised: type[nn.Module]) -> None:
    """Lets ``DistributedDataParallel`` take this class on the CPU, where it refuses every ``torch.nn.SyncBatchNorm``.

    Its check then sees a model without the modules of this class; it stays as it is for all others. A torch that has no
    such check needs no exception.
    """
    check = getattr(DistributedDataParallel, _CHECK, None)
    if check is None:
        return

    @functools.wraps(check)
    def check_others(self: DistributedDataParallel, module: nn.Module) -> Any:
        others = [part for part in module.modules() if not isinstance(part, synchronised)]
        return check(self, SimpleNamespace(modules=lambda: others))

    setattr(DistributedDataParallel, _CHECK, check_others)
