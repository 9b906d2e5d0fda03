"""Functions that exported modules define for themselves, as text, since they import torch alone.

A module gets those that it calls, and the imports of the names that it uses.
"""

import re

DOCSTRING = "Parallelizes a model with PyTorch alone: `parallelize(model, mesh)`."

GET_MODULE = '''\
def get_module(model: nn.Module, path: str) -> nn.Module:
    """Return the module at a path; raises ValueError if the model has none there."""
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        text = f"the plan is for another model: {type(model).__name__} has no module"
        raise ValueError(f"{text} {path!r}") from error
'''

RECOMPUTE = '''\
def recompute(block: nn.Module, early_stop: bool = True) -> None:
    """Let a block's forward run again in backward, inside of the hooks that gather it."""
    forward = block.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        with set_checkpoint_early_stop(early_stop):
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = checkpointed
'''

AS_FIRST_RUN = '''\
def as_first_run(block: nn.Module, forward: Any) -> Any:
    """Return a forward that finds buffers as they were when it runs again.

    And leaves them as they are: statistics of batch norm count a batch once.
    """
    if not torch.is_grad_enabled():
        return forward
    places = [(one, name) for one in block.modules() for name in one._buffers]
    before: dict[Any, torch.Tensor] = {}

    def run(*args: Any, **kwargs: Any) -> Any:
        now = {(one, name): getattr(one, name) for one, name in places}
        now = {place: buffer for place, buffer in now.items() if buffer is not None}
        if not before:  # the first time, or nothing changes
            versions = {place: buffer._version for place, buffer in now.items()}
            old = {buffer: buffer.clone() for buffer in now.values()}
            output = forward(*args, **kwargs)
            for (one, name), buffer in now.items():
                is_same = getattr(one, name) is buffer
                is_same = is_same and buffer._version == versions[one, name]
                if not is_same or isinstance(one, _NormBase):  # which counts no version
                    before[one, name] = old[buffer]
            return output
        fresh = {copy: copy.clone() for copy in before.values()}
        for (one, name), copy in before.items():
            setattr(one, name, fresh[copy])
        try:
            return forward(*args, **kwargs)
        finally:
            for one, name in before:
                setattr(one, name, now[one, name])

    return run
'''

RECOMPUTE_SELECTIVELY = '''\
def recompute_selectively(block: nn.Module) -> None:
    """Let all of a block but matrix products and attention run again in backward.

    To its end: what is kept is freed where it is taken up again.
    """
    forward = block.forward
    contexts = partial(create_selective_checkpoint_contexts, keep_products)

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        with set_checkpoint_early_stop(False):
            return checkpoint(
                forward,
                *args,
                use_reentrant=False,
                context_fn=contexts,
                **kwargs,
            )

    block.forward = checkpointed
'''

KEEP_PRODUCTS = '''\
def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Say whether to keep what an operation returns: matrix products and attention.

    Batched products that are larger than what they are made of, such as scores of
    attention, are computed again, and so is attention with dropout.
    """
    aten = torch.ops.aten
    more = (aten._scaled_dot_product_flash_attention_for_cpu, aten._grouped_mm)
    packet = op.overloadpacket
    keep = packet in flop_registry or packet in more
    if packet in (aten.bmm, aten.baddbmm):
        left, right = [one for one in args if isinstance(one, torch.Tensor)][-2:]
        rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
        keep = rows * columns <= (rows + columns) * inner
    for position, argument in enumerate(op._schema.arguments if keep else ()):
        if argument.name == "dropout_p":
            given = kwargs.get("dropout_p", argument.default_value)
            keep = not (args[position] if position < len(args) else given)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
'''

SHARD_TOGETHER = '''\
def shard_together(modules: list[nn.Module], **options: Any) -> None:
    """Shard modules as one unit, gathered before the backward of any of them.

    Of several modules FSDP2 hooks the last alone, and that may have no backward.
    """
    fully_shard(modules, **options)

    def gather(gradient: torch.Tensor) -> None:
        modules[0].unshard()

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for one in tree_leaves(output):
            if isinstance(one, torch.Tensor) and one.requires_grad:
                one.register_hook(gather)

    for module in modules:
        module.register_forward_hook(hook)
'''

HOLD_WHOLE = '''\
def hold_whole(
    model: nn.Module, mesh: DeviceMesh, paths: list[str]
) -> set[nn.Parameter]:
    """Return parameters that `fully_shard` is to leave alone, moved to the device."""
    names = dict(model.named_parameters(remove_duplicate=False))
    if missing := [path for path in paths if path not in names]:
        text = f"the plan is for another model: {type(model).__name__} has no parameter"
        raise ValueError(f"{text} {missing[0]!r}")
    for path in paths:
        names[path].data = names[path].data.to(mesh.device_type)
    return {names[path] for path in paths}
'''

KEEP_IN_FP32 = '''\
def keep_in_fp32(model: nn.Module) -> None:
    """Let trained floating-point parameters of less than 32 bits rest in fp32."""
    for parameter in model.parameters():
        few_bits = parameter.is_floating_point() and parameter.dtype.itemsize < 4
        if parameter.requires_grad and few_bits:
            parameter.data = parameter.data.float()
'''

CAST_INPUTS = '''\
def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point inputs of the model, and of modules with parameters.

    Batch norm and instance norm are left out: their statistics need their bits.
    """

    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(cast, (args, kwargs))

    for module in model.modules():
        owns = next(module.parameters(recurse=False), None) is not None
        if (owns or module is model) and not isinstance(module, _NormBase):
            module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
'''

HELPERS = {
    "get_module": GET_MODULE,
    "recompute": RECOMPUTE,
    "recompute_selectively": RECOMPUTE_SELECTIVELY,
    "keep_products": KEEP_PRODUCTS,
    "as_first_run": AS_FIRST_RUN,
    "shard_together": SHARD_TOGETHER,
    "hold_whole": HOLD_WHOLE,
    "keep_in_fp32": KEEP_IN_FP32,
    "cast_inputs": CAST_INPUTS,
}
"""By name."""
IMPORTS = (
    ("functools", "partial"),
    ("typing", "Any"),
    ("", "torch"),
    ("torch", "nn"),
    ("torch.distributed.device_mesh", "DeviceMesh"),
    ("torch.distributed.device_mesh", "init_device_mesh"),
    ("torch.distributed.fsdp", "CPUOffloadPolicy"),
    ("torch.distributed.fsdp", "MixedPrecisionPolicy"),
    ("torch.distributed.fsdp", "fully_shard"),
    ("torch.nn.modules.batchnorm", "_NormBase"),
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.utils._pytree", "tree_leaves"),
    ("torch.utils._pytree", "tree_map"),
    ("torch.utils.checkpoint", "CheckpointPolicy"),
    ("torch.utils.checkpoint", "checkpoint"),
    ("torch.utils.checkpoint", "create_selective_checkpoint_contexts"),
    ("torch.utils.checkpoint", "set_checkpoint_early_stop"),
    ("torch.utils.flop_counter", "flop_registry"),
)
"""(module, name) in the order of the import statements."""
STANDARD = ("functools", "typing")


def _uses(text: str, name: str) -> bool:
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return re.search(rf"(?<![\w.\"']){name}\b(?!\")", code) is not None


def needed(text: str, has_buffers: bool) -> list[str]:
    """Return the helpers that code calls, and those that these call; `has_buffers`: a rerun may change some."""
    helpers = {name: _with_buffers(helper) if has_buffers else helper for name, helper in HELPERS.items()}
    names: list[str] = []
    for name in helpers:
        called = f"{text}\n" + "\n".join(helpers[other] for other in names)
        if _uses(called, name):
            names.append(name)
    return [helpers[name].rstrip() for name in names]


def _with_buffers(helper: str) -> str:
    """Return a helper in which what is checkpointed finds buffers as they were."""
    helper = helper.replace("checkpoint(forward,", "checkpoint(run,").replace(f"{16 * ' '}forward,", f"{16 * ' '}run,")
    start = "    def checkpointed(*args: Any, **kwargs: Any) -> Any:\n"
    return helper.replace(start, f"{start}        run = as_first_run(block, forward)\n")


def imports(text: str) -> list[str]:
    """Return the import statements of code."""
    always = ("nn", "DeviceMesh")
    by_module: dict[str, list[str]] = {}
    for module, name in IMPORTS:
        if name in always or _uses(text, name):
            by_module.setdefault(module, []).append(name)
    lines: list[str] = []
    for module, names in by_module.items():
        if module not in STANDARD and any(one in STANDARD for one in by_module) and "" not in lines:
            lines.append("")
        if not module:
            lines += [f"import {name}" for name in names]
            continue
        line = f"from {module} import {', '.join(names)}"
        long = [f"from {module} import (", *(f"    {name}," for name in names), ")"]
        lines += [line] if len(line) <= 88 else long
    return lines
