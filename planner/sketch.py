"""Gradients as small sketches whose inner products are those of the gradients, and sums of them composed later.

The gradient of an update is a weighted sum of microbatch gradients, so that once the inner products are known every
update's norm is a quadratic form: no backward is run twice, and no gradient is kept. A sketch folds each parameter,
element by element times a random sign, into ``width`` sums per group of parameters (a region, or all that lies
outside; the tug-of-war sketch of Alon, Matias and Szegedy 1996, with buckets). Inner products of different gradients
are then right up to ``sqrt(2 / width)`` of the product of their norms, without bias; norms are kept exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hilore.runtime.naming import canonical_names

Floats = NDArray[np.float64]
WIDTH = 512
OUTSIDE = ""  # the group of parameters that lie in no region


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """``squares``: float64 [groups], squared norms; ``sums``: float32 [groups, width]."""

    squares: Floats
    sums: NDArray[np.float32]

    @property
    def square(self) -> float:
        return float(self.squares.sum())


class Sketcher:
    """Sketches the trainable gradients of one model; groups are the given regions, and what lies outside of them."""

    def __init__(self, model: nn.Module, regions: Sequence[str], *, width: int = WIDTH, seed: int = 0) -> None:
        self.groups = (*regions, OUTSIDE)
        self.width = width
        self._seed = seed
        place = {name: index for index, name in enumerate(self.groups)}
        canonical = canonical_names(model)
        holders = [name.rpartition(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._group_of = [place[_region_of(canonical[holder], regions)] for holder in holders]

    def nothing(self) -> Sketch:
        """Of a gradient that is 0."""
        groups = len(self.groups)
        return Sketch(np.zeros(groups), np.zeros((groups, self.width), dtype=np.float32))

    def sketch(self, gradients: Sequence[Tensor]) -> Sketch:
        """Of all trainable parameters' gradients (or differences of such), in model order."""
        device = gradients[0].device
        squares = torch.zeros(len(self.groups), dtype=torch.float64, device=device)
        sums = torch.zeros(len(self.groups), self.width, dtype=torch.float32, device=device)
        draw = torch.Generator(device=device).manual_seed(self._seed)
        for group, gradient in zip(self._group_of, gradients, strict=True):
            flat = gradient.detach().flatten().float()
            squares[group] += flat.double().square().sum()
            signs = torch.randint(0, 2, flat.shape, generator=draw, device=device, dtype=torch.int8)
            signed = torch.where(signs == 1, flat, -flat)
            signed = torch.nn.functional.pad(signed, (0, -len(flat) % self.width))
            sums[group] += signed.view(-1, self.width).sum(0)
        return Sketch(squares.cpu().numpy(), sums.cpu().numpy())


def gram(sketches: Sequence[Sketch]) -> Floats:
    """Inner products of all pairs per group, [groups, n, n]; the diagonal is exact."""
    sums = np.stack([sketch.sums for sketch in sketches], axis=1).astype(np.float64)
    products: Floats = sums @ sums.transpose(0, 2, 1)
    index = np.arange(len(sketches))
    products[:, index, index] = np.stack([sketch.squares for sketch in sketches], axis=1)
    return products


def squares_of_sums(products: Floats, picks: NDArray[np.int64], weights: Floats) -> Floats:
    """Squared norms per group of weighted sums, [updates, groups].

    ``products``: [groups, n, n] as from ``gram``; ``picks``: [updates, members], places in 0 .. n - 1; ``weights``:
    the same shape.
    """
    inner = products[:, picks[:, :, None], picks[:, None, :]]
    squares = np.einsum("gumn,um,un->ug", inner, weights, weights)
    # What sketches leave uncertain may pass below 0 where members cancel out.
    result: Floats = np.maximum(squares, 0.0)
    return result


def _region_of(module: str, regions: Sequence[str]) -> str:
    return next((region for region in regions if f"{module}.".startswith(region + ".")), OUTSIDE)
