"""Reads and writes folders of Hugging Face: safetensors files with an index, which `from_pretrained` reads.

    model.safetensors                                        or, where there are several
    model.safetensors.index.json, model-00001-of-00003.safetensors, ...

`load` reads of each tensor the part that this rank holds, one tensor at a time.  `save` gathers a tensor at a time onto
the rank that writes its file; ranks take files in turn.  No rank ever holds the whole model:

    load    its share of the model, and the part of a tensor
    save    its share of the model, one file and one tensor
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from profiler.errors import OsdpError, first_line, install_advice
from runtime.failures.rank_agreement import Agreement
from runtime.local_shards import LocalShard
from runtime.sharded_model import ShardedModel
from runtime.state.model_state import persistent_buffers
from runtime.state.state_dict import local_shards_by_name, wrappers

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NAMES_SHOWN = 5
"""How many names an error lists."""
Rename = Callable[[str], str] | Mapping[str, str] | None
"""From a name of the model to the one in the files; names that a mapping lacks stay."""


def load(
    sharded: ShardedModel, folder: Path, rename: Rename = None, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Copy the tensors of a folder into a model, converted to its data types; return (missing, unexpected) names.

    Of parameters that are tied, one name in the files is enough.  Raises OsdpError, and changes nothing, for a folder
    that cannot be read, for other shapes, and, if `strict`, for missing or unexpected names.
    """
    shards, buffers = local_shards_by_name(sharded), persistent_buffers(sharded.module)
    keys = {name: _renamed(name, rename) for name in (*shards, *buffers)}
    with _opened(folder) as tensors, torch.no_grad():
        found = [name for name in keys if keys[name] in tensors]
        loaded = {id(shards[name][0].parameter) for name in found if name in shards}
        missing = [name for name, parts in shards.items() if id(parts[0].parameter) not in loaded]
        missing += [name for name in buffers if name not in found]
        unexpected = sorted(tensors.keys() - set(keys.values()))
        if strict and (missing or unexpected):
            got = f"unknown names {_listed(unexpected)}" if unexpected else f"no {_listed(missing)}"
            expected = f"also {_listed(missing)}" if missing and unexpected else "the names of the model"
            advice = "pass rename=, a function from a name of the model to the one in the files, or strict=False"
            raise OsdpError(f"the tensors in {folder} are not the model's", got=got, expected=expected, advice=advice)
        slices = {name: tensors[keys[name]].get_slice(keys[name]) for name in found}
        for name, read in slices.items():
            shape = shards[name][0].shape if name in shards else tuple(buffers[name].shape)
            if tuple(read.get_shape()) != shape:
                got = str(tuple(read.get_shape()))
                raise OsdpError(f"{name} in {folder} has another shape", got=got, expected=str(shape))
        for name, read in slices.items():
            for part in shards.get(name, ()):
                if part.numel:
                    value = read[part.slices] if part.slices else tensors[keys[name]].get_tensor(keys[name])
                    part.local(part.parameter).copy_(value)
            if name in buffers:
                buffers[name].copy_(tensors[keys[name]].get_tensor(keys[name]))
    sharded.expire()
    return missing, unexpected


def save(sharded: ShardedModel, folder: Path, largest_file_bytes: int, rename: Rename = None) -> None:
    """Write the model to a folder, tied parameters once. A collective call; every rank must see the folder.

    Files are written beside their names and renamed, the index last.  Raises OsdpError on all ranks if one fails.
    """
    if opaque := wrappers(sharded):
        what = f"{next(iter(opaque))} holds other tensors instead of data, which safetensors cannot write"
        advice = "save what is trained: {name: value for name, value in model.full_state_dict().items() if ...}"
        got = f"{len(opaque)} parameters of class {type(next(iter(opaque.values()))).__name__}"
        raise OsdpError(what, got=got, expected="parameters with data", advice=advice)
    with _safetensors():
        from safetensors.torch import save_file
    files = _files(sharded, largest_file_bytes, rename)
    ranks, weight_map, total_bytes = Agreement.all(), {}, 0
    with torch.no_grad():
        ranks.together("make the folder", lambda: folder.mkdir(parents=True, exist_ok=True))
        for number, tensors in enumerate(files):
            writer = number % ranks.count
            name = SINGLE if len(files) == 1 else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
            held: dict[str, Tensor] = {}
            for key, source in tensors.items():
                full = _whole(sharded, source, writer)
                weight_map[key], total_bytes = name, total_bytes + full.nbytes
                if ranks.rank == writer:
                    held[key] = full.cpu().contiguous()
                del full
            writes = partial(_write, folder / name, partial(save_file, held, metadata={"format": "pt"}))
            ranks.together(f"write {name}", writes if ranks.rank == writer else lambda: None)
            del held, writes
    index = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2)
    ranks.on_first("write the index", lambda: _finish(sharded, folder, index if len(files) > 1 else None))


def _finish(sharded: ShardedModel, folder: Path, index: str | None) -> None:
    """Write the index, or remove an older one, and the configurations that a model of transformers has."""
    if index is None:
        (folder / INDEX).unlink(missing_ok=True)
    else:
        _write(folder / INDEX, lambda path: path.write_text(index + "\n"))
    for name in ("config", "generation_config"):
        configuration: Any = getattr(sharded.module, name, None)
        if hasattr(configuration, "save_pretrained"):
            configuration.save_pretrained(folder)


def _files(sharded: ShardedModel, largest_file_bytes: int, rename: Rename) -> list[dict[str, Any]]:
    """Return what goes into each file, by key: shards of a parameter, or a buffer; tied parameters once."""
    seen: set[int] = set()
    sources: dict[str, tuple[int, Any]] = {}
    for name, parts in local_shards_by_name(sharded).items():
        if id(parts[0].parameter) not in seen:
            seen.add(id(parts[0].parameter))
            shape, dtype = parts[0].shape, parts[0].parameter.dtype
            sources[_renamed(name, rename)] = torch.Size(shape).numel() * dtype.itemsize, parts
    for name, buffer in persistent_buffers(sharded.module).items():
        sources[_renamed(name, rename)] = buffer.nbytes, buffer
    files: list[dict[str, Any]] = [{}]
    filled = 0
    for key, (size_bytes, source) in sources.items():
        if files[-1] and filled + size_bytes > largest_file_bytes:
            files.append({})
            filled = 0
        files[-1][key] = source
        filled += size_bytes
    return files


def _whole(sharded: ShardedModel, source: Sequence[LocalShard] | Tensor, writer: int) -> Tensor:
    """Return a parameter or buffer, whole on the rank that writes it. A collective call for a parameter."""
    if isinstance(source, Tensor):
        return source.detach().clone()
    first = source[0]
    full = torch.zeros(first.shape, dtype=first.parameter.dtype, device=sharded.device)
    for shard in source:
        if shard.is_first and shard.numel:
            full[shard.slices] = shard.local(shard.parameter).to(sharded.device)
    dist.reduce(full, dst=writer)  # every element comes from one rank, so the sum is exact
    return full


def _renamed(name: str, rename: Rename) -> str:
    if rename is None:
        return name
    return rename.get(name, name) if isinstance(rename, Mapping) else rename(name)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file beside its name and rename it: there is never a part of one under its name."""
    beside = path.with_name(f".{path.name}.partial")
    try:
        write(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def _safetensors() -> Iterator[None]:
    """Say what is missing where the library is."""
    try:
        yield
    except ImportError:
        what = "reading and writing pretrained models needs the library safetensors"
        raise OsdpError(what, advice=install_advice("hf")) from None


@contextmanager
def _opened(folder: Path) -> Iterator[dict[str, Any]]:
    """Open the files of a folder; yield the one that has each key. Raises OsdpError."""
    with _safetensors():
        from safetensors import SafetensorError, safe_open
    index, single = folder / INDEX, folder / SINGLE
    with ExitStack() as stack:
        try:
            if index.exists():
                found = json.loads(index.read_text())["weight_map"]
                names = sorted(set(found.values()))
            else:
                found, names = None, [single.name]
            if any("/" in name or name.startswith(".") for name in names):
                raise OsdpError(f"{index} names a file outside of its folder", got=_listed(names))
            files = {name: stack.enter_context(safe_open(folder / name, framework="pt")) for name in names}
            by_key = {key: file for file in files.values() for key in file.keys()}  # noqa: SIM118
        except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError) as error:
            if isinstance(error, OsdpError):
                raise
            what, expected = f"{folder} cannot be read as a pretrained model", f"{SINGLE}, or {INDEX} and its files"
            advice = "convert other formats with the library that wrote them: from_pretrained, then save_pretrained"
            raise OsdpError(what, got=first_line(error), expected=expected, advice=advice) from error
        lacking = sorted(found.keys() - by_key.keys()) if found is not None else []
        if lacking:
            raise OsdpError(f"{index} lists tensors that its files lack", got=_listed(lacking))
        yield by_key
