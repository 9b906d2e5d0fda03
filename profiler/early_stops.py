"""Where PyTorch ends a forward that runs again as soon as all is there that backward needs, within TorchScript."""

from __future__ import annotations

_MESSAGE = "operation failed in the TorchScript interpreter"


def is_early_stop(error: BaseException | None) -> bool:
    """Return whether an error is what TorchScript made of the exception, which says nothing, that checkpoints end by.

    Whatever else it may be, the checkpoint then finds less than it needs and raises (run on torch 2.11 and 2.13).
    """
    return isinstance(error, RuntimeError) and _MESSAGE in str(error) and str(error).endswith("RuntimeError: \n")
