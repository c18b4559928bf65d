"""FSDP outside of regions, acted out: empty tensors of the right sizes at the right moments of a fake step.

The head's peak depends on the order of events (the logits' gradient meets the gathered lm_head, or not), so it is not
summed up but run: a meter of live storages sees these tensors among those of the model. planner/sharding.py says what
is gathered when, and has the sizes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hilore.planner.shardgroup import GroupBytes
from hilore.planner.sharding import Sharding

# Two float32 scalars.
_ROOT_BYTES = 8


class OutsideGathers:
    """Call the methods in order while a step runs. Without a sharding nothing is ever held.

    ``accumulates``: gradients exist before the step, so that a reduced one is added to them and does not stay.
    """

    def __init__(self, sharding: Sharding | None, device: torch.device, *, accumulates: bool) -> None:
        self._sharding = sharding
        self._accumulates = accumulates
        self._device = device
        self._held: dict[str, Tensor] = {}
        self._bytes: dict[str, int] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes that this object holds now."""
        return sum(self._bytes.values())

    @property
    def sizes(self) -> list[int]:
        """Bytes of each buffer that this object holds now."""
        return list(self._bytes.values())

    def begin(self) -> None:
        """The forward begins: the first group is gathered."""
        if self._sharding is not None:
            self._gather(self._sharding.first, "flat", "first")

    def enter_regions(self) -> None:
        """Before the first region: embeddings of their own are resharded."""
        if self._sharding is not None and not self._sharding.tied and self._sharding.reshard:
            self._drop("first")

    def leave_regions(self) -> None:
        """After the last region: its flat buffer is still there while an untied head is gathered."""
        if self._sharding is None:
            return
        self._drop("flat")
        self._hold("flat", self._sharding.flat(self._last_region()))
        if not self._sharding.tied:
            self._gather(self._sharding.last, "next", "last")
            self._drop("flat")

    def forward_done(self) -> None:
        """The model's forward is over: its last flat buffer goes."""
        self._drop("flat")
        self._drop("next")

    def loss_done(self) -> None:
        """The loss's gradient has reached the model's output: the last region's gather is prefetched."""
        if self._sharding is not None and self._sharding.reshard:
            group = self._last_region()
            self._hold("cast", group.cast)
            self._hold("prefetched", self._sharding.prefetched(group))
            self._drop("cast")

    def head_done(self, parameters: Iterable[Tensor]) -> int:
        """The head's backward is over: an untied head is resharded and its gradients (of ``parameters``) reduced.

        Returns the bytes held for the last region's backward, which are that region's own.
        """
        if self._sharding is None:
            return 0
        if not self._sharding.tied:
            self._drop("last")
            self._reduction(self._sharding.last, parameters)
        return self._size("prefetched") + self._size("reducing")

    def tail_begins(self) -> None:
        """The first region's backward is over; its gradients are still being reduced."""
        if self._sharding is None:
            return
        self._drop("prefetched")
        self._drop("reducing")
        self._hold("reducing", self._sharding.lingering(next(iter(self._sharding.regions.values()))))
        if not self._sharding.tied and self._sharding.reshard:
            self._hold("flat", self._sharding.flat(self._sharding.first))
            if self._sharding.first.gradients:
                self._hold("first", self._sharding.first.gathered)

    def step_done(self, parameters: Iterable[Tensor]) -> None:
        """Backward is over: the first group is resharded and its gradients (of ``parameters``) are reduced."""
        if self._sharding is None:
            return
        for name in ("flat", "reducing"):
            self._drop(name)
        # In a real step backward is still running here, and holds the loss and the gradient that it began with.
        self._hold("root", _ROOT_BYTES)
        if not self._sharding.in_place:
            self._drop("first")
        self._reduction(self._sharding.first, parameters)
        self._held.clear()
        self._bytes.clear()

    def _last_region(self) -> GroupBytes:
        assert self._sharding is not None
        return list(self._sharding.regions.values())[-1]

    def _gather(self, group: GroupBytes, flat: str, whole: str) -> None:
        assert self._sharding is not None
        self._hold("cast", group.cast)
        if self._sharding.in_place:
            self._hold(whole, group.gathered)
        self._hold(flat, self._sharding.flat(group))
        self._drop("cast")
        if not self._sharding.in_place:
            self._hold(whole, group.gathered)

    def _reduction(self, group: GroupBytes, parameters: Iterable[Tensor]) -> None:
        assert self._sharding is not None
        if group.accumulated and not self._sharding.in_place:
            self._reduce_last(group, parameters)
        else:
            self._reduce(group, parameters)

    def _reduce(self, group: GroupBytes, parameters: Iterable[Tensor]) -> None:
        """Unsharded gradients give way to the rank's part; the reduce-scatter's input may stay for now."""
        assert self._sharding is not None
        if not group.gradients:
            return
        if self._sharding.in_place:
            self._hold("kept", group.flat_gradient)
            self._let_go(parameters)
            self._drop("first")
            self._hold("reducing", group.reduce_input)
        else:
            self._hold("reducing", group.reduce_input)
            self._let_go(parameters)
            self._hold("kept", group.kept_gradient)
        self._hold("reduced", group.reduce_output)
        self._hold("copy", group.reduce_copy)
        self._drop("copy")
        if group.recast:
            self._hold("recast", group.recast)
            self._drop("reduced")
        self._drop("kept")
        if self._sharding.in_place:
            self._drop("reducing")
        if self._accumulates:
            self._drop("reduced")
            self._drop("recast")

    def _reduce_last(self, group: GroupBytes, parameters: Iterable[Tensor]) -> None:
        """The same for FSDP2 in the last microbatch of an update, where earlier ones left unsharded gradients.

        Those are live all the time, also for who calls, so that only what goes beyond them is held here.
        """
        assert self._sharding is not None
        if not group.gradients:
            return
        if not self._sharding.buffers:
            self._let_go(parameters)
        self._hold("reducing", group.reduce_input)
        beside = group.kept_gradient + group.reduce_output + max(group.reduce_copy, group.recast)
        self._hold("reduced", max(beside - group.accumulated, 0))
        self._drop("reduced")

    @staticmethod
    def _let_go(parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = None

    def _hold(self, name: str, nbytes: int) -> None:
        if nbytes:
            # Counted first: a meter that sees the new tensor may ask at once what is held.
            self._bytes[name] = nbytes
            self._held[name] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _drop(self, name: str) -> None:
        self._held.pop(name, None)
        self._bytes.pop(name, None)

    def _size(self, name: str) -> int:
        return self._bytes.get(name, 0)
