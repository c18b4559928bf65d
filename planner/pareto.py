"""Which configurations of a region no other one beats, so that an optimum over them is an optimum over all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hilore.planner.problem import Configuration

PARETO_BLOCK = 256
WORD_BITS = 62


def needed_backward_bytes(configuration: Configuration) -> int:
    """Room that the backward of a region needs, demoted or not: a plan must fit either way."""
    return max(configuration.backward_bytes, configuration.demoted_backward_bytes)


def nowhere_worse(configuration: Configuration, other: Configuration) -> bool:
    """Whether a configuration needs no more memory at any event and no more time than another."""
    return (
        configuration.retained_bytes <= other.retained_bytes
        and configuration.forward_bytes <= other.forward_bytes
        and needed_backward_bytes(configuration) <= needed_backward_bytes(other)
        and configuration.extra_ns <= other.extra_ns
    )


def pareto(
    candidates: tuple[Configuration, ...], risk: tuple[int, ...] | None = None, *, contexts: bool = False
) -> tuple[Configuration, ...]:
    """``candidates`` without those that another one beats; the first is always kept. See `pareto_indices`."""
    return tuple(candidates[index] for index in pareto_indices(candidates, risk, contexts=contexts))


def pareto_indices(
    candidates: tuple[Configuration, ...], risk: tuple[int, ...] | None = None, *, contexts: bool = False
) -> tuple[int, ...]:
    """Indices, ascending, of the candidates that no other one beats; index 0 (all-R) is always among them.

    One beats another if it is no worse in retained, forward and needed backward bytes and in time, and if its risk is
    no larger (``risk`` given) or its L units with their codecs, with ``contexts`` also with their tainted units, are
    among the other's (``risk`` None: then its risk is no larger in any region). Of equals the one with fewer L units
    stays, then the first.
    """
    columns = [
        [c.extra_ns for c in candidates],
        [c.retained_bytes for c in candidates],
        [needed_backward_bytes(c) for c in candidates],
        [c.forward_bytes for c in candidates],
    ]
    if risk is not None:
        columns.append(list(risk))
    table: NDArray[np.int64] = np.array(columns, dtype=np.int64)
    masks = _lossy_masks(candidates, contexts) if risk is None else np.zeros((1, len(candidates)), dtype=np.int64)
    order = sorted(range(len(candidates)), key=lambda i: (*table[:, i].tolist(), candidates[i].lossy_units, i))
    table, masks = table[:, order], masks[:, order]
    kept = front(np.arange(len(order)), lambda those, by: _beaten(table, masks, by, those))
    return tuple(sorted({0, *(order[at] for at in kept)}))


def front(
    order: NDArray[np.int64], beaten: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]
) -> NDArray[np.int64]:
    """The items of ``order`` that no other one beats, where none is beaten by a later one only.

    ``beaten(those, by)``: shape [those, by], whether each of ``those`` is beaten by each of ``by``; an item "beats"
    itself.
    """
    kept = np.zeros(0, dtype=np.int64)
    for start in range(0, len(order), PARETO_BLOCK):
        block = order[start : start + PARETO_BLOCK]
        block = block[~beaten(block, kept).any(axis=1)]
        within = np.tril(beaten(block, block), k=-1)
        kept = np.concatenate((kept, block[~within.any(axis=1)]))
    return kept


def _beaten(
    table: NDArray[np.int64], masks: NDArray[np.int64], by: NDArray[np.int64], those: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Shape [those, by]: whether each of ``those`` is nowhere better than each of ``by``."""
    result: NDArray[np.bool_] = np.ones((len(those), len(by)), dtype=np.bool_)
    for word in masks:
        result &= (word[by][None, :] & ~word[those][:, None]) == 0
    for column in table:
        result &= column[by][None, :] <= column[those][:, None]
    return result


def _lossy_masks(candidates: tuple[Configuration, ...], contexts: bool) -> NDArray[np.int64]:
    """One bit per pair of unit and codec (with ``contexts``: per triple with its tainted units) that is at L.

    Shape [words, candidates].
    """
    lossy = [
        frozenset((u.name, u.codec, u.tainted if contexts else ()) for u in c.units if u.mode == "L")
        for c in candidates
    ]
    place = {item: position for position, item in enumerate(sorted(set().union(*lossy), key=str))}
    masks = np.zeros((len(place) // WORD_BITS + 1, len(candidates)), dtype=np.int64)
    for column, items in enumerate(lossy):
        for item in items:
            word, bit = divmod(place[item], WORD_BITS)
            masks[word, column] |= 1 << bit
    return masks
