"""One execution of a unit's call: what its own autograd saved, and how a replay answers for it.

A call that a replay may leave out (kept, encoded or dead) is recorded in forward. Each tensor that its own autograd
saved becomes an ``Entry`` with a role: an alias of a parameter (kept, costs nothing), an alias of an argument or of
the output (dropped; the replay hands it over), something cheap to derive from those (dropped; derived when backward
asks), or the rest, such as a log-sum-exp (kept as it is).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from hilore.runtime.adapter import Front
from hilore.runtime.alias import is_placeholder, non_leaf_alias, placeholder
from hilore.runtime.ambient import RandomState, tensors_in
from hilore.runtime.codecs.seeds import own_rank, rounding_seed
from hilore.runtime.eligibility import role_of
from hilore.runtime.errors import ReplayMismatchError, UnsupportedModelError
from hilore.runtime.origins import Origins
from hilore.runtime.provenance import Provenance
from hilore.runtime.saved import Entry, Kept, Layout, Role, Watch
from hilore.runtime.unitbinding import UnitBinding, output_of

if TYPE_CHECKING:
    from hilore.runtime.frame import Frame
    from hilore.runtime.region import Choice

ACTIVATION = "activation"
ENCODE_FLOOR_BYTES = 1 << 10


class UnitRecord:
    """One call of one unit in one frame's forward."""

    __slots__ = (
        "arguments",
        "encode_role",
        "entries",
        "front",
        "kept",
        "late",
        "output_layout",
        "output_place",
        "output_requires_grad",
        "ran_in_replay",
        "random_after",
        "region_name",
        "released",
        "roles",
        "template",
        "unit",
        "watch",
    )

    def __init__(self, region_name: str, unit: UnitBinding, *, late: bool = False, kept: bool = False) -> None:
        self.region_name = region_name
        self.late = late
        self.front = Front(kept, unit.derivations)
        self.unit = unit
        self.roles: list[Role] = []
        self.entries: list[weakref.ref[Entry]] = []
        self.arguments: list[Layout] = []
        self.kept: Kept | None = None
        self.encode_role = ""
        self.output_layout: Layout | None = None
        self.output_place = -1
        self.template: tuple[Any, ...] = ()
        self.output_requires_grad = False
        self.ran_in_replay = False
        self.released = False
        self.random_after: RandomState | None = None
        self.watch: Watch | None = None

    def pack(self, frame: Frame, tensor: torch.Tensor) -> Entry:
        role = Role(Layout.of(tensor), "new")
        entry = Entry(frame, self, role, tensor)
        self.roles.append(role)
        self.entries.append(weakref.ref(entry))
        return entry

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward: run the call with its saved tensors packed here, then settle every entry's role."""
        sources = tensors_in(args, kwargs)
        self.arguments = [Layout.of(t) for t in sources]
        self.front.starts(sources)
        own_state = self.unit.own_state()
        provenance = _provenance([*own_state, *sources])
        try:
            with provenance or nullcontext():
                result = call(*args, **kwargs)
            output, self.output_place = output_of(self.unit.name, result)
            if self.output_place >= 0:
                self.template = tuple(None if item is output else item for item in result)
            self.output_layout = Layout.of(output)
            self.output_requires_grad = output.requires_grad
            origins = Origins(output, sources, own_state, provenance, self.front, self.unit.derivations)
            for index, reference in enumerate(self.entries):
                if (entry := reference()) is not None:
                    origins.settle(index, entry)
        finally:
            # Also when the call dies: its arguments' graph holds this record, a cycle that no collector sees.
            self.front.settled()
        return result

    def run_front(self, module: nn.Module, call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        """Forward: run a module of the unit's front."""
        return self.front.run(module, call, x, self.roles)

    def keep(self, result: Any, codec: str | None, compute_dtype: torch.dtype | None, choice: Choice) -> None:
        """Store the output: encoded where the plan says so and it is an activation, else as it is."""
        output = self._output(result)
        if codec is not None and compute_dtype is not None:
            self.encode_role = role_of(
                output, compute_dtype=compute_dtype, floor_bytes=ENCODE_FLOOR_BYTES, parameters=self.unit.own_state()
            )
        if codec is None or self.encode_role != ACTIVATION:
            self.kept = Kept(output, None)
        else:
            seed = rounding_seed(self.unit.name, next(self.unit.encodings), own_rank())
            self.kept = Kept(output, codec, seed, choice.tokens)

    def let_go(self) -> None:
        """Keep nothing after all of what was encoded: a replay runs the call, or leaves it out where it is dead."""
        if self.kept is not None and self.kept.tensor is None:
            self.watch, self.kept = self.kept.watch, None

    def watch_output(self, result: Any) -> None:
        """Note whether glue changes the output in place: its placeholder could not take that."""
        self.watch = Watch(self._output(result))

    @property
    def must_run(self) -> bool:
        """Whether a replay must run the call even where the plan has it dead."""
        return not self.front.complete or (self.watch is not None and self.watch.changed)

    @property
    def may_draw(self) -> bool:
        """Whether the call may draw random numbers. Of attention its own ``dropout`` argument says it."""
        if self.unit.front:
            return not self.front.complete or any(step.draws for step in self.front.steps)
        return self.unit.kind == "module" and not isinstance(self.unit.module, nn.Linear)

    def _output(self, result: Any) -> torch.Tensor:
        output: torch.Tensor = result if self.output_place < 0 else result[self.output_place]
        return output

    @property
    def needs_replay(self) -> bool:
        """Whether backward can ask this record for something that only a replay can give."""
        return any(role.dropped for role in self.roles)

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, hand_over: bool = True) -> Any:
        """Replay: hand over arguments and output to the entries and return the output without running the call.

        With ``hand_over`` the store lets go of the output: from now on only the replay and the entries hold it.
        Without it nothing is handed over, since another stage of the replay is still to come.
        """
        arguments = tensors_in(args, kwargs)
        self._check_arguments(arguments)
        stored = None
        if self.kept is not None:
            stored = self.kept.restore(self.unit.name)
            if hand_over:
                self.kept = None
                self.released = True
        again = self._rerun_front(arguments) if hand_over else {}
        for role, reference in zip(self.roles, self.entries, strict=True):
            entry = reference() if hand_over else None
            if entry is None or not role.dropped:
                continue
            if role.kind == "argument":
                entry.fill(self._view(role, arguments[role.source], self.arguments[role.source]))
            elif role.kind == "front":
                entry.fill(self._remade(role, again))
            elif stored is None or self.output_layout is None:
                raise self.mismatch("its output is needed but was not kept, so its liveness is wrong")
            else:
                entry.fill(self._view(role, stored, self.output_layout))
        assert self.output_layout is not None
        replaced = stored if stored is not None else placeholder(self.output_layout)
        output = non_leaf_alias(replaced, self.output_requires_grad)
        if self.output_place < 0:
            return output
        return (*self.template[: self.output_place], output, *self.template[self.output_place + 1 :])

    def _rerun_front(self, arguments: list[torch.Tensor]) -> dict[tuple[int, int], torch.Tensor]:
        roles = (role for role, entry in zip(self.roles, self.entries, strict=True) if entry() is not None)
        return self.front.rerun({role.source for role in roles if role.kind == "front"}, arguments)

    def _remade(self, role: Role, again: dict[tuple[int, int], torch.Tensor]) -> torch.Tensor:
        made = again.get((role.source, role.place))
        if made is None:
            raise self.mismatch("a part of it saved fewer tensors than in forward")
        if role.place < 0 and made.dtype == role.layout.dtype:
            return self._view(role, made, self.front.steps[role.source].result)
        made = made if role.place >= 0 else made.to(role.layout.dtype).reshape(role.layout.shape)
        if made.shape != role.layout.shape or made.dtype != role.layout.dtype:
            raise self.mismatch("a part of it saved other tensors than in forward")
        return made

    def _check_arguments(self, arguments: list[torch.Tensor]) -> None:
        now, planned = [tuple(t.shape) for t in arguments], [tuple(layout.shape) for layout in self.arguments]
        if now != planned:
            raise self.mismatch(f"its arguments had shapes {planned} in forward and have {now} in the replay")

    def refill(self, index: int, tensor: torch.Tensor, *, fill: bool = True) -> None:
        """Replay of a call that runs after all: its saved tensors come in the order of the forward.

        ``fill`` False: only checked, another stage of the replay fills them.
        """
        if index >= len(self.roles):
            raise self.mismatch(f"it saved more than the {len(self.roles)} tensors of its forward")
        role = self.roles[index]
        if role.layout.shape != tensor.shape or role.layout.dtype != tensor.dtype:
            raise self.mismatch(
                f"saved tensor {index} was {tuple(role.layout.shape)} {role.layout.dtype} in forward and is "
                f"{tuple(tensor.shape)} {tensor.dtype} in the replay"
            )
        entry = self.entries[index]()
        if fill and entry is not None and role.dropped:
            entry.fill(tensor)

    def mismatch(self, reason: str) -> ReplayMismatchError:
        return ReplayMismatchError(
            f"{self.unit.name}: {reason}. The plan does not fit this model's forward: run `hilore-plan trace` again",
            region=self.region_name,
            unit=self.unit.name,
        )

    def _view(self, role: Role, now: torch.Tensor, planned: Layout) -> torch.Tensor:
        if role.derive is not None:
            if now.shape != planned.shape or now.dtype != planned.dtype or is_placeholder(now):
                raise self.mismatch("an argument that backward needs is not what it was in forward")
            return now.detach()
        if not Layout.of(now).same_view(planned):
            raise self.mismatch(
                f"an argument or output that backward needs was {tuple(planned.shape)} {planned.dtype} "
                f"strides {planned.stride} in forward and is {tuple(now.shape)} {now.dtype} strides {now.stride()} in "
                "the replay"
            )
        offset = role.layout.offset - planned.offset + now.storage_offset()
        return now.detach().as_strided(role.layout.shape, role.layout.stride, offset)


def check_kept(region_name: str, records: Mapping[str, UnitRecord], kept: Iterable[str]) -> None:
    """Every unit that the plan keeps must have run, and nothing may have changed its output since.

    Raises UnsupportedModelError and SavedTensorMutated.
    """
    for name in kept:
        record = records.get(name)
        if record is None:
            raise UnsupportedModelError(
                f"{name}: planned to be kept, but it did not run in this forward of {region_name}. Run the model as it "
                "was traced (attention implementation, modules), or run `hilore-plan trace` again",
                unit=name,
            )
        if record.kept is not None:
            record.kept.check(name)


def _provenance(sources: list[torch.Tensor]) -> Provenance | None:
    """Only of fake tensors: the values of others say where a saved tensor comes from."""
    return Provenance(sources) if any(isinstance(source, FakeTensor) for source in sources) else None
