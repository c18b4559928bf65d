"""Builds our C files with the machine's C compiler; calls the codecs' on CPU, one pass each (rotaryops.py: rotary.c).

torch.compile was measured first: on a bfloat16 [1024, 2752] tensor and one thread its int8 kernels took 0.54 and
0.27 ms and 4 to 15 s to compile, plain torch 8 to 14 ms; these take 0.30 and 0.18 ms and 2 s where the machine has
AVX-512 (docs/log.md has more). The library is built once per process into a private folder that is removed as soon as
it is loaded.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from hilore.runtime.codecs.form import BLOCK, GroupForm
from hilore.runtime.codecs.reference import salt_of, sampled_rows, thresholds
from hilore.runtime.errors import CodecError, HiloreWarning

_HERE = Path(__file__).parent
SOURCES = tuple(map(str, (_HERE / "kernels.c", _HERE / "pack.c", _HERE.parent / "rotary.c")))
NATIVE_DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}
COMPILERS = ("cc", "gcc", "clang")
BUILD_LIMIT_S = 120

# No contraction: a fused multiply-add rounds once where torch rounds twice.
_FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_WIDE = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
_ATTEMPTS = (("-march=native", *_WIDE, "-fopenmp"), ("-march=native", "-fopenmp"), ())


# Elements that kernels.c handles at once.
STEP = 32
_KINDS = {"int": 0, "nf4": 1, "fp4": 1, "e4m3": 2, "e5m2": 3}
_INT32 = (
    "kind",
    "bits",
    "group",
    "groups",
    "shift",
    "fine",
    "asymmetric",
    "rotated",
    "stochastic",
    "wide",
    "levels",
    "zero",
    "threads",
)


class _Form(ctypes.Structure):
    """Form of kernels.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("numel", "start", "channels")),
        ("mean", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in _INT32),
        ("salt", ctypes.c_uint32),
        ("values", ctypes.c_float * 16),
        ("thresholds", ctypes.c_float * 16),
    )


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """The loaded library. Bit for bit what reference.py computes, for bfloat16 and float32 on CPU."""

    library: ctypes.CDLL

    def encode(
        self, flat: Tensor, mean: Tensor | None, form: GroupForm, salt: int, start: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As flat.encode_flat; ``flat`` contiguous."""
        numel = flat.numel()
        codes = torch.empty(form.code_bytes(numel), dtype=torch.uint8)
        parameters = torch.empty(form.parameter_count(numel), dtype=form.parameter_dtype(flat.dtype))
        function = getattr(self.library, f"encode_{NATIVE_DTYPES[flat.dtype]}")
        function.restype = ctypes.c_int64
        tiled = _tiled(mean)
        described = _described(form, numel, flat.dtype, tiled, start, salt)
        bad = function(ctypes.byref(described), *_pointers(flat, codes, parameters))
        return codes, parameters, torch.full((1,), bad, dtype=torch.int64)

    def decode(
        self, codes: Tensor, parameters: Tensor, mean: Tensor | None, form: GroupForm, numel: int, dtype: torch.dtype
    ) -> Tensor:
        """As flat.decode_flat; ``codes`` and ``parameters`` contiguous."""
        flat = torch.empty(numel, dtype=dtype)
        function = getattr(self.library, f"decode_{NATIVE_DTYPES[dtype]}")
        function.restype = None
        tiled = _tiled(mean)
        described = _described(form, numel, dtype, tiled, 0, 0)
        function(ctypes.byref(described), *_pointers(codes, parameters, flat))
        return flat

    def channel_mean(self, flat: Tensor, channels: int) -> Tensor:
        """As reference.channel_mean; ``flat`` contiguous."""
        mean = torch.empty(channels, dtype=flat.dtype)
        rows = flat.numel() // channels
        count = sampled_rows(rows)
        function = getattr(self.library, f"mean_{NATIVE_DTYPES[flat.dtype]}")
        function.restype = None
        sizes = (ctypes.c_int64(size) for size in (channels, count, rows // count))
        function(*_pointers(flat, mean), *sizes, ctypes.c_int(torch.get_num_threads()))
        return mean

    def pack_bf16(self, flat: Tensor, codes: Tensor, places: Tensor, values: Tensor) -> int:
        """Fills the last three as pack.py's ``pack`` says; its count.

        Raises CodecError where the C library has no memory for the threads' own lists.
        """
        function = self.library.pack_bf16
        function.restype = ctypes.c_int64
        found: int = function(
            *_pointers(flat),
            ctypes.c_int64(flat.numel()),
            *_pointers(codes, places, values),
            ctypes.c_int64(places.numel()),
            ctypes.c_int(torch.get_num_threads()),
        )
        if found < 0:
            raise CodecError("pack-bf16: no memory for the lists of its threads", codec="pack-bf16")
        return found

    def unpack_bf16(self, codes: Tensor, places: Tensor, values: Tensor, flat: Tensor) -> None:
        """Fills ``flat`` as pack.py's ``unpack`` says."""
        function = self.library.unpack_bf16
        function.restype = None
        sizes = (ctypes.c_int64(size) for size in (places.numel(), flat.numel()))
        threads = ctypes.c_int(torch.get_num_threads())
        function(*_pointers(codes, places, values), *sizes, *_pointers(flat), threads)


def _tiled(mean: Tensor | None) -> Tensor | None:
    """float32, repeated for one block more than its length, so that no block wraps around."""
    if mean is None:
        return None
    repeats = -(-BLOCK // mean.numel()) + 1
    return mean.float().repeat(repeats)[: mean.numel() + BLOCK].contiguous()


def _described(form: GroupForm, numel: int, dtype: torch.dtype, mean: Tensor | None, start: int, salt: int) -> _Form:
    described = _Form()
    ctypes.pointer(described)[0] = _template(form, dtype, torch.get_num_threads())
    described.numel, described.start = numel, start
    described.channels = 1 if mean is None else mean.numel() - BLOCK
    described.mean = None if mean is None else mean.data_ptr()
    described.salt = salt_of(salt, start) & 0xFFFFFFFF
    return described


@cache
def _template(form: GroupForm, dtype: torch.dtype, threads: int) -> _Form:
    """All that does not change between tensors; copied, never passed on."""
    wide = form.parameter_dtype(dtype) == torch.float32
    zero = form.levels if form.kind == "int" and not form.asymmetric else 0
    groups = BLOCK // form.group if form.group else 0
    shift = (form.group // STEP).bit_length() - 1 if form.group else 0
    numbers: list[int] = [_KINDS[form.kind], form.bits, form.group, groups, shift]
    numbers += [form.fine_scales, form.asymmetric, form.rotated, form.stochastic, wide]
    numbers += [form.levels, zero, threads]
    template = _Form(0, 0, 1, None, *numbers)
    template.values[: len(form.book)] = form.book
    limits = thresholds(form) if form.book else ()
    template.thresholds[:] = (*limits, *[float("inf")] * (16 - len(limits)))
    return template


def _pointers(*tensors: Tensor) -> tuple[ctypes.c_void_p, ...]:
    return tuple(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)


_lock = threading.Lock()
_kernels: list[NativeKernels | None] = []


def native_kernels() -> NativeKernels | None:
    """The kernels, built at the first call; None, with one HiloreWarning per process, where that is not possible."""
    if not _kernels:
        with _lock:
            if not _kernels:
                _kernels.append(_build())
    return _kernels[0]


def find_compiler() -> str | None:
    """``$CC`` if set, else the first of cc, gcc and clang on the path."""
    names = (os.environ["CC"],) if os.environ.get("CC") else COMPILERS
    return next((found for name in names if (found := shutil.which(name))), None)


def _build() -> NativeKernels | None:
    compiler = find_compiler()
    if compiler is None:
        _tell("no C compiler was found (CC, cc, gcc, clang)")
        return None
    problem = ""
    for flags in _ATTEMPTS:
        with tempfile.TemporaryDirectory(prefix="hilore-") as folder:
            target = os.path.join(folder, "kernels.so")
            command = [compiler, *_FLAGS, *flags, "-o", target, *SOURCES, "-lm"]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_LIMIT_S)
                return NativeKernels(ctypes.CDLL(target))
            except subprocess.CalledProcessError as error:
                problem = problem or error.stderr.strip()[-400:]
            except (subprocess.TimeoutExpired, OSError) as error:
                problem = problem or str(error)
    _tell(f"{compiler} could not build them: {problem}")
    return None


def _tell(reason: str) -> None:
    warnings.warn(
        f"Codec kernels are not built: {reason}. Encoding, decoding and rotary embedding run as plain torch "
        "operations with the same results, codecs about 20 times slower; install gcc, or set CC to a C compiler.",
        HiloreWarning,
        stacklevel=3,
    )
