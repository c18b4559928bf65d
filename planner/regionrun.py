"""Run one region of an actor alone, with the arguments it gets inside the model: what profiling measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hilore.runtime.errors import UnsupportedModelError
from hilore.runtime.frame import Frame
from hilore.runtime.heldframe import HeldFrame
from hilore.runtime.huggingface import unwrap_attention, wrap_attention
from hilore.runtime.region import ATTENTION, Action, Choice, RegionActions, RegionBinding
from hilore.runtime.stats import Stats
from hilore.runtime.unitbinding import UnitBinding


@dataclass(frozen=True, slots=True)
class RegionInputs:
    """A region's arguments without history. ``boundary`` [B, T, d] is the first; the rest is shared by all regions."""

    boundary: torch.Tensor
    requires_grad: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def fresh_boundary(self) -> torch.Tensor:
        """A new non-leaf tensor like the boundary, as a region gets it."""
        fresh = self.boundary.clone()
        return fresh.requires_grad_() if self.requires_grad else fresh


class _Recorded(BaseException):
    """Ends a forward whose regions' arguments are all recorded."""


def region_inputs(
    forward: Callable[[], object], modules: dict[str, nn.Module], wanted: Iterable[str]
) -> dict[str, RegionInputs]:
    """Run ``forward`` until the arguments of the wanted regions (by name) are recorded; it need not come further."""
    names = tuple(wanted)
    found: dict[str, RegionInputs] = {}
    handles = []
    for name in names:

        def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            if not args:
                raise UnsupportedModelError(
                    f"{name}: gets its hidden states by keyword, and a region takes them as its first positional "
                    "argument; set region_grain: layer",
                    unit=name,
                )
            boundary, *rest = args
            found[name] = RegionInputs(
                boundary.detach(), boundary.requires_grad, tuple(map(_detached, rest)), tree_map(_detached, kwargs)
            )
            if len(found) == len(names):
                raise _Recorded

        handles.append(modules[name].register_forward_pre_hook(record, with_kwargs=True))
    try:
        forward()
    except _Recorded:
        pass
    finally:
        for handle in handles:
            handle.remove()
    missing = [name for name in names if name not in found]
    if missing:
        raise UnsupportedModelError(
            f"{missing[0]}: did not run in the forward, so it cannot be a region", unit=missing[0]
        )
    return found


def _detached(item: Any) -> Any:
    return item.detach() if isinstance(item, torch.Tensor) else item


@dataclass(frozen=True, slots=True)
class Split:
    """A replay in two stages: the unit it is split at, and the units that the late stage leaves out (relative)."""

    at: str
    dead_late: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RegionRunner:
    """One region that can be run held, under plain checkpointing, or with any set of kept units.

    ``units`` maps the name relative to the region to the unit.
    """

    binding: RegionBinding
    inputs: RegionInputs
    units: dict[str, UnitBinding]

    @classmethod
    def of(
        cls, name: str, module: nn.Module, inputs: RegionInputs, units: dict[str, tuple[str, nn.Module]]
    ) -> RegionRunner:
        """``units``: relative name -> (kind, module)."""
        bound = {
            relative: UnitBinding.of(f"{name}.{relative}", ATTENTION if kind == ATTENTION else "module", unit_module)
            for relative, (kind, unit_module) in units.items()
        }
        binding = RegionBinding(name, module, {unit.name: unit for unit in bound.values()})
        return cls(binding, inputs, bound)

    def call(self, boundary: torch.Tensor) -> torch.Tensor:
        """The region's forward as it is."""
        return _first_tensor(self.binding.module(boundary, *self.inputs.args, **self.inputs.kwargs))

    def held(self, boundary: torch.Tensor) -> torch.Tensor:
        """The region's forward where a plan holds it."""
        output: torch.Tensor = HeldFrame(self.binding).run(self.call, (boundary,), {})
        return output

    def frame(
        self,
        kept: Iterable[str],
        dead: Iterable[str],
        boundary: torch.Tensor,
        split: Split | None = None,
        kind: Callable[..., Frame] = Frame,
    ) -> Frame:
        """A frame of this region that keeps ``kept`` exactly and leaves out ``dead`` (relative names)."""
        choice = choice_for(self.binding.name, self.units, frozenset(kept), frozenset(dead), split)
        forward = self.binding.module.forward
        return kind(self.binding, choice, forward, (boundary, *self.inputs.args), self.inputs.kwargs)

    def with_frame(
        self,
        kept: Iterable[str],
        dead: Iterable[str],
        boundary: torch.Tensor,
        split: Split | None = None,
        stats: Stats | None = None,
    ) -> torch.Tensor:
        """The region's forward under such a frame; ``stats`` counts what it and its replays do."""
        frame = self.frame(kept, dead, boundary, split)
        if stats is not None:
            frame.choice.stats = stats
        return _first_tensor(frame.run())

    def checkpointed(self, boundary: torch.Tensor) -> torch.Tensor:
        """The region as Hugging Face's gradient checkpointing runs it."""
        from torch.utils.checkpoint import checkpoint

        module, inputs = self.binding.module, self.inputs

        def forward(hidden: torch.Tensor) -> Any:
            return module(hidden, *inputs.args, **inputs.kwargs)

        return _first_tensor(checkpoint(forward, boundary, use_reentrant=False))

    def without_units(self) -> RegionRunner:
        """The same as gradient checkpointing sees it: nothing inside is known."""
        return replace(self, binding=RegionBinding(self.binding.name, self.binding.module, {}), units={})


def choice_for(
    region: str,
    units: dict[str, UnitBinding],
    kept: frozenset[str],
    dead: frozenset[str],
    split: Split | None = None,
) -> Choice:
    """A choice of one region with these units kept exactly and these dead."""
    dead_late = split.dead_late if split is not None else ()
    actions = {
        unit.name: Action(relative in kept, None, relative in dead and relative not in kept, relative in dead_late)
        for relative, unit in units.items()
    }
    recordable = frozenset(n for n, action in actions.items() if action.kept or action.dead or action.dead_late)
    split_at = units[split.at].name if split is not None else None
    compiled = RegionActions(False, actions, actions, recordable, split_at)
    return Choice(_ANY_PLAN, {region: compiled}, Stats(), demoted=False)


@contextmanager
def attention_wrapped(model: nn.Module) -> Iterator[None]:
    """Attention calls reach the running frame inside this block (Hugging Face models)."""
    config = getattr(model, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    wrapped = wrap_attention(implementation) if implementation else None
    try:
        yield
    finally:
        if wrapped is not None and implementation is not None:
            unwrap_attention(implementation, wrapped)


def _first_tensor(result: Any) -> torch.Tensor:
    tensor = result[0] if isinstance(result, tuple) else result
    assert isinstance(tensor, torch.Tensor)
    return tensor


_ANY_PLAN: Any = object()
