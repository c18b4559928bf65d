"""Where times come from: the device that is here, or the roofline of a card that is not.

Both ways run the same regions with the same code; they differ in whose tensors run (real or fake) and in the clock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hilore.planner.actor import Actor, build_actor
from hilore.planner.cudakernels import NOTE as KERNEL_NOTE
from hilore.planner.cudakernels import cuda_attention
from hilore.planner.devices import (
    CUBLAS_WORKSPACE_BEFORE_SM90,
    CUBLAS_WORKSPACE_SM90,
    gpu_named,
    gpu_names,
    gpu_reported_as,
)
from hilore.planner.gpu import Gpu
from hilore.planner.profile import REPEATS, WARM_UP, Clock, codec_costs, device_clock
from hilore.planner.roofline import RooflineClock, estimated_codec_costs
from hilore.planner.spec_types import ModelSpec
from hilore.planner.trace import CodecCost
from hilore.planner.yaml_lines import parse_yaml
from hilore.runtime.errors import UnsupportedModelError

# One cuBLAS handle of the thread that runs forward, one of autograd's.
_CUBLAS_HANDLES = 2


@dataclass(frozen=True, slots=True)
class Target:
    """What a trace is for. ``device``: where tensors of the run live (the fake ones of an estimate on the CPU).
    ``gpu``: the card's entry in the table, None for the CPU and for a card that is here but not in it. ``cuda``: CUDA's
    kernels run there, whose saved tensors and temporaries fake tensors do not show by themselves."""

    device: torch.device
    gpu: Gpu | None
    estimated: bool
    label: str
    card_bytes: int
    workspace_bytes: int
    cuda: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.cuda:
            return ()
        if not self.estimated or self.gpu is None:
            return (KERNEL_NOTE, self._workspace_note)
        return (
            f"times are estimated from the table of GPUs ({self.gpu.name}: {self.gpu.source}): not measured; time of "
            f"the CPU that launches kernels is not in them; {_bias(self.gpu)}",
            KERNEL_NOTE,
            self._workspace_note,
            *(f"{self.gpu.name}: {note}" for note in self.gpu.notes),
        )

    @property
    def _workspace_note(self) -> str:
        return (
            f"other memory has {self.workspace_bytes / 2**20:.3g} MiB of cuBLAS workspace (PyTorch's default on this "
            f"card, {_CUBLAS_HANDLES} handles)"
        )


def _bias(gpu: Gpu) -> str:
    if not gpu.bias:
        return "they have not been compared with a measurement on this card yet"
    return "measured over estimated here: " + ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in gpu.bias.items())


def target_of(spec: ModelSpec) -> Target:
    """The device of the run where it is the one that model.yaml names, else an estimate for that card.

    Raises UnknownGpuError for a card that the table does not have, UnsupportedModelError where model.yaml names none
    and none is here.
    """
    if spec.device.kind == "cpu":
        return Target(torch.device("cpu"), None, False, "cpu", 0, 0)
    where = f"{_place(spec)}device.gpu"
    named = gpu_named(spec.device.gpu, where=where) if spec.device.gpu else None
    if torch.cuda.is_available():
        here = torch.cuda.get_device_name()
        if named is None or here in named.reported_names:
            device = torch.device("cuda")
            total = torch.cuda.get_device_properties(device).total_memory
            gpu = named or gpu_reported_as(here)
            return Target(device, gpu, False, "cuda", total, _workspace_bytes(gpu), cuda=True)
    if named is None:
        raise UnsupportedModelError(
            f"{where} is empty and no CUDA device is here; trace on the machine that will train, name the card to plan "
            f"for ({', '.join(gpu_names())}), or set device: {{kind: cpu}}",
            unit="device",
        )
    return estimated_target(named)


def estimated_target(gpu: Gpu) -> Target:
    """The target of an estimate for a card, whether or not it is here."""
    return Target(torch.device("cpu"), gpu, True, gpu.name, gpu.memory_bytes, _workspace_bytes(gpu), cuda=True)


def _workspace_bytes(gpu: Gpu | None) -> int:
    """What PyTorch holds for cuBLAS; of a card that the table does not have, by its compute capability."""
    if gpu is not None:
        return gpu.cublas_workspace_bytes * _CUBLAS_HANDLES
    newer = torch.cuda.get_device_capability()[0] >= 9
    return (CUBLAS_WORKSPACE_SM90 if newer else CUBLAS_WORKSPACE_BEFORE_SM90) * _CUBLAS_HANDLES


def _place(spec: ModelSpec) -> str:
    """``file:line: `` of the device section, nothing where the spec comes out of a trace or its file is gone."""
    path = Path(spec.path)
    if not spec.path or not path.is_file():
        return ""
    return f"{spec.path}:{parse_yaml(path.read_text(encoding='utf-8')).line('device', 'gpu')}: "


@dataclass(frozen=True, slots=True)
class Bench:
    """What times are taken with: the actor whose tensors run, and a clock that sees them. ``device_type``: whose codec
    kernels train."""

    actor: Actor
    clock: Clock
    warm_up_runs: int
    repeats: int
    gpu: Gpu | None
    device_type: str

    @property
    def estimated(self) -> bool:
        return isinstance(self.clock, RooflineClock)

    @contextmanager
    def running(self, *, autocast: bool = True) -> Iterator[None]:
        """Operators inside the block run on the actor's tensors and count on the clock.

        ``autocast`` False: a whole step inside the block enters and leaves autocast by itself.
        """
        counting = self.clock if isinstance(self.clock, RooflineClock) else contextlib.nullcontext()
        with self.actor.faked(), self.actor.autocast() if autocast else contextlib.nullcontext(), counting:
            yield

    def codec_costs(self, output: Tensor, names: Iterable[str]) -> tuple[CodecCost, ...]:
        """Times and payload of each codec for one unit's output."""
        if self.estimated and self.gpu is not None:
            return estimated_codec_costs(self.gpu, output, names, self.device_type)
        return codec_costs(output, names, self.clock)


def bench_for(target: Target, spec: ModelSpec, fake: Actor, real: Actor | None = None) -> Bench:
    """The fake actor on the roofline's clock where the target is not here, else a real one on the device's.

    Weights are read and allocated for the real one alone, unless one is given.
    """
    device_type = "cuda" if target.cuda else target.device.type
    if target.estimated and target.gpu is not None:
        return Bench(fake, RooflineClock(target.gpu), 0, 1, target.gpu, device_type)
    actor = real or build_actor(spec, device=target.device)
    return Bench(actor, device_clock(target.device), WARM_UP, REPEATS, target.gpu, device_type)


def kernels(target: Target) -> AbstractContextManager[None]:
    """Kernels of the target where fake tensors would take others, or hide what is inside of them."""
    return cuda_attention() if target.cuda else contextlib.nullcontext()


def timed_kernels(target: Target) -> AbstractContextManager[None]:
    """The same while times are taken: real tensors run the real kernels."""
    return kernels(target) if target.estimated else contextlib.nullcontext()
