"""Refuses to wrap a model twice: by OSDP, and by OSDP and another wrapper.

Frameworks wrap what they are given in DistributedDataParallel or FSDP unless they are told not to.  What they touch
first is refused here, since parameters that are sharded already fail much later, or train wrongly.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from profiler.errors import OsdpError
from runtime.step.gradient_accumulation import TO_TRACE
from runtime.step.optimizer_hooks import trained_already

PAGE = "docs/integrations.md"
"""Says what works beside OSDP."""
WRITTEN = ("_is_fsdp_managed_module", "__class__")
"""Attributes that `fully_shard` and `FullyShardedDataParallel` write to the module that they wrap; checked on 2.13."""


class WrappedOnce(nn.Module):
    """A module that no other wrapper takes."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """Asked for by DistributedDataParallel, first of all."""
        asking = sys._getframe(1).f_globals["__name__"]
        if asking.startswith(("torch.jit", "torch._jit")):  # which look at all attributes
            raise OsdpError("torch.jit takes no sharded model", expected="a plain module", advice=TO_TRACE)
        raise _refusal("DistributedDataParallel")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in WRITTEN:
            raise _refusal("FSDP")
        super().__setattr__(name, value)


def check_unwrapped(model: nn.Module) -> None:
    """Raise OsdpError if a model, or a part of it, is sharded or replicated already, as by tensor parallelism."""
    wrappers = (WrappedOnce, DistributedDataParallel, FSDPModule, FullyShardedDataParallel)
    wrapped = ((path, module) for path, module in model.named_modules() if isinstance(module, wrappers))
    split = (item for item in (*model.named_parameters(), *model.named_buffers()) if isinstance(item[1], DTensor))
    for path, one in (*wrapped, *split):
        where = f"`{path}` is a {type(one).__name__}" if path else f"a {type(one).__name__}"
        what, advice = "the model is sharded already, or replicated", f"give OSDP the plain module; {PAGE}"
        raise OsdpError(what, got=where, expected="a module that nothing has wrapped or split", advice=advice)
    if trained_already(model.parameters()):
        what = "another OSDP model has layers of this one, and would reduce their gradients too"
        advice = "make one module that has all of them, and give OSDP that"
        raise OsdpError(what, expected="parameters of this model alone", advice=advice)


def _refusal(wrapper: str) -> OsdpError:
    what = f"{wrapper} cannot wrap a model that OSDP has sharded"
    advice = f"train the OSDP model as it is; in a framework that wraps models itself: {PAGE}"
    return OsdpError(what, got=f"{wrapper}(OSDP(...))", expected="OSDP(...) alone", advice=advice)
