"""Has PyTorch leave out what it does at every hook of FSDP2 for its compiler and its profiler, where neither runs.

Under each hook of FSDP2 it makes a wrapper that dynamo does not look into, and throws it away; and at each hook and
step of an optimizer it enters and leaves a range of a profiler.  Small models spend a tenth of their time there.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch.autograd.profiler import record_function


def install() -> None:
    """Make each wrapper once, and enter no range where no profiler runs, in this process and its forks."""
    if getattr(torch._dynamo.disable, "keeps", False):
        return
    disable, enter, leave = torch._dynamo.disable, record_function.__enter__, record_function.__exit__
    kept: dict[Callable[..., Any], Any] = {}

    def disable_once(fn: Any = None, recursive: bool = True, *, reason: str | None = None, **others: Any) -> Any:
        if reason != "skipping FSDP hooks" or not isinstance(fn, MethodType):
            return disable(fn, recursive, reason=reason, **others)
        if fn.__func__ not in kept:  # which holds no model, as the method does
            kept[fn.__func__] = disable(fn.__func__, recursive, reason=reason, **others)
        return MethodType(kept[fn.__func__], fn.__self__)

    def enter_if_seen(record: record_function) -> record_function:
        return enter(record) if torch._C._autograd._profiler_enabled() else record

    def leave_if_entered(record: record_function, *error: Any) -> None:
        if record.record is not None:
            leave(record, *error)

    disable_once.keeps = True  # type: ignore[attr-defined]
    mock.patch.object(torch._dynamo, "disable", disable_once).start()
    mock.patch.object(record_function, "__enter__", enter_if_seen).start()
    mock.patch.object(record_function, "__exit__", leave_if_entered).start()
