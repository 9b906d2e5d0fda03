"""For which kinds of devices a model asks for `torch.autocast`, which has no effect on what has no data."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def asked_autocast() -> Iterator[Collection[str]]:
    """Yield the kinds for which contexts have been made within, be there such devices or not."""
    make, asked = torch.autocast.__init__, set[str]()

    def note(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any, **kwargs: Any) -> None:
        if enabled:
            asked.add(device_type)
        make(self, device_type, dtype, enabled, *args, **kwargs)

    with patch.object(torch.autocast, "__init__", note):
        yield asked
