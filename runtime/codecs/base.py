"""What every codec is: a name, ``encode``, ``decode``, exact payload bytes; and how a tensor is laid out flat."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hilore.runtime.errors import CodecError, CodecRefused

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor in a codec's form; carries all that decoding needs and shares no storage with what was encoded.

    ``shape``, ``stride`` and ``dtype`` are those of the decoded tensor. The stride is the encoded tensor's own where
    that was dense (transposed included); gaps and repeats (slices, expanded tensors) decode to a dense tensor with
    the same order of dimensions. ``raw``: the payload is an exact copy because the codec could not take the values.
    """

    codec: str
    payload: tuple[Tensor, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    raw: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the payload as it is (a raw payload is larger than ``Codec.nbytes``)."""
        return sum(part.numel() * part.element_size() for part in self.payload)


class Codec(ABC):
    """A codec. ``stored_raw`` counts the tensors that ``encode`` kept as exact copies since the process started.

    Neither method writes into its input, keeps a reference to it, or draws a random number.
    """

    name: str
    lossless: bool
    # Whether nearly every activation of a dtype that it is for fits, so that a plan may count on it unseen.
    holds_activations = True

    def __init__(self) -> None:
        self.stored_raw = 0

    @abstractmethod
    def encode(self, tensor: Tensor, seed: int = 0) -> Encoded:
        """The payload of ``tensor`` (any shape and stride; bfloat16, float16, float32 or float64, lossless codecs any
        dtype). ``seed`` decides how stochastic rounding falls (seeds.py); other codecs ignore it.

        Raises CodecRefused for a tensor that is not strided or not of these dtypes.
        """

    @abstractmethod
    def decode(self, encoded: Encoded) -> Tensor:
        """A tensor of ``encoded``'s shape, stride and dtype, on the payload's device.

        A raw payload comes back as an alias of the stored copy: it must not be written to.
        Raises CodecError when another codec made ``encoded``.
        """

    @abstractmethod
    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Exact payload bytes for a tensor of this shape and dtype that is not stored raw."""

    @abstractmethod
    def encode_workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype, device_type: str = "cpu") -> int:
        """At most what ``encode`` allocates beside its payload, for a dense tensor."""

    @abstractmethod
    def decode_workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype, device_type: str = "cpu") -> int:
        """At most what ``decode`` allocates beside its result."""

    def workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype, device_type: str = "cpu") -> int:
        """At most what one encode or one decode allocates beside payload and result."""
        return max(
            self.encode_workspace_bytes(shape, dtype, device_type),
            self.decode_workspace_bytes(shape, dtype, device_type),
        )

    def shrinks(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether a tensor of this shape and dtype takes fewer bytes as a payload."""
        return self.nbytes(shape, dtype) < element_count(shape) * dtype.itemsize

    def error_bound(self, encoded: Encoded) -> Tensor:
        """Per element the most by which this payload can be off, float64, in the decoded shape; zeros if lossless."""
        self.check_encoded(encoded)
        device = encoded.payload[0].device
        return torch.empty_strided(encoded.shape, encoded.stride, dtype=torch.float64, device=device).zero_()

    def check_input(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            raise CodecRefused(
                f"{self.name}: cannot encode a tensor of layout {tensor.layout}; keep it (mode H).",
                codec=self.name,
                dtype=tensor.dtype,
            )
        self.check_dtype(tensor.dtype)

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in FLOAT_DTYPES:
            known = ", ".join(str(known).removeprefix("torch.") for known in FLOAT_DTYPES)
            raise CodecRefused(
                f"{self.name}: cannot encode {dtype}, only {known}; keep it (mode H).", codec=self.name, dtype=dtype
            )

    def check_encoded(self, encoded: Encoded) -> None:
        if encoded.codec != self.name:
            raise CodecError(
                f"{self.name}: asked to decode a payload made by {encoded.codec!r}; use get_codec({encoded.codec!r}).",
                codec=encoded.codec,
            )

    def store_raw(self, tensor: Tensor) -> Encoded:
        """An exact copy of ``tensor``, counted in ``stored_raw``."""
        self.stored_raw += 1
        copy = tensor.detach().clone()
        return Encoded(self.name, (copy,), tuple(copy.shape), copy.stride(), copy.dtype, raw=True)


def element_count(shape: Sequence[int]) -> int:
    """Number of elements (1 for a 0-dim shape). A loop, so that it also takes symbolic sizes."""
    count = 1
    for size in shape:
        count *= size
    return count


def is_abstract(tensor: Tensor) -> bool:
    """Whether there are no values to look at (fake or meta tensors): they are taken to be finite and exact."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one span of memory, each once, in some order of the dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def flat_view(dense: Tensor) -> Tensor:
    """The elements of a dense tensor in memory order, shape ``[numel]``, without a copy."""
    dense = dense.detach()
    return dense.view(-1) if dense.is_contiguous() else dense.as_strided((dense.numel(),), (1,))


def chunks_of(flat: Tensor, multiple: int = 1) -> Iterator[Tensor]:
    """Views of a flat tensor, about CHUNK_ELEMENTS long: a multiple of ``multiple`` elements, but for the last."""
    step = max(1, CHUNK_ELEMENTS // multiple) * multiple
    return (flat[start : start + step] for start in range(0, flat.numel(), step))


def decoded_stride(tensor: Tensor) -> tuple[int, ...]:
    """The stride that ``decode`` gives: the own one if dense, else dense in the same order of dimensions."""
    return tensor.stride() if is_dense(tensor) else torch.empty_like(tensor, device="meta").stride()


def memory_order(tensor: Tensor) -> list[int]:
    """Dimensions from the outermost to the innermost of the decoded tensor."""
    stride = decoded_stride(tensor)
    return sorted(range(tensor.dim()), key=lambda dim: (-stride[dim], dim))


def memory_order_chunks(tensor: Tensor, multiple: int) -> Iterator[Tensor]:
    """Flat copies of a tensor with gaps or repeats, in the memory order of ``decoded_stride``.

    Each is a multiple of ``multiple`` elements but the last, and about CHUNK_ELEMENTS long (or ``multiple`` slices
    of the outermost dimension where that is more).
    """
    rows = tensor.detach().permute(memory_order(tensor))
    if rows.dim() > 1:
        rows = _merge_outer(rows)
    inner = element_count(rows.shape[1:])
    step = max(1, CHUNK_ELEMENTS // max(1, inner * multiple)) * multiple
    for start in range(0, rows.shape[0], step):
        yield rows[start : start + step].reshape(-1)


def _merge_outer(rows: Tensor) -> Tensor:
    """Joins leading dimensions as far as a view can, so that chunks along the first one stay small."""
    while rows.dim() > 2 and (rows.shape[0] == 1 or rows.stride(0) == rows.stride(1) * rows.shape[1]):
        rows = rows.flatten(0, 1) if rows.shape[0] != 1 else rows.squeeze(0)
    return rows
