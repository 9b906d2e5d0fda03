"""Runs the passes of a trace: which micro-batches, with blocks kept and recomputed, of which operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial

from torch import nn
from torch.jit import last_executed_optimized_graph  # type: ignore[attr-defined]

from profiler.autocast import Autocast
from profiler.computed_attributes import ComputedAttribute
from profiler.errors import OsdpError
from profiler.handed_containers import ContainersHanded
from profiler.mixed_precision import RestingDtype, computing_in
from profiler.model_graph import Recompute
from profiler.model_source import ModelSource
from profiler.trace.affine_fit import BEYOND, FOURTH, SINGLE, SIZES
from profiler.trace.changed_buffers import NO_CHANGES, KnownChanges
from profiler.trace.dataless_device import DatalessDevice, feed
from profiler.trace.find_operators import Group, OtherDtypesError, find_blocks, merge_read_outside, of_other_dtypes
from profiler.trace.handover import NO_STAND_INS, UnlikeError
from profiler.trace.input_sizes import ALIKE, InputSizes
from profiler.trace.live_storage import LiveStorage
from profiler.trace.metered_pass import Live, NoGradientError, Pass, PassOptions, run_pass, trains
from profiler.trace.op_meter import Memo
from profiler.trace.random_draws import OTHERS, SAME, python_draws
from profiler.trace.replay import Replay, find_replay, state_of
from profiler.trace.resting_reads import reads_as_on_ranks
from profiler.trace.runs import Runs
from profiler.trace.step_counters import DISTANT, FOLLOWING, Counters, counters_of
from profiler.trace.trace_errors import ModelError, explained_inputs
from profiler.trace.unlike_passes import check_beyond, is_single_on_line
from profiler.trace.waiting_gradients import told_apart


def run_sizes(
    module: nn.Module,
    source: ModelSource,
    groups: Sequence[Group],
    dtypes: Mapping[str, RestingDtype],
    device: DatalessDevice,
    sizes: Sequence[int],
    computed: Sequence[ComputedAttribute],
    wrap: Callable[[list[nn.Module]], None],
) -> Runs:
    """Run a pass per micro-batch, of a module with parameters of these `dtypes` and attributes that hooks have
    `computed`.  Modules that turn out to be operators, as they read parameters inside, are given to `wrap`."""
    first, *others = sizes
    runner = _Runner(module, source, groups, dtypes, device, computed, wrap)
    passes = {first: runner.run_first(first, can_be_finer=bool(others))}
    passes |= {size: runner.run(size) for size in others}
    if others:
        sums = [one.sums for one in passes.values()]
        if any(one - 2 * two + three for one, two, three in zip(*sums, strict=False)):
            passes[FOURTH] = runner.run(FOURTH)
        with suppress(ModelError):
            passes[SINGLE] = runner.run(SINGLE)
        if not is_single_on_line(passes):
            with suppress(ModelError):
                check_beyond(source.name, runner.groups, passes, runner.run(BEYOND))
    can_recompute = trains(module) and any(block not in runner.rerun for block in runner.blocks)
    recomputed, failures = _run_recomputed(runner, passes) if can_recompute else ({}, {})
    apart = dict[Recompute, dict[int, Pass]]()
    if any(execution.handover.makes_a_difference for execution in passes[first].executions):
        with suppress(ModelError):  # all or none, as they are compared
            apart = _run_apart(runner, {Recompute.NOTHING: passes, **recomputed})
    let_go = _let_go(runner, first, passes[first]) if Recompute.EVERYTHING in recomputed else ()
    skipped: set[str] = set()
    if device.data.assumptions:
        with suppress(ModelError):
            skipped = runner.names(passes[first]) - runner.names(runner.run_alike(first))
    skipped |= runner.may_skip
    if runner.fed.are_alike():
        device.data.assumptions[ALIKE] = None
    everything, selective = (recomputed.get(how, {}) for how in (Recompute.EVERYTHING, Recompute.SELECTIVE))
    unused = runner.unused
    return Runs(
        runner.groups,
        passes,
        everything,
        selective,
        apart,
        runner.finer,
        skipped,
        failures,
        unused,
        runner.beside,
        runner.rerun,
        runner.partly,
        let_go,
        runner.written,
        runner.least,
    )


_OWN_HOOKS = (computing_in.__module__, ContainersHanded.__module__, Autocast.__module__)

Recomputed = dict[Recompute, dict[int, Pass]]
"""Passes by what of every block is recomputed, and by micro-batch."""


def _run_recomputed(runner: _Runner, passes: Mapping[int, Pass]) -> tuple[Recomputed, dict[Recompute, str]]:
    """Run passes in which blocks are recomputed, given those in which they are not; return them and what failed why.

    All of a micro-batch follow each other: what a model keeps has the size that the next pass finds again.
    """
    kinds = [Recompute.EVERYTHING, Recompute.SELECTIVE]
    found: Recomputed = {how: {} for how in kinds}
    failures = dict[Recompute, str]()
    first, *_ = passes
    # Two sizes give a line, on which the third has been seen to be; where there is none, all are needed.
    left_out = {SIZES[-1], SINGLE} if len(passes) > 1 and FOURTH not in passes else set[int]()
    for size in (size for size in passes if size not in left_out):
        for how in kinds:
            try:
                one = runner.run(size, passes[size], how)
                if size == first and not one.leaves_nothing:  # its first use imports modules, which hold on to frames
                    one = runner.run(size, passes[size], how)
            except ModelError as error:
                failures[how] = error.got or error.what
                kinds = kinds[: kinds.index(how)]
                break
            found[how][size] = one
    return {how: found[how] for how in kinds}, failures


def _let_go(runner: _Runner, size: int, kept: Pass) -> Sequence[bool]:
    """Return for every execution of a block whether nothing else holds what would be offloaded of its inputs, given a
    pass of one micro-batch in which blocks are kept.
    """
    if not any(execution.lone and execution.lone.lone_bytes for execution in kept.executions):
        return ()
    with suppress(ModelError):
        return runner.let_go(size, kept)
    return ()


def _run_apart(runner: _Runner, bounded: Recomputed) -> Recomputed:
    """Run the same passes with gradients that leave blocks one by one.  Raises OsdpError."""
    found: Recomputed = {how: {} for how in bounded}
    kept = bounded[Recompute.NOTHING]
    for size in kept:
        for how, passes in bounded.items():
            if size in passes:
                found[how][size] = runner.run(size, kept[size] if how else None, how, passes[size])
    return found


class _Runner:
    """Runs passes of a module; from the first on, blocks that are alike are replayed."""

    def __init__(
        self,
        module: nn.Module,
        source: ModelSource,
        groups: Sequence[Group],
        dtypes: Mapping[str, RestingDtype],
        device: DatalessDevice,
        computed: Sequence[ComputedAttribute],
        wrap: Callable[[list[nn.Module]], None],
    ) -> None:
        self.groups = groups
        self._wrap = wrap
        self._dtypes = dtypes
        self._readers = dict[int, set[str]]()
        """By operator: modules that read its parameters in any pass, or in its block their dtype, by path."""
        self.written = dict[str, None]()
        """Parameters that the model itself changes in any pass."""
        self._reads_as_on_ranks = True
        """Whether dtypes of parameters are read as on a rank, and not what they compute in wherever they are read."""
        self._computed = computed
        self.blocks = find_blocks(module)
        self.finer = 1
        self._module = module
        self._source = source
        self._device = device
        self.unused: Collection[str] = ()
        """Parameters that are trained, of operators that run, on which no output depends."""
        self.beside: Collection[str] = ()
        """Those on which the loss does not depend, and another output does."""
        self._reached = set[str]()
        self._draws = SAME
        """How forwards draw random numbers."""
        self.decides_by_draws = False
        """Whether the last forward has drawn numbers in Python, or read some that it drew."""
        self.may_skip = set[str]()
        """Operators that run or do not as random numbers decide."""
        self._memo: Memo = {}
        self._replay: Replay | None = None
        self._repeated = frozenset[str]()
        """Blocks that run several times."""
        self._changed = NO_CHANGES
        self.rerun: Collection[str] = ()
        """Paths of the blocks that the model itself runs again in its backward."""
        self.partly: Collection[str] = ()
        """Paths of those of which it runs a part again."""
        self._told_apart = frozenset[int]()
        """Keys of storages of parameters of which passes record which calls read them."""
        self._left: Sequence[LiveStorage] = ()
        """What the last pass left, as caches do."""
        self.least: Sequence[str] = ()
        """Modules in the order in which they begin in the step that takes least; none if steps are alike."""
        self._begins_at: Sequence[Counters] = ()
        """What counters of steps are before every pass, and before those that it is to follow; none: what the pass
        before has left.
        """
        self._start: Counters | None = None
        """The one before the next pass."""
        self.fed = InputSizes()

    def run_first(self, size: int, *, can_be_finer: bool) -> Pass:
        """Run a pass of the operators that it finds, in which everything runs, and find what need not run again."""
        before, merged = state_of(self._module), False
        try:
            found = trial = self._run(size)
        except OsdpError:
            if not (merged := self._merges_whatever_dtypes(size)):
                raise
            found = trial = self._run(size)
        if self.decides_by_draws:
            found = trial = self._decide_alike(found, size)
        if can_be_finer and self._device.data.finer > 1:
            self.finer = self._device.data.finer
            found = trial = self._run(size)
        is_as_before = before[0] == state_of(self._module)[0]
        if not is_as_before or self._device.data.reads_known:
            found = trial = self._heaviest_step(size, is_as_before) or trial
        is_as_found = not (self._merge(trial) or merged)
        runs = Counter(execution.path for execution in trial.executions)
        repeated = frozenset(path for path, count in runs.items() if count > 1)
        if repeated or not (is_as_before and trial.leaves_nothing and is_as_found):  # a cache may have been filled
            self._wrap([self._module.get_submodule(path) for group in self.groups for path in group.modules])
            self._repeated, before = repeated, state_of(self._module)
            found = self._run(size)
        if apart_keys := told_apart(self._module, self.groups, found.calls):
            self._told_apart = apart_keys
            found = self._run(size)
        self._changed, again = KnownChanges(found.changed, not is_as_before), [*found.rerun]
        self.rerun = [block for block in self.blocks if block in found.rerun]
        self.partly = [block for block in self.blocks if any(path.startswith(f"{block}.") for path in again)]
        self._leave_rerun(found)
        self.unused = self._unused(found)
        replay = find_replay(self._module, found) if before == state_of(self._module) else None
        if replay is not None and (confirmed := self._run_short(replay, replay.confirm, size)):
            found, self._replay = confirmed, replay
        return found

    def _heaviest_step(self, size: int, is_as_before: bool) -> Pass | None:
        """Have all passes begin at the step that takes most, and return one; None if all steps are alike."""
        before = counters_of(self._module, (data := self._device.data).values)
        if is_as_before and not before.tensors:
            return None
        run = partial(self._run_once, size, None, None, Recompute.NOTHING, None, alike=False)
        run()
        changed = before.changed(counters_of(self._module, data.values), was_read=data.reads_known)
        if not changed:
            return None
        kinds = dict[tuple[Live, int], Counters]()
        ran = dict[tuple[Live, int], list[str]]()
        for self._start in (*[None] * FOLLOWING, *map(changed.at, DISTANT)):
            start = self._start or counters_of(self._module, data.values).among(changed)
            self._left = ()  # what other steps have left is not counted: only a step that makes it anew has it
            with suppress(OsdpError):  # a counter may be an index, and no layer may get a gradient
                tried = run()
                kind = tried.live, tried.left.bytes
                kinds[kind], ran[kind] = start, [call.module for call in tried.calls]
            if len(kinds) == FOLLOWING:  # each step makes more than the one before: it is no counter
                break
        self._start = None
        if len(kinds) < 2 or len(kinds) == FOLLOWING:
            changed.put(data.values)
            return None
        by_live = [kinds[kind] for kind in sorted(kinds, reverse=True)]
        starts = [*by_live[:3], *by_live[3:][-1:]]
        heaviest = self._heaviest(size, [(start,) for start in starts])
        # A step that leaves alone what the heaviest has left may make as much as that shares with its activations.
        followed = [(*heaviest, start) for start in starts if start is not heaviest[0]]
        self._begins_at, self._left = self._heaviest(size, [heaviest, *followed]), ()
        found, self.least = self._run(size), ran[min(ran)]
        data.note("the model does something else in some steps, told by how many it has run; the heaviest is assumed")
        return found

    def _heaviest(self, size: int, beginnings: Sequence[Sequence[Counters]]) -> Sequence[Counters]:
        """Return with which of some beginnings passes take most, of equal ones the last."""
        heaviest, most = beginnings[0], Live(0, 0)
        for self._begins_at in beginnings:
            self._left = ()
            with suppress(OsdpError):
                if (live := self._run(size).live).is_more_than(most):
                    heaviest, most = self._begins_at, Live(max(most.peak_bytes, live.peak_bytes), live.all_bytes)
        return heaviest

    def _merges_whatever_dtypes(self, size: int) -> bool:
        """Merge as `_merge` after a pass that failed, by one that finds all parameters in what they compute in.

        A rank has so what is read outside of its owner, and only what is read there shows of which that is true.
        """
        if all(one.rest == one.compute for one in self._dtypes.values()):
            return False
        self._reads_as_on_ranks = False
        try:
            return self._merge(self._run(size))
        except ModelError:
            return False
        finally:
            self._reads_as_on_ranks = True

    def _merge(self, trial: Pass) -> bool:
        """Make one operator of modules that read each other's parameters in a pass; return whether there are any."""
        merged = merge_read_outside(self.groups, self._readers, trial.ran)
        if merged == self.groups:
            return False
        if apart := of_other_dtypes(self._module, merged, {name: one.rest for name, one in self._dtypes.items()}):
            raise OtherDtypesError(apart)
        self.groups = merged
        self._readers.clear()
        return True

    def _unused(self, found: Pass) -> Collection[str]:
        called = dict.fromkeys(call.operator for call in found.calls)
        names = {name for operator in called for name in self.groups[operator].parameters}
        names -= self._reached
        self.beside = names & {*found.in_outputs}
        names -= self.beside
        trained = {name: self._module.get_parameter(name) for name in names}
        # What a hook takes as soon as it is there was there.
        return [name for name, one in trained.items() if one.requires_grad and not one._post_accumulate_grad_hooks]

    def _decide_alike(self, drawn: Pass, size: int) -> Pass:
        """Find what random numbers decide; return the pass in which most runs, and have the others draw alike."""
        found = {SAME: drawn}
        orders = [[call.operator for call in drawn.calls]]
        for self._draws in OTHERS:
            try:
                found[self._draws] = self._run(size)
                orders.append([call.operator for call in found[self._draws].calls])
            except NoGradientError:  # no layer is left that gets one
                orders.append([])
            except OsdpError:  # no such number may ever be drawn, or a size that goes by it would be 0
                continue
        if any(order != orders[0] for order in orders):
            always = set(orders[0]).intersection(*orders)
            paths = {operator: group.modules[0] for operator, group in enumerate(self.groups)}
            self.may_skip = {paths[operator] for order in orders for operator in order if operator not in always}
            # In another order, too, ranks would gather others' layers.
            self.may_skip = self.may_skip or {paths[operator] for operator in orders[0]}
        # What is no operator, as codebooks of residual quantizers, is left out without a trace but in what is live.
        self._draws = max(found, key=lambda draws: (len(found[draws].calls), found[draws].live.all_bytes))
        if not self.may_skip and found[self._draws].live == found[SAME].live:
            self._draws = SAME
        return found[self._draws]

    def run(
        self, size: int, kept: Pass | None = None, how: Recompute = Recompute.NOTHING, bounded: Pass | None = None
    ) -> Pass:
        """Run a pass; given that in which blocks are `kept`, all are recomputed; given the same `bounded`, blocks have
        no boundary.  Raises OsdpError.
        """
        if self._replay is not None:
            if found := self._run_short(self._replay, self._replay.expanded, size, kept, how, bounded):
                return found
            self._replay = None
        return self._run(size, kept, how=how, bounded=bounded)

    def let_go(self, size: int, kept: Pass) -> list[bool]:
        """Run a forward in which blocks save nothing; return of which executions nothing else holds what would be
        offloaded.  Raises OsdpError.
        """
        how, replay = Recompute.OFFLOADED, self._replay
        if replay is not None and (short := self._run_short(replay, lambda found: found, size, kept, how)):
            return replay.let_go(short)
        executions = self._run(size, kept, how=how).executions
        return [execution.lone is not None and execution.lone.is_let_go for execution in executions]

    def _run_short(
        self,
        replay: Replay,
        complete: Callable[[Pass], Pass],
        size: int,
        kept: Pass | None = None,
        how: Recompute = Recompute.NOTHING,
        bounded: Pass | None = None,
    ) -> Pass | None:
        """Run a pass with stand-ins; return it complete, or None, with nothing assumed, where blocks are not alike."""
        assumed = {**self._device.data.assumptions}
        try:
            short = self._run(size, kept, replay, how, bounded)
            if not short.leaves_nothing:  # as where recomputing is first used; see `run_sizes`
                short = self._run(size, kept, replay, how, bounded)
            return complete(short)
        except (OsdpError, UnlikeError):
            self._device.data.assumptions = assumed
            return None

    def run_alike(self, size: int) -> Pass:
        """Run a pass in which all rows choose alike.  Raises OsdpError."""
        return self._run(size, alike=True)

    def names(self, one: Pass) -> set[str]:
        """Return the names of the operators that a pass ran."""
        return {self.groups[call.operator].modules[0] for call in one.calls}

    def _run(
        self,
        size: int,
        kept: Pass | None = None,
        replay: Replay | None = None,
        how: Recompute = Recompute.NOTHING,
        bounded: Pass | None = None,
        *,
        alike: bool = False,
    ) -> Pass:
        """Run a pass as every step but the first finds the model: with what the last one of this size left.

        What TorchScript has compiled it watches as it first runs, then changes, and with that what it saves.
        """
        for _ in range(5):  # the first of all may leave frames that its imports hold, the second not
            before, ran_before = self._left, last_executed_optimized_graph()
            for start in self._begins_at or (None,):
                self._start = start
                found = self._run_once(size, kept, replay, how, bounded, alike=alike)
            as_before = sorted(one.bytes for one in found.kept) == sorted(one.bytes for one in before)
            if as_before and str(last_executed_optimized_graph()) == str(ran_before):
                break
        return found

    def _run_once(
        self, size: int, kept: Pass | None, replay: Replay | None, how: Recompute, bounded: Pass | None, *, alike: bool
    ) -> Pass:
        device, module, samples = self._device, self._module, size * (1 if alike else self.finer)
        device.data.begin(size / SIZES[0], alike=alike)
        with explained_inputs(self._source.name):
            fed = [feed(lambda: self._source.example_inputs(module, samples), device)]
        self.fed.add(samples, fed)
        charges = None
        if kept is not None:
            charges = [call.recomputed for call in kept.calls] if replay is None else replay.charges(kept)
        options = PassOptions(
            groups=self.groups,
            blocks=self.blocks,
            memo=self._memo,
            charges=charges,
            stand_ins=NO_STAND_INS if replay is None else replay.stand_ins,
            recompute=how,
            repeated=self._repeated,
            bounded=() if bounded is None else bounded.executions,
            changed=self._changed,
            left=self._left,
            follows=len(self._begins_at) > 1 and self._start is self._begins_at[-1],
            outlives=next((one.left for one in (kept, bounded) if one is not None), None),
            computed=self._computed,
            told_apart=self._told_apart,
            rerun=self.rerun,
            reads=reads_as_on_ranks(module, self.groups, self.blocks, self._dtypes, device.data, self._readers)
            if self._reads_as_on_ranks
            else nullcontext(),
        )
        device.data.begin_forward(self._draws.at)
        counting = self._start.standing(module, device.data.values) if self._start else nullcontext()
        with counting, python_draws(self._draws) as drawn:
            found = run_pass(self._source, module, fed, device, options)
        self._leave_rerun(found)
        self.written |= found.written
        if replay is None and not how:
            got = zip(self.groups, found.got_gradients, strict=True)
            self._reached |= {
                name for group, own in got for name, one in zip(group.parameters, own, strict=True) if one
            }
        for operator, readers in found.read_outside.items():
            if not self._reads_in_hooks(operator):  # the first pass may read alone what later ones find in a cache
                self._readers.setdefault(operator, set()).update(readers)
        self.decides_by_draws = bool(drawn.count) or device.data.decides_by_draws
        self._left = found.kept
        return found

    def _leave_rerun(self, found: Pass) -> None:
        """Have blocks that the model itself runs again keep what they keep, also where others are recomputed."""
        for call in found.calls if self.rerun else ():
            if call.block is not None and found.executions[call.block].path in self.rerun:
                call.recomputed = call.saved

    def _reads_in_hooks(self, operator: int) -> bool:
        """Return whether a module of an operator has hooks before its forward, as `nn.utils.weight_norm` has."""
        modules = map(self._module.get_submodule, self.groups[operator].modules)
        hooks = (hook for module in modules for hook in module._forward_pre_hooks.values())
        return any(getattr(hook, "__module__", "") not in _OWN_HOOKS for hook in hooks)
