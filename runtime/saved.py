"""What a unit's call leaves behind in forward: the tensors that its own autograd saved, and its stored output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from hilore.runtime.codecs import Codec, Encoded, get_codec
from hilore.runtime.codecs.exact import LosslessCodec
from hilore.runtime.codecs.tokens import TokenCodec
from hilore.runtime.derive import Derivation
from hilore.runtime.errors import SavedTensorMutated
from hilore.runtime.tokenweights import TokenWeights

if TYPE_CHECKING:
    from hilore.runtime.frame import Frame
    from hilore.runtime.unit import UnitRecord


class Layout(NamedTuple):
    """How one tensor lies in its storage. A tuple: one is made for every tensor that is saved."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.device)

    def same_view(self, other: Layout) -> bool:
        return self.shape == other.shape and self.stride == other.stride and self.dtype == other.dtype


@dataclass(slots=True)
class Role:
    """What one saved tensor of a call is, without the tensor itself.

    ``kind``: parameter, argument, output, front (runtime/adapter.py) or rest. ``source``: which argument, or which step
    of the front; ``place``: what of that step.
    """

    layout: Layout
    kind: str
    source: int = -1
    derive: Derivation | None = None
    place: int = -1

    @property
    def dropped(self) -> bool:
        return self.kind not in ("parameter", "rest")


class Entry:
    """A tensor that a unit's own autograd saved: what the pack hook returned for it.

    Holds the frame, so that a first need in backward can start its replay; a record holds its entries weakly, so
    that everything goes as soon as autograd lets go.
    """

    __slots__ = ("__weakref__", "frame", "record", "role", "value", "version")

    def __init__(self, frame: Frame, record: UnitRecord, role: Role, tensor: torch.Tensor) -> None:
        self.frame = frame
        self.record = record
        self.role = role
        self.value: torch.Tensor | None = tensor.detach()
        self.version = tensor._version

    def settle(self, kind: str, source: int = -1, derive: Derivation | None = None, place: int = -1) -> None:
        self.role.kind, self.role.source, self.role.derive, self.role.place = kind, source, derive, place
        if self.role.dropped:
            self.value = None

    def fill(self, tensor: torch.Tensor) -> None:
        self.value = tensor
        self.version = tensor._version

    def take(self) -> torch.Tensor:
        """The tensor that backward asked for; in-place changes since it was saved are an error, as in eager."""
        if self.value is None:
            self.frame.replay(self.record.late)
        value = self.value
        if value is None:
            raise self.record.mismatch("the replay did not reach it although backward needs a tensor of it")
        if value._version != self.version:
            raise mutated(self.record.unit.name, self.version, value._version)
        if self.role.dropped:
            self.value = None
        derive = self.role.derive
        if derive is not None and (self.role.kind == "parameter" or not self.record.ran_in_replay):
            return derive.apply(value, self.role.layout.shape, self.role.layout.stride)
        return value


class Watch:
    """Sees in-place changes of a tensor without holding its memory: an empty tensor with the same version counter."""

    __slots__ = ("_empty", "saved_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.saved_version = tensor._version
        self._empty = tensor.detach()
        self._empty.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    @property
    def version(self) -> int:
        return self._empty._version

    @property
    def changed(self) -> bool:
        return self.version != self.saved_version


class Kept:
    """A stored output: exact, or encoded with all that decoding needs. ``seed``: of stochastic rounding."""

    __slots__ = ("_saved_version", "encoded", "layout", "tensor", "watch")

    def __init__(
        self, output: torch.Tensor, codec: str | None, seed: int = 0, tokens: TokenWeights | None = None
    ) -> None:
        self.layout = Layout.of(output)
        self._saved_version = output._version
        self.tensor: torch.Tensor | None = None
        self.encoded: Encoded | None = None
        if codec is None:
            self.tensor = output.detach()
        else:
            self.watch = Watch(output)
            with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
                self.encoded = _encode(get_codec(codec), output.detach(), seed, tokens)

    @property
    def nbytes(self) -> int:
        """Bytes held: the output's storage, or the payload."""
        if self.encoded is not None:
            return self.encoded.nbytes
        return self.tensor.untyped_storage().nbytes() if self.tensor is not None else 0

    @property
    def unfit(self) -> bool:
        """Whether it holds nothing, since a lossless codec cannot hold the output in the bytes that were planned."""
        return self.tensor is None and self.encoded is None

    def restore(self, unit_name: str) -> torch.Tensor:
        self.check(unit_name)
        if self.encoded is not None:
            with torch.no_grad(), torch.autocast(self.layout.device.type, enabled=False):
                return get_codec(self.encoded.codec).decode(self.encoded)
        assert self.tensor is not None
        return self.tensor

    def check(self, unit_name: str) -> None:
        version = self.tensor._version if self.tensor is not None else self.watch.version
        if version != self._saved_version:
            raise mutated(unit_name, self._saved_version, version)


def _encode(codec: Codec, output: torch.Tensor, seed: int, tokens: TokenWeights | None) -> Encoded | None:
    if isinstance(codec, LosslessCodec):
        return codec.fitting(output)
    if isinstance(codec, TokenCodec):
        return codec.encode(output, seed, tokens)
    return codec.encode(output, seed)


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was changed in place; 0 for one made under inference_mode, which keeps no count."""
    return 0 if tensor.is_inference() else tensor._version


def mutated(unit_name: str, saved_version: int, version: int) -> SavedTensorMutated:
    return SavedTensorMutated(
        f"Tensor saved by unit {unit_name} was changed in place after it was saved "
        f"(version {saved_version} -> {version}). Make the change on a clone, or give the unit mode R",
        unit=unit_name,
        saved_version=saved_version,
        version=version,
    )
