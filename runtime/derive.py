"""Tensors that a kept call's autograd saved and that are cheap to derive again: casts, copies, expanded heads, masks.

Each derivation is tried on the values themselves the first time (bitwise), then trusted for that unit and place. A
trial is part of no plan's peak, so it goes through both tensors block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch._subclasses import FakeTensor

from hilore.runtime.provenance import Provenance

# A trial derives so many elements at once, or this share of them where it is more.
_BLOCK_ELEMENTS, _BLOCK_SHARE = 1 << 12, 1 / 64

Rule = Callable[[torch.Tensor, torch.Size, torch.dtype], torch.Tensor | None]


def _cast(source: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
    """A cast and/or a contiguous copy, with leading dimensions merged as a matrix product does.

    Under autocast of an fp32 input, before a kernel that wants it dense. Any other shape of the same size is no cast:
    a log-sum-exp can have as many elements as k.
    """
    if not source.is_floating_point() or not dtype.is_floating_point or source.dim() == 0:
        return None
    merged = (source.shape[:-1].numel(), source.shape[-1])
    if tuple(shape) not in (tuple(source.shape), merged):
        return None
    return source.to(dtype).reshape(shape)


def _cast_transposed(source: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
    """A cast weight, saved as its transpose by the matrix product."""
    if source.dim() != 2 or source.t().shape != shape or not dtype.is_floating_point:
        return None
    return source.to(dtype).t()


def _repeat_heads(source: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
    """[batch, kv heads, tokens, head dim] with every head repeated, as grouped-query attention expands k and v."""
    if source.dim() != 4 or len(shape) != 4 or source.shape[1] == 0 or shape[1] <= source.shape[1]:
        return None
    if shape[1] % source.shape[1] or (shape[0], *shape[2:]) != (source.shape[0], *source.shape[2:]):
        return None
    repeats = shape[1] // source.shape[1]
    batch, heads, tokens, width = source.shape
    expanded = source[:, :, None].expand(batch, heads, repeats, tokens, width)
    return expanded.reshape(shape).to(dtype)


def _additive_mask(source: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
    """The additive form of a boolean attention mask (True = attend), as scaled_dot_product_attention makes it."""
    if source.dtype != torch.bool or source.shape != shape or not dtype.is_floating_point:
        return None
    zeros = torch.zeros(shape, dtype=dtype, device=source.device)
    return zeros.masked_fill_(source.logical_not(), float("-inf"))


RULES: dict[str, Rule] = {
    "cast": _cast,
    "cast_transposed": _cast_transposed,
    "repeat_heads": _repeat_heads,
    "additive_mask": _additive_mask,
}

# Views of the source and of what a rule makes of it in which each element stands where its origin stands.
PAIRS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "cast": lambda source, value: (source, value.view(source.shape)),
    "cast_transposed": lambda source, value: (source, value.t()),
    "repeat_heads": lambda source, value: (
        source[:, :, None].expand(-1, -1, value.shape[1] // source.shape[1], -1, -1),
        value.view(*source.shape[:2], -1, *source.shape[2:]),
    ),
    "additive_mask": lambda source, value: (source, value),
}


@dataclass(frozen=True, slots=True)
class Derivation:
    """``rule`` applied to argument or parameter number ``source`` gives the saved tensor of type ``dtype``."""

    rule: str
    source: int
    from_parameter: bool
    dtype: torch.dtype

    def apply(self, source: torch.Tensor, shape: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad(), torch.autocast(source.device.type, enabled=False):
            derived = RULES[self.rule](source, shape, self.dtype)
            assert derived is not None
            if derived.stride() != stride:
                laid_out = torch.empty_strided(shape, stride, dtype=derived.dtype, device=derived.device)
                derived = laid_out.copy_(derived)
            return derived

    def fits(self, value: torch.Tensor, arguments: list[torch.Tensor], parameters: list[torch.Tensor]) -> bool:
        """Whether the rule still applies to these shapes (metadata only)."""
        sources = parameters if self.from_parameter else arguments
        return self.source < len(sources) and _applies(self, sources[self.source], value)


def derivation_of(
    value: torch.Tensor,
    arguments: list[torch.Tensor],
    parameters: list[torch.Tensor],
    provenance: Provenance | None = None,
) -> tuple[Derivation | None, bool]:
    """The derivation that gives exactly ``value``, or None; and whether that holds for later calls too.

    It does not where two sources give the same values by chance (k and v of a layer whose weights are still zero).
    Fake tensors have no values: there ``provenance``, whose sources are parameters and then arguments, says from which
    of them ``value`` comes, and the first of these that fits counts.
    """
    found: Derivation | None = None
    for place, (from_parameter, index, source) in enumerate(_sources(arguments, parameters)):
        if provenance is not None and not provenance.allows(value, place):
            continue
        candidates = (Derivation(rule, index, from_parameter, value.dtype) for rule in RULES)
        fitting = (candidate for candidate in candidates if _reproduces(candidate, source, value))
        candidate = next(fitting, None)
        if candidate is None:
            continue
        if isinstance(value, FakeTensor):
            # A square weight's cast and its transpose differ in how they lie alone.
            return next((each for each in (candidate, *fitting) if _lie_alike(each, source, value)), candidate), True
        if found is not None:
            return found, False
        found = candidate
    return found, True


def _sources(arguments: list[torch.Tensor], parameters: list[torch.Tensor]) -> Iterator[tuple[bool, int, torch.Tensor]]:
    """Each source: whether it is a parameter, its place among its kind, itself."""
    for from_parameter, sources in ((True, parameters), (False, arguments)):
        for index, source in enumerate(sources):
            yield from_parameter, index, source


def _reproduces(candidate: Derivation, source: torch.Tensor, value: torch.Tensor) -> bool:
    if not _applies(candidate, source, value):
        return False
    if isinstance(value, FakeTensor):
        return True
    by_element = RULES["additive_mask" if candidate.rule == "additive_mask" else "cast"]
    with torch.no_grad(), torch.autocast(value.device.type, enabled=False):
        for origin, found in _blocks(*PAIRS[candidate.rule](source.detach(), value)):
            derived = by_element(origin, origin.shape, candidate.dtype)
            if derived is None or not same_bits(derived, found):
                return False
    return True


def _applies(candidate: Derivation, source: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the rule makes a tensor of this shape and type (metadata only)."""
    return _makes(candidate.rule, source.shape, source.stride(), source.dtype, value.shape, candidate.dtype)


@lru_cache(maxsize=4096)
def _makes(
    rule: str,
    shape: torch.Size,
    stride: tuple[int, ...],
    source_dtype: torch.dtype,
    wanted: torch.Size,
    dtype: torch.dtype,
) -> bool:
    source = torch.empty_strided(shape, stride, dtype=source_dtype, device="meta")
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return RULES[rule](source, wanted, dtype) is not None


def _blocks(source: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both tensors, of one shape, cut alike along their longest dimension."""
    if source.dim() == 0:
        yield source, value
        return
    length, dim = max((size, dim) for dim, size in enumerate(source.shape))
    elements = max(_BLOCK_ELEMENTS, int(_BLOCK_SHARE * source.numel()))
    step = max(1, elements * length // max(source.numel(), 1))
    for start in range(0, length, step):
        size = min(step, length - start)
        yield source.narrow(dim, start, size), value.narrow(dim, start, size)


def _lie_alike(candidate: Derivation, source: torch.Tensor, value: torch.Tensor) -> bool:
    origin, found = PAIRS[candidate.rule](source.detach(), value)
    return origin.stride() == found.stride()


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bitwise equality; NaN equals the same NaN."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    as_integers = kinds[left.element_size()]
    return torch.equal(left.view(as_integers), right.view(as_integers))
