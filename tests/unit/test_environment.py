"""An environment that names a rank, and not all that it needs to find the others."""

from __future__ import annotations

import pytest

from osdp.training.process_group import joined
from profiler.errors import OsdpError

WHOLE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"MASTER_ADDR": None, "MASTER_PORT": None, "WORLD_SIZE": "2"},
        {"MASTER_PORT": None},
        {"MASTER_ADDR": ""},
        {"RANK": "1"},
        {"RANK": "-1"},
        {"RANK": "first"},
        {"WORLD_SIZE": "9" * 5000},
        {"MASTER_PORT": "65536"},
        {"MASTER_PORT": "0"},
    ],
    ids=str,
)
def test_half_an_environment_is_bad_input(wrong: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (WHOLE | wrong).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(OsdpError, match="does not say which ranks to join"), joined("cpu", 1.0):
        raise AssertionError
