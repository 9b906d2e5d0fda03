"""What a trace, which has no data, assumes where shapes or Python values depend on data.

Values that follow from shapes and constants are exact (`known_values`): arange, masks made of ones, and what
the model computes of them.  Three kinds of values are assumed:

- *Choices* (topk, argmax, max, sort, multinomial, of values that are not known) are spread evenly.  With N rows
  that choose k of E each, option E-1 gets

      H = min(N, ceil(r N k / E))        r: the largest load over the mean, `expert_imbalance`, 1 by default

  choices and the others share the N k - H that are left, one more or less (`spread`); no row chooses an option
  twice, and a chosen score is 1.  So a mixture of experts gives each expert N k / E tokens, whether it is
  written with one_hot, nonzero, bincount, sort, `.tolist()` or a comparison.
- *Draws* (rand, randint, randperm) are spread evenly over their range (`even_draws`).
- No number is nan or infinite, decompositions succeed (`cholesky_ex`, `inv_ex`), and what torch.distributions is given
  is valid, as is what forwards check (`data_checks`).

Choices and draws repeat with the micro-batch: the passes of a trace have b, 2b and 3b samples, and each b of them
choose alike, so that loads grow linearly although they are whole numbers.

Where a value is not known nonetheless:

| asked | answer |
|---|---|
| which elements a mask selects (nonzero, x[mask], masked_select), unique | all: an upper bound |
| bincount | its minlength |
| how long packed sequences are | as long as they are padded to: an upper bound |
| how long the targets of ctc_loss are | as long as their matrix is wide; all alike where they are concatenated |
| a floating-point number (`.item()`) | 1, which must not decide a branch (`python_values.AssumedNumber`) |
| whether tensors are equal (`torch.equal`, `allclose`) | one is; floating-point ones differ; others are refused |
| a whole number, a bool, how often to repeat | refused: `UnknownValueError` |

Whatever was assumed where it mattered is in `assumptions`, with the module that asked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from profiler.collective_ops import NAMESPACES
from profiler.errors import OsdpError
from profiler.trace import elementwise
from profiler.trace.data_checks import is_one, passing_value
from profiler.trace.even_draws import EvenDraws, spread
from profiler.trace.known_values import Effects, KnownValues, computing, effects_of, has_data
from profiler.trace.packed_sequences import pack
from profiler.trace.questions import Questions

aten = torch.ops.aten
DATA_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
EVEN_LOAD = 100
"""Choices per option from which on one more or less does not matter."""


class UnknownValueError(RuntimeError):
    """The model asks for a value that only data could give."""


class DataDependent:
    """Answers what depends on data, and follows what is known."""

    def __init__(self, expert_imbalance: float = 1.0) -> None:
        if not 1 <= expert_imbalance < math.inf:
            expected = "at least 1: the largest load over the mean"
            raise OsdpError("the imbalance of experts is out of range", got=f"{expert_imbalance:g}", expected=expected)
        self.values = KnownValues()
        self.assumptions: dict[str, None] = {}
        """In the order in which they were first needed."""
        self.module = ""
        """Path of the module that runs."""
        self.finer = 1
        """By what the micro-batch is to be multiplied for choices to come out even."""
        self._imbalance = expert_imbalance
        self._repeats, self._draws = 1, EvenDraws()
        self._alike = False
        self._questions = Questions()
        self._draws_at: float | None = None
        self._drew = False
        self.decides_by_draws = False
        """Whether a forward has drawn, and then read numbers of tensors that are known."""
        self.reads_known = False
        """Whether any forward has read such numbers."""
        self.runs_collectives = False
        self.is_building = False
        """Whether the model is being built: constructors may compare weights, of which no trace knows the values."""

    @contextmanager
    def building(self) -> Iterator[None]:
        """Open a context in which a model is built."""
        before, self.is_building = self.is_building, True
        try:
            yield
        finally:
            self.is_building = before

    def begin(self, repeats: float, *, alike: bool = False) -> None:
        """Begin a pass whose micro-batch is `repeats` times the smallest.

        `alike`: not even, but as uneven as can be: all rows choose the first options.
        """
        self._draws_at, self._drew, self.decides_by_draws = None, False, False
        self.values.clear_memo()
        self._draws.begin(repeats)
        self._repeats = max(1, int(repeats))
        self._alike = alike

    # --- after an op ------------------------------------------------------------------------------

    def follow(
        self,
        op: OpOverload,
        dependence: Dependence,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
        out: Any,
    ) -> None:
        """Note what is known, or assumed, of the outputs of `out = op(*args, **kwargs)`, and of what it wrote into."""
        if dependence.is_collective:
            self.runs_collectives = True
            self.values.exchange(op, dependence.effects, args, out)
            return
        known = self.values.follow(op, dependence.effects, args, kwargs, tensors, out)
        if not known and dependence.assume is not None:
            dependence.assume(self, out, *args, **kwargs)

    def begin_forward(self, draws_at: float | None) -> None:
        """Begin the forward of a pass, whose inputs are there.

        `draws_at`: where in its range all is that it draws in vectors, from 0 to 1; None: spread evenly.
        """
        self._draws_at, self._drew, self.decides_by_draws = draws_at, False, False
        self._questions.begin()

    def ask(self) -> None:
        """Count a question of the module that runs.  Raises AskedForeverError."""
        self._questions.count(self.module)

    def note_read(self) -> None:
        """Note that known values are read into Python, where they may decide something."""
        self.decides_by_draws |= self._drew
        self.reads_known = True

    def choose(self, indices: Tensor, options: int, dim: int | None = None) -> None:
        """Assume what `indices` holds: along `dim`, the choices of a row among so many options; None: a choice each."""
        if not indices.numel():
            return
        shape = tuple(indices.shape) if dim is None else tuple(indices.movedim(dim, -1).shape)
        chosen = 1 if dim is None else shape[-1]
        rows = indices.numel() // chosen
        repeats = self._repeats if rows % self._repeats == 0 else 1

        def compute() -> Tensor:
            if self._alike:
                return torch.arange(chosen).repeat(rows, 1).view(shape).movedim(-1, -1 if dim is None else dim)
            self._need_choices(rows // repeats, chosen, options)
            table = spread(rows // repeats, chosen, options, self._imbalance).repeat(repeats, 1).view(shape)
            return table if dim is None else table.movedim(-1, dim)

        self.values.assume(indices, ("choices", options, dim), compute)

    def _need_choices(self, rows: int, chosen: int, options: int) -> None:
        unbalanced = f", the largest load {self._imbalance:g} times the mean" if self._imbalance != 1 else ""
        self.note(f"choices that depend on data are assumed to be spread evenly: {chosen} of {options}{unbalanced}")
        if rows * chosen < EVEN_LOAD * options:
            # Half of the rows, because the pass that only lifts the lines has half of the micro-batch.
            self.finer = math.lcm(self.finer, Fraction(rows, 2 * options).denominator)

    def draw(self, tensor: Tensor, low: float = 0, high: float = 1) -> None:
        """Assume that a tensor's values are spread evenly from `low` to less than `high`."""
        shape = tuple(tensor.shape)
        whole, at = not tensor.is_floating_point(), self._draws_at if tensor.numel() == 1 or tensor.dim() == 1 else None
        key, even = self._draws.next(shape, low, high)

        def compute() -> Tensor:
            drawn = even() if at is None else torch.full(shape, low + at * (high - low), dtype=torch.float64)
            return drawn.floor() if whole else drawn

        self._drew = True
        self.values.assume(tensor, ("draws", key, at), compute)

    def permute(self, tensor: Tensor, count: int) -> None:
        """Assume that a permutation is the identity, or reversed where draws are high."""
        self._drew, is_reversed = True, (self._draws_at or 0.0) > 0.5
        order = range(count)[:: -1 if is_reversed else 1]
        self.values.assume(tensor, ("randperm", is_reversed), lambda: torch.tensor(order))

    def fill(self, tensor: Tensor, value: float) -> None:
        """Assume that a tensor holds one value."""
        shape = tuple(tensor.shape)
        self.values.assume(tensor, ("filled", value), lambda: torch.full(shape, value))

    def note(self, text: str) -> None:
        """Note an assumption that the module which runs needs."""
        where = re.sub(r"\b[0-9]+\b", "*", self.module)
        self.assumptions[f"{text} (in `{where}`)" if where else text] = None

    # --- instead of an op -------------------------------------------------------------------------

    def run(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """Return `call(op, args, kwargs)`, or the answer if the output depends on data.  Raises UnknownValueError."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        dependence = dependence_of(op)
        if dependence.asks and not all(map(has_data, tensors)):
            if op is aten.index.Tensor:
                args = (args[0], self.selected(args[1]) or args[1])
            elif (answer := self.answer(op, args, kwargs, tensors)) is not NotImplemented:
                return answer
        out = call(op, args, kwargs)
        self.follow(op, dependence, args, kwargs, tensors, out)
        return out

    def answer(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
        """Answer an op that `asks`, but no indexing, or return NotImplemented to run it; raises UnknownValueError."""
        self.ask()
        found = self.values.computed(op, args, kwargs, tensors)
        if found is NotImplemented and op in _UNKNOWN:
            return _UNKNOWN[op](self, *args, **kwargs)
        if op is aten._local_scalar_dense.default:
            self.note_read()
        return found

    def selected(self, indices: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """Return the indices of an indexing op with those that masks select in their place; None without masks."""
        if not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
            return None
        self.ask()
        selected: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                selected.append(index)
            else:
                found = self.values.computed(aten.nonzero.default, (index,), {}, (index,))
                selected += (self.everything(index) if found is NotImplemented else found).unbind(1)
        return selected

    def everything(self, x: Tensor) -> Tensor:
        """Return the indices of all elements."""
        self.note("masks that depend on data are assumed to select everything")
        return x.new_empty((x.numel(), x.dim()), dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Dependence:
    """How an op depends on data, in one place: to look it up hashes the op, which takes longer than what is asked."""

    asks: bool
    """Whether it may have to be answered."""
    effects: Effects
    assume: Callable[..., None] | None
    """What assumes values of its output, if those do not follow: (what follows, output, *arguments) -> None."""
    is_collective: bool


@cache
def dependence_of(op: OpOverload) -> Dependence:
    """Return how an op depends on data."""
    asks = op in _WITHOUT_META or bool(DATA_TAGS & set(op.tags))
    return Dependence(asks, effects_of(op), _ASSUMED.get(op), op.namespace in NAMESPACES)


# The meta kernel of grouped_mm takes bfloat16 only; the others have none.
_WITHOUT_META = {aten._grouped_mm.default, aten._ctc_loss_backward.Tensor, aten._pack_padded_sequence.default}


# --- values that are assumed ------------------------------------------------------------------------


def _topk(data: DataDependent, out: Sequence[Tensor], x: Tensor, k: int, dim: int = -1, *rest: Any) -> None:
    data.fill(out[0], 1)
    if x.dim():
        data.choose(out[1], x.shape[dim], dim)


def _sort(data: DataDependent, out: Sequence[Tensor], x: Tensor, dim: int = -1, *rest: Any, **options: Any) -> None:
    dim = options.get("dim", dim)
    if x.dim():
        data.choose(out[1], x.shape[dim], dim)


def _largest(data: DataDependent, out: Sequence[Tensor], x: Tensor, dim: int, *rest: Any) -> None:
    data.fill(out[0], 1)
    data.choose(out[1], x.shape[dim] if x.dim() else 1)


def _argmax(data: DataDependent, out: Tensor, x: Tensor, dim: int | None = None, *rest: Any) -> None:
    data.choose(out, x.numel() if dim is None else x.shape[dim])


def _multinomial(data: DataDependent, out: Tensor, x: Tensor, *rest: Any, **options: Any) -> None:
    data.choose(out, x.shape[-1], -1)


def _rand(data: DataDependent, out: Tensor, *rest: Any, **options: Any) -> None:
    data.draw(out)


def _uniform(data: DataDependent, out: Tensor, x: Tensor, low: float = 0, high: float = 1, **options: Any) -> None:
    if out.numel() == 1 or (out.dim() == 1 and not data.is_building):  # to be read, as augmentations do
        data.draw(out, low, high)


def _randint(data: DataDependent, out: Tensor, high: int, *rest: Any, **options: Any) -> None:
    data.draw(out, 0, high)


def _randint_low(data: DataDependent, out: Tensor, low: int, high: int, *rest: Any, **options: Any) -> None:
    data.draw(out, low, high)


def _randperm(data: DataDependent, out: Tensor, count: int, **options: Any) -> None:
    data.permute(out, count)


def _zeros(data: DataDependent, out: Tensor, *rest: Any, **options: Any) -> None:
    data.fill(out, 0)


def _ones(data: DataDependent, out: Tensor, *rest: Any, **options: Any) -> None:
    data.fill(out, 1)


def _full_like(data: DataDependent, out: Tensor, x: Tensor, value: float, **options: Any) -> None:
    data.fill(out, value)


def _new_full(data: DataDependent, out: Tensor, x: Tensor, size: Sequence[int], value: float, **options: Any) -> None:
    data.fill(out, value)


def _equal(data: DataDependent, out: Tensor, x: Tensor, other: Any) -> None:
    """`x == x` is how one asks for what is no nan, `x == inf` for what is infinite."""
    if x is other or _is_infinite(other):
        data.fill(out, x is other)


def _unequal(data: DataDependent, out: Tensor, x: Tensor, other: Any) -> None:
    if x is other or _is_infinite(other):
        data.fill(out, x is not other)


def _succeeded(data: DataDependent, out: Sequence[Tensor], *args: Any, **options: Any) -> None:
    data.fill(out[-1], 0)


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and math.isinf(value)


_ASSUMED: dict[OpOverload, Callable[..., None]] = {
    aten.topk.default: _topk,
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten.max.dim: _largest,
    aten.min.dim: _largest,
    aten.argmax.default: _argmax,
    aten.argmin.default: _argmax,
    aten.multinomial.default: _multinomial,
    aten.rand.default: _rand,
    aten.rand_like.default: _rand,
    aten.uniform_.default: _uniform,
    aten.randint.default: _randint,
    aten.randint.low: _randint_low,
    aten.randperm.default: _randperm,
    # Values that depend on the shape of the argument only.
    **dict.fromkeys((aten.zeros_like.default, aten.empty_like.default, aten.new_zeros.default), _zeros),
    **dict.fromkeys((aten.new_empty.default, aten.new_empty_strided.default), _zeros),
    aten.ones_like.default: _ones,
    aten.new_ones.default: _ones,
    aten.full_like.default: _full_like,
    aten.new_full.default: _new_full,
    # No number is nan or infinite.
    **dict.fromkeys((aten.isnan.default, aten.isinf.default, aten.isposinf.default, aten.isneginf.default), _zeros),
    aten.eq.Tensor: _equal,
    aten.eq.Scalar: _equal,
    aten.ne.Tensor: _unequal,
    aten.ne.Scalar: _unequal,
    # Decompositions succeed.
    **dict.fromkeys((aten.linalg_cholesky_ex.default, aten.linalg_inv_ex.default), _succeeded),
    **dict.fromkeys((aten.linalg_lu_factor_ex.default, aten.linalg_ldl_factor_ex.default), _succeeded),
    aten._linalg_solve_ex.default: _succeeded,
    aten._is_all_true.default: _ones,  # so torch.distributions asks whether its arguments are valid
}
"""By op: (what follows, output, *arguments) -> None."""


# --- what is answered where values are not known ----------------------------------------------------


def _nonzero(data: DataDependent, x: Tensor) -> Tensor:
    return data.everything(x)


def _masked_select(data: DataDependent, x: Tensor, mask: Tensor) -> Tensor:
    mask = mask.expand(tuple(elementwise.broadcast([x.shape, mask.shape]) or mask.shape))
    found = data.values.computed(aten.nonzero.default, (mask,), {}, (mask,))
    return x.new_empty(len(data.everything(mask) if found is NotImplemented else found))


def _unique(data: DataDependent, x: Tensor, *options: Any, dim: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    data.note("values that depend on data are assumed to be unique")
    inverse = x.new_empty(x.shape if dim is None else x.shape[dim], dtype=torch.int64)
    return x.new_empty(x.numel() if dim is None else x.shape), inverse, inverse.new_empty(inverse.numel())


def _unique_consecutive(
    data: DataDependent, x: Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return _unique(data, x, dim=dim)


def _bincount(data: DataDependent, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    found = data.values.computed(aten.bincount.default, (x, None, minlength), {}, (x,))
    if found is NotImplemented and not minlength:
        raise UnknownValueError("how many bins bincount has depends on the largest value: give it minlength")
    bins = minlength if found is NotImplemented else len(found)
    return x.new_empty(bins, dtype=torch.int64 if weights is None else weights.dtype)


def _repeat_interleave(data: DataDependent, repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    if output_size is None:
        raise UnknownValueError("how often elements repeat depends on data: give repeat_interleave its output_size")
    return repeats.new_empty(output_size)


def _number(data: DataDependent, x: Tensor) -> float:
    if not x.is_floating_point():
        if x.dtype == torch.bool and (passing := passing_value()) is not None:
            return passing
        what = "a branch" if x.dtype == torch.bool else "a Python number"
        raise UnknownValueError(f"{what} depends on data, of type {x.dtype}")
    data.note("floating-point numbers that are read from tensors (.item()) are assumed to be 1")
    return 1.0


def _compared(data: DataDependent, a: Tensor, b: Tensor, *args: Any, **options: Any) -> bool:
    if (passing := passing_value()) is not None:
        return passing
    if is_one(a, b):
        return True
    if not (data.is_building or a.is_floating_point() or a.is_complex()):  # masks and indices are often alike
        raise UnknownValueError("a branch depends on whether tensors are equal")
    data.note("tensors of floating-point numbers that are compared are assumed to differ")
    return False


def _grouped_mm(data: DataDependent, a: Tensor, b: Tensor, offsets: Tensor | None = None, *rest: Any) -> Tensor:
    """Products of groups of rows of `a` (rows, k) with `b` (groups, k, n), or of its columns with rows of `b`."""
    groups = () if a.dim() != b.dim() else (len(a) if offsets is None else len(offsets),)
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]))


def _ctc_loss(
    data: DataDependent, x: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    """Losses (batch,) of log-probabilities (frames, batch, classes), and what alignments have: 2 states a label."""
    known = data.values.read(lengths)
    if known is None:
        data.note("targets of ctc_loss are assumed to be as long as there is room, or all alike")
    wide = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // x.shape[1])
    with computing():
        longest = wide if known is None else int(known.max())
    return x.new_empty(x.shape[1]), x.new_empty(x.shape[1], x.shape[0], 2 * longest + 1)


def _packed(data: DataDependent, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    data.note("sequences that are packed are assumed to be as long as they were padded to")
    return pack(x, batch_first)


_UNKNOWN: dict[OpOverload, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_mm,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.Tensor: lambda data, gradient, x, *rest: x.new_empty(x.shape),
    aten._pack_padded_sequence.default: _packed,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten._unique2.default: _unique,
    aten.unique_dim.default: lambda data, x, dim, *options: _unique(data, x, dim=dim),
    aten.unique_consecutive.default: _unique_consecutive,
    aten.unique_dim_consecutive.default: lambda data, x, dim, *options: _unique(data, x, dim=dim),
    aten.bincount.default: _bincount,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten._local_scalar_dense.default: _number,
    aten.equal.default: lambda data, a, b: a.shape == b.shape and _compared(data, a, b),
    aten.allclose.default: _compared,
}
"""By op: (what answers, *arguments) -> output; raises UnknownValueError."""
