"""The bytes of a checkpoint: those of the library safetensors, without its copies."""

import json

import ml_dtypes
import numpy as np
import pytest

from gpuattn.arrays import BFLOAT16, FLOATS
from gpuattn.errors import CheckpointError
from gpuattn.tensor_file import BLOCK, DTYPES, FORMAT, decode, digest, is_finite, pieces, read


def write(path, *content):
    path.write_bytes(b"".join(pieces(*content)))
    return path


def tensors(value=1.0):
    found = {f"{kind} é": np.full((2, 3), value).astype(dtype) for kind, dtype in DTYPES.items()}
    odd = {"empty": np.zeros((0, 3), "f"), "scalar": np.full((), value), "": np.ones(5, BFLOAT16)}
    return found | odd


def header_of(data):
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size], object_pairs_hook=list), data[8 + size :]


def test_bytes_are_those_of_the_library():
    """But for the order of the metadata, which is random there."""
    from safetensors.numpy import save

    texts = {"format": FORMAT, "metadata": json.dumps({"row": "ü\n\x01", "best": np.inf})}
    want, values = header_of(save(tensors(), texts))
    found, mine = header_of(b"".join(pieces(tensors(), {"row": "ü\n\x01", "best": np.inf})))
    assert mine == values and found[1:] == want[1:]
    assert found[0][0] == want[0][0] and dict(found[0][1]) == dict(want[0][1])
    assert all(len(piece) % 8 == 0 for piece in pieces({}))


def test_nothing_is_copied():
    array = np.ones((50, 7), "f")
    _, piece = pieces({"w": array})
    assert np.shares_memory(piece, array) and piece.dtype == np.uint8


def test_other_dtypes_are_refused():
    with pytest.raises(CheckpointError, match="save: w.dtype is complex128; accepted: uint64,"):
        pieces({"w": np.ones(3, complex)})


def test_views_are_written_with_their_values(tmp_path):
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    found, _ = read(write(tmp_path / "x", {"T": base.T, "step": base[::2, 1::3]}))
    assert (found["T"] == base.T).all() and (found["step"] == base[::2, 1::3]).all()


def test_the_file_is_plain_safetensors(tmp_path):
    from safetensors import safe_open

    path = write(tmp_path / "w", {"w": np.ones(3, np.float32)}, {"update": 1})
    with safe_open(path, "np") as file:
        assert file.metadata()["format"] == "gpuattn/1"
        assert (file.get_tensor("w") == 1).all()
    found, metadata = read(path)
    assert metadata == {"update": 1} and found["w"].sum() == 3


def test_a_duplicate_key_is_refused():
    header = (
        b'{"__metadata__":{"format":"gpuattn/1","metadata":"{}"},'
        b'"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
        b'"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
    )
    data = len(header).to_bytes(8, "little") + header + b"ab"
    with pytest.raises(CheckpointError, match="'w' is in it twice|not a whole safetensors"):
        decode(data, "x")


def test_a_digest_depends_on_names_and_values():
    others = [tensors(3), {key[1:]: a for key, a in tensors(2).items()}, {"w": np.ones(1)}]
    assert len({digest(each) for each in (tensors(2), *others)}) == 4
    assert digest(tensors(2)) == digest(dict(reversed(tensors(2).items())))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_value_that_is_not_finite_is_found_in_each_block(dtype):
    values = np.full((3, BLOCK + 1), ml_dtypes.finfo(dtype).max, dtype)
    values[1] *= -1
    assert is_finite(values) and is_finite(values[:0]) and is_finite(values[0, :1].reshape(()))
    for value in (np.inf, -np.inf, np.nan):
        for place in (0, BLOCK - 1, BLOCK, values.size - 1):
            kept, values.flat[place] = values.flat[place], value
            assert not is_finite(values), (value, place)
            values.flat[place] = kept
    assert is_finite(values)
