"""A dispatch mode without the guard of `torch.compile`."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class UncompiledMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees ops that are never compiled: the guard would import dynamo (1.5 s), and cost time at every op."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False."""
        return False
