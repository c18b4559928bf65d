"""C-06: a tensor is not its storage pointer. Addresses are reused, and two views of one storage differ in values."""

from __future__ import annotations

import pytest
import torch

from hilore.runtime.codecs import CODEC_NAMES, get_codec


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_reused_addresses_keep_their_own_values(name: str) -> None:
    codec = get_codec(name)
    payloads, addresses = [], []
    memory = bytearray(4 * 40 * 64)  # one address for every tensor, as an allocator may give it
    for value in range(20):
        tensor = torch.frombuffer(memory, dtype=torch.float32).view(40, 64).fill_(float(value))
        addresses.append(tensor.data_ptr())
        payloads.append(codec.encode(tensor))
        del tensor
    assert len(set(addresses)) == 1
    for value, payload in enumerate(payloads):
        assert torch.equal(codec.decode(payload), torch.full((40, 64), float(value)))


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_tensor_and_its_transpose(name: str) -> None:
    codec = get_codec(name)
    square = torch.tensor([[7.0, 0, -7], [0, 7, 0], [7, 7, 0]])
    views = (square, square.t(), square[1:], square[:, 1:])
    payloads = [codec.encode(view) for view in views]
    expected = [codec.decode(codec.encode(view.clone())) for view in views]
    exact = [view.clone() for view in views]
    square.zero_()
    for payload, decoded, values in zip(payloads, expected, exact, strict=True):
        assert torch.equal(codec.decode(payload), decoded)
        assert bool(((decoded.double() - values.double()).abs() <= codec.error_bound(payload)).all())
    if not any(option in name for option in ("-cm", "-h64", "-s8", "-asym")):
        assert all(torch.equal(decoded, values) for decoded, values in zip(expected, exact, strict=True))
