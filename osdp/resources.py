"""Where OSDP's own data files are (beside the package in a checkout, inside it in a wheel), and folders for output."""

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from profiler.errors import OsdpError

_PACKAGE = Path(__file__).resolve().parent
# Only a folder with our files in it counts: in site-packages, `cuda` beside us is NVIDIA's.
_CONTENT = {"configs": "models/*.yaml", "cuda": "*.cu"}
_NOUNS = {"models": "model", "clusters": "cluster", "train": "training configuration"}

Kind = Literal["models", "clusters", "train"]
"""Folder of configs/."""


def resource_dir(name: Literal["configs", "cuda"]) -> Path:
    """Return the folder of model and cluster files, or of CUDA sources; raises OsdpError."""
    places = (_PACKAGE / name, _PACKAGE.parent / name)
    for place in places:
        if any(place.glob(_CONTENT[name])):
            return place
    expected = " or ".join(str(place / _CONTENT[name]) for place in places)
    advice = "install OSDP again: this installation is not complete"
    raise OsdpError(f"OSDP's own folder `{name}` is missing", expected=expected, advice=advice)


def resource_names(kind: Kind) -> list[str]:
    """Return the names of the models, clusters or training configurations that come with OSDP, sorted."""
    return sorted(path.stem for path in (resource_dir("configs") / kind).glob("*.yaml"))


def resource_file(kind: Kind, name: str, otherwise: str = "") -> Path:
    """Return the file of the model, cluster or configuration `name`.

    Raises OsdpError if there is none; `otherwise` is then the advice, unless a name is similar.
    """
    names = resource_names(kind)
    if name in names:
        return resource_dir("configs") / kind / f"{name}.yaml"
    near = get_close_matches(name.lower(), names, n=2, cutoff=0.5)
    advice = f"did you mean {' or '.join(near)}?" if near else otherwise
    raise OsdpError(f"there is no such {_NOUNS[kind]}", got=repr(name), expected=", ".join(names), advice=advice)


def file_of(kind: Kind, spec: str, otherwise: str) -> Path:
    """Return the file that `spec` is the path or, of one of OSDP's own, the name of; raises as `resource_file`."""
    return Path(spec) if is_path(spec) else resource_file(kind, spec, otherwise)


def is_path(spec: str) -> bool:
    """Whether `spec` is the path of a file, and not a name."""
    return spec.endswith((".yaml", ".yml")) or "/" in spec


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
