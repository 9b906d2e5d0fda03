"""Which kind of device ranks train on: that of `--device`, which every command reads alike."""

from profiler.errors import OsdpError


def chosen_device(asked: str, ranks: int = 1) -> str:
    """Return `cpu` or `cuda`; of `auto` the latter if this machine has a GPU for each of so many ranks.

    Raises OsdpError if GPUs are asked for and there are too few.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto":
        return "cuda" if gpus >= ranks else "cpu"
    if asked == "cuda" and not gpus:
        raise OsdpError("torch sees no GPU", got="device cuda", advice="--device cpu, or check nvidia-smi")
    if asked == "cuda":
        check_gpus(ranks, gpus)
    return asked


def check_gpus(ranks: int, gpus: int) -> None:
    """Raise OsdpError if there is no GPU for every rank."""
    if ranks > gpus:
        expected = f"at most {gpus}, one for each GPU"
        raise OsdpError("there are fewer GPUs than ranks", got=f"{ranks}", expected=expected, advice="--device cpu")
