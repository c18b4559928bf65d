"""The graphs that run on CUDA, compiled here for CPU: bit for bit the reference, and one graph for all lengths."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from hilore.runtime.codecs import compiled, get_codec, native, ops
from hilore.runtime.errors import HiloreWarning

LENGTHS = ((24, 256), (13, 577), (1, 100), (250, 256), (1, 257))


@pytest.mark.parametrize("name", ["int4-g64-cm"])
def test_compiled_graphs_equal_the_reference_and_serve_every_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.find_compiler() is not None, "torch.compile needs a compiler: the compiled path is untested"
    codec = get_codec(name)
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16() for shape in LENGTHS]
    payloads = [codec.encode(tensor).payload for tensor in tensors]
    decoded = [codec.decode(codec.encode(tensor)) for tensor in tensors]
    monkeypatch.setattr(native, "_kernels", [None])
    monkeypatch.setattr(ops, "COMPILED_DEVICES", ("cpu",))
    before = counters["stats"]["unique_graphs"]
    for tensor, expected, values in zip(tensors, payloads, decoded, strict=True):
        encoded = codec.encode(tensor)
        for found, part in zip(encoded.payload, expected, strict=True):
            assert torch.equal(found.view(torch.uint8), part.view(torch.uint8))
        assert torch.equal(codec.decode(encoded), values)
    assert counters["stats"]["unique_graphs"] - before == 2, "one to encode, one to decode"
    assert not compiled._failed


def test_where_nothing_compiles_one_notice_and_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = get_codec("int8-g128")
    x = torch.randn(24, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = codec.encode(x)

    def fails(*_arguments: object) -> None:
        raise torch._inductor.exc.TritonMissing(None)

    monkeypatch.setattr(native, "_kernels", [None])
    monkeypatch.setattr(ops, "COMPILED_DEVICES", ("cpu",))
    monkeypatch.setattr(compiled, "_failed", set())
    monkeypatch.setattr(compiled, "_compiled", lambda *_arguments: fails)
    with pytest.warns(HiloreWarning, match="Codecs cannot be compiled for cpu.*triton") as caught:
        found = codec.encode(x)
    assert len(caught) == 1
    decoded = codec.decode(found)
    assert all(torch.equal(a, b) for a, b in zip(found.payload, expected.payload, strict=True))
    assert torch.equal(decoded, codec.decode(expected))
