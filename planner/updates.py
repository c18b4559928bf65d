"""Updates composed of measured microbatches: their relative error, the whole and the worst region, and its bound.

An update's gradient is a weighted sum of microbatch gradients, and so is its error. From the inner products of
measured gradients and errors (planner/sketch.py) any number of updates follows without another backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hilore.planner.conformal import Integers
from hilore.planner.sketch import Floats, Sketch, gram, squares_of_sums

# Losses whose normaliser counts the tokens of the whole update: a microbatch measured alone was divided by its own.
PER_UPDATE_KINDS = ("dapo", "cispo", "vespo")


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredMicrobatch:
    """``gradient``: exact; ``errors``: by plan, what its gradient differs by. ``tokens``: completion tokens."""

    psi: float
    tokens: int
    gradient: Sketch
    errors: tuple[Sketch, ...]

    def squared_error(self, plan: int) -> float:
        """Relative, of this microbatch alone; 0 where it has no gradient."""
        return self.errors[plan].square / self.gradient.square if self.gradient.square else 0.0


class Composer:
    """Composes updates of measured microbatches, all of which ran under the same plans, in one order."""

    def __init__(self, measured: Sequence[MeasuredMicrobatch], loss_kind: str) -> None:
        self.microbatches = len(measured)
        self.plans = len(measured[0].errors)
        self._tokens = np.array([found.tokens for found in measured], dtype=np.float64)
        self._per_update = loss_kind in PER_UPDATE_KINDS
        self.squares = np.array([found.gradient.square for found in measured])
        self._gradients = gram([found.gradient for found in measured])
        self._errors = gram([error for found in measured for error in found.errors])

    def weights(self, picks: Integers) -> Floats:
        """By what each microbatch's gradient, as measured alone, enters its update's sum; [updates, members]."""
        if not self._per_update:
            return np.ones(picks.shape)
        tokens = self._tokens[picks]
        weights: Floats = tokens * picks.shape[1] / tokens.sum(axis=1, keepdims=True)
        return weights

    def shares(self, picks: Integers) -> Floats:
        """``w^2 |g_b|^2 / sum w^2 |g|^2`` of every member; 0 where the update has no gradient. [updates, members]."""
        squares = self.weights(picks) ** 2 * self.squares[picks]
        total = squares.sum(axis=1, keepdims=True)
        shares: Floats = np.divide(squares, total, out=np.zeros_like(squares), where=total > 0)
        return shares

    def squared_errors(self, picks: Integers, plans: Integers) -> Floats:
        """Relative squared error of every update over all parameters; ``plans``: the plan of each member, as picks."""
        errors, gradients = self._sums(picks, plans)
        return _ratio(errors.sum(axis=1), gradients.sum(axis=1))

    def worst_region_errors(self, picks: Integers, plans: Integers) -> Floats:
        """Relative squared error of the parameters of that region where it is largest, of every update."""
        errors, gradients = self._sums(picks, plans)
        worst: Floats = _ratio(errors, gradients).max(axis=1)
        return worst

    def _sums(self, picks: Integers, plans: Integers) -> tuple[Floats, Floats]:
        weights = self.weights(picks)
        errors = squares_of_sums(self._errors, picks * self.plans + plans, weights)
        return errors, squares_of_sums(self._gradients, picks, weights)


def _ratio(errors: Floats, gradients: Floats) -> Floats:
    """0 where there is no gradient: no error passes there either, since both are linear in the same coefficients."""
    result: Floats = np.divide(errors, gradients, out=np.zeros_like(errors), where=gradients > 0)
    return result
