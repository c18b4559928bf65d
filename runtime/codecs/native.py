"""Builds kernels.c with the machine's C compiler and calls it: the group codecs on CPU, one pass each.

torch.compile was measured first: on a bfloat16 [1024, 2752] tensor and one thread its int8 kernels took 0.54 and
0.27 ms and 4 to 15 s to compile, these take 0.23 and 0.18 ms and 1 s, where the GEMM takes 5.9 ms and plain torch
8 to 14 ms. The library is built once per process into a private folder that is removed as soon as it is loaded.
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
from pathlib import Path

import torch
from torch import Tensor

from hilore.runtime.codecs.reference import FORMATS, group_count
from hilore.runtime.errors import HiloreWarning

SOURCE = Path(__file__).with_name("kernels.c")
NATIVE_DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}
COMPILERS = ("cc", "gcc", "clang")
BUILD_LIMIT_S = 120

# No contraction: a fused multiply-add rounds once where torch rounds twice.
_FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_WIDE = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
_ATTEMPTS = (("-march=native", *_WIDE, "-fopenmp"), ("-march=native", "-fopenmp"), ())


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """The loaded library. Bit for bit what reference.py computes, for bfloat16 and float32 on CPU."""

    library: ctypes.CDLL

    def encode_groups(self, flat: Tensor, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
        """As reference.encode_groups; ``flat`` contiguous."""
        form, numel = FORMATS[kind], flat.numel()
        codes = torch.empty(form.code_count(numel, group), dtype=form.code_dtype)
        peaks = torch.empty(group_count(numel, group), dtype=flat.dtype)
        function = getattr(self.library, f"encode_{kind}_{NATIVE_DTYPES[flat.dtype]}")
        function.restype = ctypes.c_int64
        bad = function(*_arguments(flat, codes, peaks, numel, group))
        return codes, peaks, torch.full((1,), bad, dtype=torch.int64)

    def decode_groups(self, codes: Tensor, peaks: Tensor, kind: str, group: int, numel: int) -> Tensor:
        """As reference.decode_groups; ``codes`` and ``peaks`` contiguous."""
        flat = torch.empty(numel, dtype=peaks.dtype)
        function = getattr(self.library, f"decode_{kind}_{NATIVE_DTYPES[peaks.dtype]}")
        function.restype = None
        function(*_arguments(codes, peaks, flat, numel, group))
        return flat


def _arguments(first: Tensor, second: Tensor, third: Tensor, numel: int, group: int) -> tuple[object, ...]:
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (first, second, third))
    return (*pointers, ctypes.c_int64(numel), ctypes.c_int64(group), ctypes.c_int(torch.get_num_threads()))


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
            command = [compiler, *_FLAGS, *flags, "-o", target, str(SOURCE), "-lm"]
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
        f"Codec kernels are not built: {reason}. Encoding and decoding run as plain torch operations with the same "
        "results, about 20 times slower; install gcc, or set CC to a C compiler.",
        HiloreWarning,
        stacklevel=3,
    )
