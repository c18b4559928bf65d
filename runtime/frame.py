"""A frame: one region's forward, and its replay at the first need in backward.

Pack gives a slot for what is dropped; the first unpack runs the region again under the plan and the ambient state of
its forward, hands each slot its tensor, and stops as soon as the last one is there (early stop).

A plan may split a region's replay at a unit: backward first needs what was saved late in the forward (the MLP), so a
first replay fills only those slots, and a second one those before the split (attention) once backward gets there. The
early part's recomputed tensors are then not alive during the late part's backward, where the peak is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hilore.runtime.adaptersum import adapted, run_adapted_again
from hilore.runtime.ambient import AutocastState, ModuleModes, RandomState, RunningAs, device_type_of, tensors_in
from hilore.runtime.audit import perturb
from hilore.runtime.errors import ReplayMismatchError, UnsupportedModelError
from hilore.runtime.glue.decisions import Decisions
from hilore.runtime.saved import Entry, mutated, version_of
from hilore.runtime.slots import Direct, Slot, is_parameter
from hilore.runtime.unit import UnitRecord, check_kept
from hilore.runtime.unitbinding import output_of

if TYPE_CHECKING:
    from hilore.runtime.region import Choice, RegionBinding


class _EndOfReplay(BaseException):
    """Raised inside a replay once nothing more is needed. Not an Exception: user code must not swallow it."""


def _unpack(packed: Slot | Direct | Entry) -> torch.Tensor:
    return packed.take()


def _unpack_in_replay(packed: torch.Tensor | None) -> torch.Tensor:
    if packed is None:
        raise ReplayMismatchError("a backward ran through a replay; replays only make tensors")
    return packed


class Frame:
    """One region's forward under one choice. Alive as long as autograd holds a slot of it."""

    def __init__(
        self, region: RegionBinding, choice: Choice, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> None:
        self.region, self.choice = region, choice
        self.unfit = False
        self.actions = choice.actions(region)
        self.recordable = choice.recordable(region)
        self.split_at = choice.split_at(region)
        self._intercepted = self.recordable | region.adapted_units | ({self.split_at} if self.split_at else set())
        self.call = call
        self.args, self.kwargs = args, kwargs
        inputs = tensors_in(args, kwargs)
        self.input_versions = [(t, version_of(t)) for t in inputs]
        device_type = device_type_of(inputs)
        self.random = RandomState.now(device_type, inputs)
        self.autocast = AutocastState.now(device_type)
        self.modes = ModuleModes.now(region.modules)
        self.slots: list[weakref.ref[Slot]] = []
        self.late_from = -1
        self.records: dict[str, UnitRecord] = {}
        self.record: UnitRecord | None = None
        self.decisions = Decisions()
        self.replaying = False
        self._late_stage = True
        self._cursor = self._entry_cursor = self._pending = 0
        self._answered: set[str] = set()

    @property
    def region_name(self) -> str:
        return self.region.name

    @property
    def kept_bytes(self) -> int:
        """Bytes of stored outputs, exact and encoded."""
        return sum(record.kept.nbytes for record in self.records.values() if record.kept is not None)

    def _compute_dtype(self) -> torch.dtype:
        """Autocast's dtype where it is on, else that of the first floating input."""
        inputs = [tensor for tensor, _ in self.input_versions]
        floating = (tensor.dtype for tensor in inputs if tensor.is_floating_point())
        return self.autocast.compute_dtype(device_type_of(inputs)) or next(floating, torch.float32)

    def run(self) -> Any:
        """The forward. Raises what the region raises; SavedTensorMutated if a kept output was changed in place."""
        with self.region.installed(self._intercepted), RunningAs(self), saved_tensors_hooks(self._pack, _unpack):
            result = self.call(*self.args, **self.kwargs)
        check_kept(self.region_name, self.records, (name for name, action in self.actions.items() if action.kept))
        return result

    def unit_call(self, unit_name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit's call inside this frame, in forward or in a replay."""
        if self.replaying:
            return self._replayed_call(unit_name, call, args, kwargs)
        if unit_name == self.split_at:
            self.late_from = len(self.slots)
        unit = self.region.units[unit_name]
        call = adapted(unit, call)
        if unit_name not in self.recordable:
            return call(*args, **kwargs)
        if unit_name in self.records:
            raise UnsupportedModelError(
                f"{unit_name}: called twice in one forward of {self.region_name}; a plan cannot tell the calls apart. "
                "Run `hilore-plan trace` on this model: it leaves such a unit out",
                unit=unit_name,
            )
        action = self.actions[unit_name]
        record = UnitRecord(self.region_name, unit, late=self._in_late_part, kept=action.kept)
        self.records[unit_name] = record
        self.record = record
        try:
            result = record.run(call, args, kwargs)
        finally:
            self.record = None
        if action.kept:
            record.keep(result, action.codec, self._compute_dtype() if action.codec is not None else None, self.choice)
            if record.kept is not None and record.kept.unfit:
                self._give_up_packing(record, result)
        else:
            record.watch_output(result)
        if record.may_draw or kwargs.get("dropout"):
            record.random_after = RandomState.now(self.random.device_type, tensors_in(args, kwargs))
        self.choice.stats.unit_ran(unit_name, record)
        return result

    def _give_up_packing(self, record: UnitRecord, result: Any) -> None:
        # Where ranks replay together another rank's values may fit: collectives of the unit's call would differ.
        self.choice.stats.unit_unfit(record.unit.name, kept_whole=self.choice.whole_replays)
        if self.choice.whole_replays:
            record.keep(result, None, None, self.choice)
            return
        self.unfit, self.actions = True, self.choice.actions(self.region, unfit=True)
        for each in self.records.values():
            each.let_go()

    def front_call(self, unit_name: str, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """A call of a module in a unit's front: noted while that unit's forward is recorded."""
        if self.replaying or self.record is None or self.record.unit.name != unit_name:
            return call(*args)
        return self.record.run_front(module, call, *args)

    def replay(self, late: bool) -> None:
        """Run the region again and fill the slots and entries that backward may ask for.

        ``late``: whether the tensor asked for was saved after the split; only that part is filled then. Without a
        split everything is.
        """
        if self.replaying:
            raise self.mismatch("a backward inside its own replay asked for a saved tensor")
        for tensor, version in self.input_versions:
            if version_of(tensor) != version:
                raise mutated(self.region_name, version, version_of(tensor))
        self._late_stage = late
        # A second replay (retain_graph) finds the store empty: then every unit runs.
        again = any(record.released for record in self.records.values() if late or self._wanted(record.late))
        self.actions = {} if again else self.choice.actions(self.region, unfit=self.unfit)
        self._cursor = 0
        self.decisions.rewind()
        self._answered = set()
        self._pending = sum(self._wanted(self._is_late(place)) for place in range(len(self.slots)))
        self._pending += sum(r.needs_replay and self._wanted(r.late) for r in self.records.values())
        self.replaying = True
        try:
            with ExitStack() as stack:
                stack.push(self._note)
                stack.enter_context(self.random.forked())
                stack.enter_context(self.autocast.applied())
                stack.enter_context(self.modes.applied())
                stack.enter_context(torch.enable_grad())
                stack.enter_context(self.region.installed(self._intercepted))
                stack.enter_context(RunningAs(self))
                stack.enter_context(saved_tensors_hooks(self._pack_in_replay, _unpack_in_replay))
                if self._pending:
                    self.call(*self.args, **self.kwargs)
        except _EndOfReplay:
            pass
        finally:
            self.replaying = False
            self.record = None
        if self._pending:
            raise self.mismatch(f"{self._pending} of the tensors saved in forward were not reached")
        self.choice.stats.replays += 1

    def _note(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Say in an error of the user's own code where it happened: its forward had gone well."""
        if isinstance(error, Exception):
            error.add_note(f"This happened in the replay of {self.region_name}, whose forward had gone well.")

    def mismatch(self, reason: str) -> ReplayMismatchError:
        return ReplayMismatchError(
            f"{self.region_name}: its replay took another path than its forward: {reason}. A forward must do the same "
            "when it is run again (router, random choice, counter, compiled later); such a region can only be held",
            region=self.region_name,
        )

    def _pack(self, tensor: torch.Tensor) -> Slot | Direct | Entry:
        if self.record is not None:
            return self.record.pack(self, tensor)
        if is_parameter(tensor):
            return Direct(tensor, self.region_name)
        slot = Slot(self, tensor, late=self._in_late_part)
        self.slots.append(weakref.ref(slot))
        return slot

    @property
    def _in_late_part(self) -> bool:
        return self.late_from >= 0

    def _is_late(self, place: int) -> bool:
        return 0 <= self.late_from <= place

    def _wanted(self, late: bool) -> bool:
        """Whether this stage of the replay fills what was saved in the late (early) part."""
        return self.late_from < 0 or late == self._late_stage

    def _pack_in_replay(self, tensor: torch.Tensor) -> torch.Tensor | None:
        value = tensor.detach()
        if self.record is not None:
            wanted = self._wanted(self.record.late)
            self.record.refill(self._entry_cursor, value, fill=wanted)
            self._entry_cursor += 1
            return value if wanted else None
        if is_parameter(tensor):
            return value
        if self._cursor >= len(self.slots):
            raise self.mismatch(f"it saved more than the {len(self.slots)} tensors of its forward")
        if not self._wanted(self._is_late(self._cursor)):
            self._cursor += 1
            return None
        slot = self.slots[self._cursor]()
        self._cursor += 1
        if slot is not None:
            if slot.shape != tensor.shape or slot.dtype != tensor.dtype:
                raise self.mismatch(
                    f"saved tensor {self._cursor - 1} was {tuple(slot.shape)} {slot.dtype} in forward and is "
                    f"{tuple(tensor.shape)} {tensor.dtype} now"
                )
            slot.value = value
            slot.version = value._version
        self._count_down()
        return value

    def _replayed_call(
        self, unit_name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        record = self.records.get(unit_name)
        if record is None:
            return run_adapted_again(self.region.units[unit_name], call, *args, **kwargs)
        if unit_name in self._answered:
            raise self.mismatch(f"{unit_name} was called twice")
        self._answered.add(unit_name)
        action = self.actions.get(unit_name)
        wanted = self._wanted(record.late)
        dead = action is not None and (action.dead if wanted else action.dead_late) and not record.must_run
        left_out = action is not None and (action.kept or dead)
        if wanted:
            record.ran_in_replay = not left_out
        if action is None or not left_out:
            result = self._rerun(record, call, args, kwargs)
        else:
            result = record.answer(args, kwargs, hand_over=wanted)
            if record.random_after is not None:
                record.random_after.restore()
            self.choice.stats.call_left_out(unit_name, action)
        if wanted and record.needs_replay:
            self._count_down()
        return result

    def _rerun(
        self, record: UnitRecord, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.record = record
        self._entry_cursor = 0
        try:
            result = run_adapted_again(record.unit, call, *args, **kwargs)
        finally:
            self.record = None
        if self._entry_cursor != len(record.entries):
            raise self.mismatch(
                f"{record.unit.name} saved {len(record.entries)} tensors in forward and {self._entry_cursor} now"
            )
        if self.choice.control and self.choice.encodes(self.region, record.unit.name):
            perturb(output_of(record.unit.name, result)[0])
        return result

    def _count_down(self) -> None:
        self._pending -= 1
        if self._pending == 0 and not self.choice.whole_replays:
            raise _EndOfReplay
