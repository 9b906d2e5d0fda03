"""Where OSDP's own data files are (beside the package in a checkout, inside it in a wheel), and folders for output."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from profiler.errors import OsdpError

_PACKAGE = Path(__file__).resolve().parent
# Only a folder with our files in it counts: in site-packages, `cuda` beside us is NVIDIA's.
_CONTENT = {"configs": "models/*.yaml", "cuda": "*.cu"}


def resource_dir(name: Literal["configs", "cuda"]) -> Path:
    """Return the folder of model and cluster files, or of CUDA sources; raises OsdpError."""
    places = (_PACKAGE / name, _PACKAGE.parent / name)
    for place in places:
        if any(place.glob(_CONTENT[name])):
            return place
    what = f"OSDP's own folder `{name}` is missing"
    advice = "install OSDP again: this installation is not complete"
    raise OsdpError(what, expected=" or ".join(str(place / _CONTENT[name]) for place in places), advice=advice)


def resource_names(kind: Literal["models", "clusters", "train"]) -> list[str]:
    """Return the names of the models, clusters or training configurations that come with OSDP, sorted."""
    return sorted(path.stem for path in (resource_dir("configs") / kind).glob("*.yaml"))


def resource_file(kind: Literal["models", "clusters", "train"], name: str) -> Path:
    """Return the file of the model, cluster or configuration `name`, which need not exist."""
    return resource_dir("configs") / kind / f"{name}.yaml"


def unknown(kind: str, name: str, names: list[str], otherwise: str) -> OsdpError:
    """Return the error for a name that is not among `names`; `otherwise` is the advice if none is similar."""
    near = get_close_matches(name.lower(), names, n=2, cutoff=0.5)
    advice = f"did you mean {' or '.join(near)}?" if near else otherwise
    return OsdpError(f"there is no such {kind}", got=repr(name), expected=", ".join(names), advice=advice)


def make_folder(path: Path) -> Path:
    """Make a folder unless it is there; raises OsdpError if nothing can be written into it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"the folder {path} cannot be made"
        raise OsdpError(what, got=error.strerror or str(error), advice="another folder") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise OsdpError(f"the folder {path} is not writable", got="no permission", advice="another folder")
    return path
