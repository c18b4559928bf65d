"""Codecs: what a payload holds, how far it is from the tensor, and that the kernels compute the reference."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hilore.runtime.codecs import CODEC_NAMES, Encoded, get_codec, native, ops, reference, warm_up
from hilore.runtime.codecs.base import CHUNK_ELEMENTS, FLOAT_DTYPES
from hilore.runtime.errors import CodecError, CodecRefused, HiloreWarning

GROUPED = {"int8-g128": ("int8", 128), "int8-g64": ("int8", 64), "int4-g64": ("int4", 64), "fp8-e4m3": ("e4m3", 128)}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "permuted": lambda t: t.permute(1, 2, 0),
    "channels of a fused projection": lambda t: t[..., 3:40],
    "every other row": lambda t: t[:, ::2],
    "every other column": lambda t: t[..., ::2],
    "expanded": lambda t: t[:, :1].expand(-1, 6, -1),
    "one row": lambda t: t[1],
    "one element": lambda t: t[1, 2, 3],
    "empty": lambda t: t[:, :0],
}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_names() -> None:
    assert set(CODEC_NAMES) == {*GROUPED, "exact-bf16"}
    assert [get_codec(name).name for name in CODEC_NAMES] == list(CODEC_NAMES)
    assert [name for name in CODEC_NAMES if get_codec(name).lossless] == ["exact-bf16"]
    with pytest.raises(CodecError, match="Unknown codec 'int8-g12'; did you mean 'int8-g128'") as caught:
        get_codec("int8-g12")
    assert caught.value.codec == "int8-g12"


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_any_layout_round_trips(name: str, layout: str, dtype: torch.dtype) -> None:
    codec = get_codec(name)
    base = normal(5, 6, 300, dtype=dtype)
    tensor = LAYOUTS[layout](base)
    before, version = base.clone(), base._version
    encoded = codec.encode(tensor)
    decoded = codec.decode(encoded)
    assert (decoded.shape, decoded.dtype, decoded.stride()) == (tensor.shape, dtype, encoded.stride)
    assert decoded.stride() == torch.empty_like(tensor).stride()
    assert torch.equal(base, before)
    assert base._version == version
    storages = {part.untyped_storage()._cdata for part in encoded.payload}
    assert tensor.untyped_storage()._cdata not in storages
    held = sum(part.untyped_storage().nbytes() for part in encoded.payload)
    assert held == encoded.nbytes
    raw = name == "exact-bf16" and (dtype != torch.float32 or tensor.numel() > 0)
    assert encoded.raw == raw
    assert held == (tensor.numel() * tensor.element_size() if raw else codec.nbytes(tensor.shape, dtype))
    scale = tensor.abs().max() if tensor.numel() else 0
    tolerance = {"int8": 1 / 254, "int4": 1 / 14, "e4m3": 1 / 16}.get(GROUPED.get(name, ("exact",))[0], 0)
    assert bool(((decoded - tensor).abs() <= scale * (tolerance + 2**-8)).all())


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "expected"),
    [
        ("int8-g128", (1024, 2752), torch.bfloat16, 1024 * 2752 + 1024 * 2752 // 128 * 2),
        ("int8-g128", (257,), torch.bfloat16, 257 + 3 * 2),
        ("int8-g128", (257,), torch.float32, 257 + 3 * 4),
        ("int8-g64", (2, 64), torch.float16, 128 + 2 * 2),
        ("int4-g64", (2, 64), torch.bfloat16, 64 + 2 * 2),
        ("int4-g64", (65,), torch.bfloat16, 33 + 2 * 2),
        ("int4-g64", (67,), torch.bfloat16, 34 + 2 * 2),
        ("fp8-e4m3", (129,), torch.float64, 129 + 2 * 8),
        ("int8-g128", (0, 7), torch.bfloat16, 0),
        ("int8-g128", (), torch.bfloat16, 3),
        ("exact-bf16", (5, 7), torch.float32, 70),
        ("exact-bf16", (5, 7), torch.bfloat16, 70),
    ],
)
def test_payload_bytes(name: str, shape: tuple[int, ...], dtype: torch.dtype, expected: int) -> None:
    assert get_codec(name).nbytes(shape, dtype) == expected
    assert get_codec(name).encode(torch.zeros(shape, dtype=dtype)).nbytes == expected


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("name", GROUPED)
def test_error_stays_within_the_documented_bound(name: str, dtype: torch.dtype) -> None:
    kind, group = GROUPED[name]
    spread = torch.logspace(-3, 3, 40).unsqueeze(1)
    x = (normal(40, group) * spread).to(dtype)
    decoded = get_codec(name).decode(get_codec(name).encode(x)).double()
    exact, peak = x.double(), x.double().abs().amax(1, keepdim=True)
    rounding = peak * torch.finfo(dtype).eps
    levels = reference.FORMATS[kind].levels
    bound = peak * 2**-18 + exact.abs() * 2**-4 if kind == "e4m3" else peak / (2 * levels)
    assert bool(((decoded - exact).abs() <= bound * (1 + 1e-6) + rounding).all())
    largest = exact.abs() == peak
    assert torch.equal(decoded[largest], exact[largest])


@pytest.mark.parametrize(
    ("name", "known"), [("int8-g64", 0.0053), ("int8-g128", 0.0059), ("int4-g64", 0.090), ("fp8-e4m3", 0.0257)]
)
def test_relative_error_on_gaussian_values(name: str, known: float) -> None:
    """Against the step of each group over sqrt(12), and against figures known for Gaussian values.

    The known integer figures are of asymmetric codecs (a step of range / (2^b - 1)). Ours spare the zero point's
    bytes; their step 2 amax / (2^b - 2) is larger, as 2 amax is larger than the range.
    """
    x = normal(1 << 20)
    error = float((get_codec(name).decode(get_codec(name).encode(x)) - x).norm() / x.norm())
    kind, group = GROUPED[name]
    if kind == "e4m3":
        assert error == pytest.approx(known, rel=0.1)
        return
    groups = x.view(-1, group)
    steps = groups.abs().amax(1) / reference.FORMATS[kind].levels
    assert error == pytest.approx(float(steps.square().mean().sqrt()) / 12**0.5, rel=0.01)
    asymmetric = (groups.amax(1) - groups.amin(1)) / (2 * reference.FORMATS[kind].levels + 1)
    assert known == pytest.approx(float(asymmetric.square().mean().sqrt()) / 12**0.5, rel=0.1)
    assert known * 1.05 < error < known * 1.22


def awkward(dtype: torch.dtype) -> Iterator[Tensor]:
    """Lengths around the groups, magnitudes from subnormal to near the largest, zeros of both signs, ties."""
    for length in (0, 1, 2, 63, 64, 65, 127, 128, 129, 1000, 40_001):
        yield normal(length, seed=length).to(dtype)
    limit = 4 if dtype == torch.float16 else 37
    powers = torch.logspace(-44, limit, 64 * 128, dtype=torch.float64)
    yield (normal(64 * 128).clamp(-3, 3).double() * powers).to(dtype)
    yield torch.tensor([0.0, -0.0] * 100).to(dtype)
    yield torch.cat([torch.arange(-127, 128) / 2, torch.tensor([127.0])]).to(dtype)
    yield torch.full((200,), torch.finfo(dtype).max, dtype=dtype)
    yield torch.full((200,), torch.finfo(dtype).smallest_normal * 2**-5, dtype=dtype)


@pytest.mark.parametrize("group", [64, 128, 24])
@pytest.mark.parametrize("kind", ["int8", "int4", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_equal_the_reference_bit_for_bit(dtype: torch.dtype, kind: str, group: int) -> None:
    kernels = native.native_kernels()
    assert kernels is not None, "this machine has no C compiler: the fused path is untested"
    threads = torch.get_num_threads()
    for x in awkward(dtype):
        expected = reference.encode_groups(x, kind, group)
        assert int(expected[2]) == 0
        for count in (1, 2):
            try:
                torch.set_num_threads(count)
                found = kernels.encode_groups(x, kind, group)
                decoded = kernels.decode_groups(found[0], found[1], kind, group, x.numel())
            finally:
                torch.set_num_threads(threads)
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True))
            assert torch.equal(bits(decoded), bits(reference.decode_groups(*expected[:2], kind, group, x.numel())))
    for value in (float("nan"), float("inf"), float("-inf")):
        x = normal(1000).to(dtype)
        x[[3, 999]] = value
        assert int(kernels.encode_groups(x, kind, group)[2]) == int(reference.encode_groups(x, kind, group)[2]) == 2


@pytest.mark.parametrize("name", GROUPED)
def test_a_gapped_tensor_has_the_payload_of_its_dense_copy(name: str) -> None:
    for base, view in product(
        [normal(3, 700, 520)],
        (
            LAYOUTS["every other row"],
            LAYOUTS["every other column"],
            lambda t: t[..., 7:300],
            lambda t: t.transpose(0, 1)[::3],
        ),
    ):
        gapped = view(base)
        found, expected = (get_codec(name).encode(t) for t in (gapped, torch.empty_like(gapped).copy_(gapped)))
        assert found.stride == expected.stride
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found.payload, expected.payload, strict=True))


class Largest(TorchDispatchMode):
    """The largest storage that an operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor):
                self.sizes.append(tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("kind", ["int8", "int4", "e4m3"])
def test_the_reference_works_in_chunks(kind: str) -> None:
    x = normal(5 * CHUNK_ELEMENTS + 100).bfloat16()
    own = {x.untyped_storage().nbytes()}
    with Largest() as mode:
        codes, peaks, _ = reference.encode_groups(x, kind, 128)
    kept = {part.untyped_storage().nbytes() for part in (codes, peaks)}
    assert max(size for size in mode.sizes if size not in kept | own) <= CHUNK_ELEMENTS * 4
    with Largest() as mode:
        flat = reference.decode_groups(codes, peaks, kind, 128, x.numel())
    kept.add(flat.untyped_storage().nbytes())
    assert max(size for size in mode.sizes if size not in kept) <= CHUNK_ELEMENTS * 4


def test_a_dispatch_mode_sees_one_operator() -> None:
    codec = get_codec("int8-g128")
    x = normal(64, 128).bfloat16()
    with Largest() as mode:
        encoded = codec.encode(x)
    assert [name for name in mode.names if name.startswith("hilore")] == ["hilore.encode_groups.default"]
    assert x.untyped_storage().nbytes() >= max(mode.sizes)
    with Largest() as mode:
        codec.decode(encoded)
    assert [name for name in mode.names if name.startswith("hilore")] == ["hilore.decode_groups.default"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_fake_tensors(name: str, layout: str) -> None:
    codec = get_codec(name)
    real = codec.encode(LAYOUTS[layout](normal(5, 6, 300).bfloat16().float()))
    with FakeTensorMode():
        encoded = codec.encode(LAYOUTS[layout](torch.empty(5, 6, 300)))
        decoded = codec.decode(encoded)
    assert [(part.shape, part.dtype) for part in encoded.payload] == [(part.shape, part.dtype) for part in real.payload]
    assert (encoded.shape, encoded.stride, encoded.raw) == (real.shape, real.stride, False)
    assert (decoded.shape, decoded.stride(), decoded.dtype) == (real.shape, real.stride, torch.float32)


def test_operators_pass_torchs_own_checks() -> None:
    x = normal(300)
    torch.library.opcheck(torch.ops.hilore.encode_groups.default, (x, "int8", 128))
    codes, peaks, _ = ops.encode_groups(x, "int4", 64)
    torch.library.opcheck(torch.ops.hilore.decode_groups.default, (codes, peaks, "int4", 64, 300))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_inside_autograd_hooks_autocast_and_the_backward_thread(name: str, dtype: torch.dtype) -> None:
    codec = get_codec(name)
    x = normal(40, 64, dtype=dtype).requires_grad_()

    def loss() -> Tensor:
        return (x.exp() * x.sin()).float().sum()

    with (
        torch.autograd.graph.saved_tensors_hooks(codec.encode, codec.decode),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        hooked = loss()
    assert torch.equal(hooked, loss())
    hooked.backward()
    (exact,) = torch.autograd.grad(loss(), x)
    assert x.grad is not None
    error = (x.grad - exact).norm() / exact.norm()
    assert error <= {"exact-bf16": 0.0, "int4-g64": 0.3}.get(name, 0.05)
    with torch.inference_mode():
        assert torch.equal(codec.decode(codec.encode(x)), codec.decode(codec.encode(x.detach().clone())))


def test_payloads_decode_in_any_order_and_twice() -> None:
    codec = get_codec("int8-g64")
    tensors = [normal(30, 64, seed=seed) for seed in range(5)]
    payloads = [codec.encode(tensor) for tensor in tensors]
    expected = [codec.decode(codec.encode(tensor)) for tensor in tensors]
    for index in (3, 0, 4, 1, 2):
        first = codec.decode(payloads[index])
        assert torch.equal(first, expected[index])
        first.zero_()
        assert torch.equal(codec.decode(payloads[index]), expected[index])


def test_exact_bf16_keeps_every_bit() -> None:
    codec = get_codec("exact-bf16")
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    x = patterns.view(torch.float32)  # all bfloat16 values: infinities, NaN payloads, subnormals, both zeros
    encoded = codec.encode(x)
    assert not encoded.raw
    assert encoded.nbytes == 2 << 16
    assert torch.equal(codec.decode(encoded).view(torch.int32), patterns)


def test_exact_bf16_stores_what_is_no_upcast_as_it_is_and_counts_it() -> None:
    codec = get_codec("exact-bf16")
    x = normal(3 * CHUNK_ELEMENTS // 2).bfloat16().float()
    x[-1] = 1 + 2**-20
    before = codec.stored_raw
    encoded = codec.encode(x)
    assert (encoded.raw, codec.stored_raw, encoded.nbytes) == (True, before + 1, 4 * x.numel())
    kept = x.clone()
    x.zero_()
    assert torch.equal(codec.decode(encoded), kept)


def test_what_a_codec_refuses() -> None:
    for name in CODEC_NAMES:
        codec = get_codec(name)
        for dtype in (torch.int64, torch.bool, torch.complex64, torch.uint8, torch.float8_e4m3fn):
            with pytest.raises(CodecRefused, match=f"{name}: cannot encode {dtype}"):
                codec.encode(torch.zeros(4).to(dtype))
            with pytest.raises(CodecRefused):
                codec.nbytes((4,), dtype)
        with pytest.raises(CodecRefused, match="layout"):
            codec.encode(torch.eye(3).to_sparse())
    with pytest.raises(CodecError, match="asked to decode a payload made by 'int8-g64'"):
        get_codec("int8-g128").decode(get_codec("int8-g64").encode(torch.ones(3)))


def test_encoded_is_frozen() -> None:
    encoded = get_codec("int8-g128").encode(torch.ones(3))
    assert isinstance(encoded, Encoded)
    assert not hasattr(encoded, "__dict__")
    with pytest.raises(AttributeError):
        encoded.raw = True  # type: ignore[misc]


@pytest.mark.parametrize("reason", ["absent", "broken"])
def test_without_a_compiler_one_notice_and_the_same_results(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(300, 70).bfloat16()
    expected = [get_codec(name).encode(x).payload for name in GROUPED]
    monkeypatch.setattr(native, "_kernels", [])
    monkeypatch.setenv("CC", "no-such-compiler" if reason == "absent" else "false")
    with pytest.warns(HiloreWarning, match="Codec kernels are not built") as caught:
        found = [get_codec(name).encode(x).payload for name in GROUPED]
    assert len(caught) == 1
    assert ("no C compiler was found" in str(caught[0].message)) == (reason == "absent")
    assert "set CC" in str(caught[0].message)
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_codec("int8-g128").encode(x)


def test_warm_up_builds_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_kernels", [])
    warm_up(["int8-g128"], [torch.bfloat16])
    assert len(native._kernels) == 1
    assert native._kernels[0] is not None
    with pytest.raises(CodecError, match="Unknown codec"):
        warm_up(["int9"], [torch.bfloat16])
