"""What one exact run tells about where a codec's errors would weigh: of each token in each region's units.

A region's gradients change by the error of each token times what the loss sends that token, so that a score has to see
both at the same token. Before backward that is the gradient by the last region's output; when a replay
begins it is the gradient by that very region's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hilore.planner.calibration_plans import offering
from hilore.planner.gradient_error import at_responses, hidden_of
from hilore.planner.microbatch import Microbatch
from hilore.planner.trace import Trace
from hilore.runtime.codecs import get_codec
from hilore.runtime.naming import canonical_modules

REPLAY = "replay"

# Name of the weights, region, unit -> sum over tokens of (weight of the token)^2 (norm of its error)^2.
Coupled = dict[str, dict[str, dict[str, float]]]


@contextmanager
def watched_units(model: nn.Module, trace: Trace, codec: str) -> Iterator[UnitWatch]:
    """In a forward and backward inside, every unit that offers the codec is put through it and compared, and the
    gradient that comes to each region is looked at."""
    watch = UnitWatch(trace, codec)
    modules = canonical_modules(model)
    handles = [
        modules[region.name].register_forward_hook(watch.region(region.name)) for region in trace.buckets[-1].regions
    ]
    try:
        for region, unit, feeds in watch.units():
            # Attention is no module: what it gives is what the output projection gets.
            named = modules.get(f"{region}.{unit}")
            if named is not None:
                handles.append(named.register_forward_hook(watch.output_of(region, unit)))
            elif feeds and f"{region}.{feeds[0]}" in modules:
                hook = watch.input_of(region, unit)
                handles.append(modules[f"{region}.{feeds[0]}"].register_forward_pre_hook(hook))
        yield watch
    finally:
        for handle in handles:
            handle.remove()


class UnitWatch:
    def __init__(self, trace: Trace, codec: str) -> None:
        self._bucket = trace.buckets[-1]
        self._name = codec
        self._codec = get_codec(codec)
        self._relative = {region.name: 0.0 for region in self._bucket.regions}
        self._errors: dict[tuple[str, str], Tensor] = {}
        self._pulls: dict[str, Tensor] = {}

    def units(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """Region, unit and what the unit feeds, of every unit that offers the codec."""
        for region in self._bucket.regions:
            for unit in offering(self._bucket.classes[region.class_index]):
                if self._name in {cost.codec for cost in unit.codecs}:
                    yield region.name, unit.name, unit.feeds

    def output_of(self, region: str, unit: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _module, _args, output: self._add(region, unit, output)

    def input_of(self, region: str, unit: str) -> Callable[[nn.Module, Any], None]:
        return lambda _module, args: self._add(region, unit, args[0])

    def region(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def pulled(gradient: Tensor) -> None:
            self._pulls[name] = gradient.detach().double().square().sum(-1)

        def watch(_module: nn.Module, _args: Any, output: Any) -> None:
            hidden = hidden_of(output)
            if hidden.requires_grad:
                hidden.register_hook(pulled)  # type: ignore[no-untyped-call]

        return watch

    def per_region(self) -> list[float]:
        """Relative error of each region's units, root of the sum of squares."""
        return [math.sqrt(square) for square in self._relative.values()]

    def coupled(self, batch: Microbatch, pulls: Mapping[str, Tensor]) -> Coupled:
        """``pulls``: weights of the response's tokens by name, [B, Tr]. ``replay`` are those of each region's own."""
        found: Coupled = {name: {} for name in (*pulls, REPLAY)}
        shape = batch.input_ids.shape
        for (region, unit), errors in self._errors.items():
            # As many values a token as the unit's tensor has heads.
            squares = errors.reshape(*shape, -1).sum(-1)
            at_loss = at_responses(squares, batch)
            for name, pull in pulls.items():
                total = float((pull.double().square() * at_loss).sum())
                found[name].setdefault(region, {})[unit] = total
            own = self._pulls.get(region)
            total = 0.0 if own is None else float((own.reshape(shape) * squares).sum())
            found[REPLAY].setdefault(region, {})[unit] = total
        return found

    def _add(self, region: str, unit: str, values: Tensor) -> None:
        with torch.no_grad():
            exact = values.detach()
            whole = float(exact.double().square().sum())
            decoded = self._codec.decode(self._codec.encode(exact)) if whole else exact
            squares = (decoded - exact).double().square().sum(-1)
            self._errors[region, unit] = squares
            if whole:
                self._relative[region] += float(squares.sum()) / whole
