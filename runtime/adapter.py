"""A linear with its adapter as one unit: the frozen GEMM, PEFT's LoRA beside it, and their sum.

Kept is the sum, which takes no more bytes than the frozen output alone; a replay then runs nothing of either. What
the adapter's own autograd saved is small or at hand: the layer's argument, and lora_A's output (tokens x rank), which
stays with a kept unit. The **front** of a unit is what a replay runs of it all the same: lora_A where the unit is dead
and nothing of it may stay, dropout, whose mask is as large as the argument and is drawn again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hilore.runtime.derive import Derivation, derivation_of
from hilore.runtime.errors import ReplayMismatchError
from hilore.runtime.naming import canonical_names
from hilore.runtime.provenance import Provenance
from hilore.runtime.saved import Layout, Role

if TYPE_CHECKING:
    from collections.abc import Callable

Known = dict[tuple[Any, ...], Derivation | None]

GRAIN_FIELD = "unit_grain"
ADAPTED = "adapted"
_FRONT = ("lora_dropout", "lora_A")
_LAST = ("lora_B",)


def is_adapted_linear(module: nn.Module) -> bool:
    """Whether ``module`` is PEFT's plain LoRA around an nn.Linear; DoRA and other variants save far more of their own.

    Seen are the class and the variants, not what an adapter's weights are: PEFT is no dependency.
    """
    plain = any(cls.__module__ == "peft.tuners.lora.layer" and cls.__name__ == "Linear" for cls in type(module).__mro__)
    base = module._modules.get("base_layer")
    return plain and isinstance(base, nn.Linear) and not getattr(module, "lora_variant", None)


def front_modules(module: nn.Module) -> tuple[nn.Module, ...]:
    """The modules of a unit's front; none for a plain linear."""
    return _children(module, _FRONT) if is_adapted_linear(module) else ()


def part_modules(layer: nn.Module) -> tuple[nn.Module, ...]:
    """All modules of a LoRA layer's adapters: the front and lora_B."""
    return _children(layer, (*_FRONT, *_LAST))


def parts_of(layer: nn.Module, adapter: str) -> list[nn.Module]:
    """Of one adapter what runs one after the other: dropout, where it has one, lora_A and lora_B. None without it."""
    parts = []
    for name in (*_FRONT, *_LAST):
        part = layer._modules[name]._modules.get(adapter)  # type: ignore[union-attr]
        if part is None:
            return []
        if not isinstance(part, nn.Identity):
            parts.append(part)
    return parts


def _children(module: nn.Module, names: tuple[str, ...]) -> tuple[nn.Module, ...]:
    containers = [module._modules[name] for name in names if name in module._modules]
    found = [part for container in containers if container is not None for part in container.children()]
    return tuple(part for part in found if not isinstance(part, nn.Identity))


def unit_modules(model: nn.Module, grain: str) -> dict[str, nn.Module]:
    """Every canonical name and the module that a unit of that name runs.

    ``grain`` "adapted": of a LoRA layer the whole of it; anything else: the frozen linear inside, as plans made before
    there were adapted units have it.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, nn.Module] = {}
    for full, name in canonical_names(model).items():
        if grain != ADAPTED or name not in found or not is_adapted_linear(found[name]):
            found[name] = modules[full]
    return found


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a front module. ``source``: the place of the unit's argument that it got, cast to ``dtype``, or -1
    for the result of the step before. Its autograd saved the roles from ``first`` on, up to ``last``."""

    module: nn.Module
    source: int
    dtype: torch.dtype
    first: int
    last: int
    result: Layout

    @property
    def draws(self) -> bool:
        return not isinstance(self.module, nn.Linear)


class Front:
    """The front of one unit's call: recorded in forward, run again in a replay that leaves the unit out.

    ``kept``: whether the unit's output stays; lora_A's then stays too. ``complete`` False: a front module got something
    else than the unit's argument or the step before it gives, so that it cannot be run on its own.
    """

    __slots__ = ("_known", "_results", "_sources", "complete", "kept", "steps")

    def __init__(self, kept: bool, known: Known) -> None:
        self.kept = kept
        self.complete = True
        self.steps: list[Step] = []
        self._known = known
        self._sources: list[torch.Tensor] = []
        self._results: list[torch.Tensor] = []

    def starts(self, arguments: list[torch.Tensor]) -> None:
        """Forward: the unit is about to be called with these."""
        self._sources = arguments

    def run(self, module: nn.Module, call: Callable[..., Any], x: torch.Tensor, roles: list[Role]) -> torch.Tensor:
        """Forward: run one front module and note where its input comes from and what its autograd saved."""
        first = len(roles)
        result: torch.Tensor = call(x)
        source = self._source_of(x)
        in_place = result.untyped_storage()._cdata == x.untyped_storage()._cdata
        self.complete &= source is not None and not in_place
        if source is not None:
            self.steps.append(Step(module, source, x.dtype, first, len(roles), Layout.of(result)))
            self._results.append(result)
        return result

    def role_of(self, index: int, value: torch.Tensor, provenance: Provenance | None) -> tuple[int, int] | None:
        """(step, place) where a replay makes the unit's saved tensor number ``index`` again; None where it stays.

        place -1 is the step's result, in the saved tensor's dtype; others count what the step's autograd saved.
        ``provenance``: of fake tensors, which have no values to compare.
        """
        if not self.complete:
            return None
        storage = value.untyped_storage()._cdata
        for number, (step, result) in enumerate(zip(self.steps, self._results, strict=True)):
            if step.draws and step.first <= index < step.last:
                return number, index - step.first
            stays = self.kept and not step.draws
            if not stays and result.untyped_storage()._cdata == storage and result.dtype == value.dtype:
                return number, -1
        numbers = range(1, len(self.steps))
        return next(((n - 1, -1) for n in numbers if self._casts(n, index, value, provenance)), None)

    def _casts(self, number: int, index: int, value: torch.Tensor, provenance: Provenance | None) -> bool:
        """Whether saved tensor ``index`` is what step ``number`` made of its input by a cast, as autocast does, where
        only a replay has that input again: it holds random numbers."""
        step, before = self.steps[number], self.steps[number - 1]
        if not step.first <= index < step.last or step.source >= 0 or not before.draws:
            return False
        key = ("front cast", number, index - step.first, value.dtype, value.dim(), before.result.dtype)
        if key not in self._known:
            drawn = provenance is None or provenance.drawn(value)
            found = derivation_of(value, [self._results[number - 1]], [])[0] if drawn else None
            self._known[key] = found if found is not None and found.rule == "cast" else None
        return self._known[key] is not None

    def settled(self) -> None:
        """Forward: the unit has returned; let go of its tensors."""
        self._sources, self._results = [], []

    def rerun(self, wanted: set[int], arguments: list[torch.Tensor]) -> dict[tuple[int, int], torch.Tensor]:
        """Run the steps that ``wanted`` ones need, in the order of the forward; what they give by (step, place).

        Steps that draw random numbers run whenever a later one does, so that the generator is where it was.
        """
        if not wanted:
            return {}
        runs = wanted | {n for n, step in enumerate(self.steps[: max(wanted)]) if step.draws}
        for number in sorted(runs, reverse=True):
            if self.steps[number].source < 0:
                runs.add(number - 1)
        found: dict[tuple[int, int], torch.Tensor] = {}
        result = torch.empty(0)
        for number in sorted(runs):
            step = self.steps[number]
            x = result if step.source < 0 else arguments[step.source].to(step.dtype)
            saved: list[torch.Tensor] = []
            with saved_tensors_hooks(_collecting(saved), _never):
                result = step.module(x)
            found[number, -1] = result.detach()
            found |= {(number, place): tensor for place, tensor in enumerate(saved)}
        return found

    def _source_of(self, x: torch.Tensor) -> int | None:
        if self._results and x is self._results[-1]:
            return -1
        for place, source in enumerate(self._sources):
            if x is source:
                return place
        # Each adapter casts the layer's input to the dtype of its own weights.
        key = ("front", len(self.steps), x.dtype, tuple(source.dtype for source in self._sources))
        if key not in self._known:
            self._known[key] = derivation_of(x, self._sources, [])[0]
        derivation = self._known[key]
        return derivation.source if derivation is not None and derivation.rule == "cast" else None


def _collecting(saved: list[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    def pack(tensor: torch.Tensor) -> None:
        saved.append(tensor.detach())

    return pack


def _never(_packed: object) -> torch.Tensor:
    raise ReplayMismatchError("a backward ran through a replay; replays only make tensors")
