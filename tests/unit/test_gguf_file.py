"""The GGUF header reader: same answers as the gguf package, and a file cut anywhere is refused with its size."""

import os
import struct
import time

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import InvalidInput
from octavo.gguf_file import GGUFFile

TOKENS = ["a", "", "ä", "日本", "\n", "x" * 300]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file with every kind of value and a few tensors."""
    path = tmp_path_factory.mktemp("gguf") / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -1)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -2)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -3)
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -4)
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "größe")
    writer.add_array("strings", TOKENS)
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, 2.0])
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", gguf.quantize(np.ones((4, 64), np.float32), Type.Q8_0), raw_dtype=Type.Q8_0)
    writer.add_tensor("c", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_equals_what_the_gguf_package_reads(path):
    reader = gguf.GGUFReader(path)
    expected = {k: field.contents() for k, field in reader.fields.items() if not k.startswith("GGUF.")}
    metadata = GGUFFile(path).metadata
    assert dict(metadata) == expected and len(metadata) == len(expected)
    assert metadata["strings"] == TOKENS and metadata["yes"] is True and metadata["f64"] == 0.1
    assert metadata.array_length("strings") == len(TOKENS)
    with pytest.raises(KeyError):
        metadata["none"]
    with pytest.raises(TypeError):
        metadata.array_length("text")


def test_tensors_lie_where_the_gguf_package_finds_them(path):
    file = GGUFFile(path)
    for expected in gguf.GGUFReader(path).tensors:
        tensor = file.tensors[expected.name]
        assert tensor.shape == tuple(reversed(expected.shape.tolist()))
        assert (tensor.type, tensor.offset, tensor.num_bytes) == (
            expected.tensor_type, expected.data_offset, expected.n_bytes,
        )  # fmt: skip
        assert file.raw(tensor).tobytes() == expected.data.tobytes()


def test_a_tensor_that_was_released_is_read_again(path):
    file = GGUFFile(path)
    before = {name: (file.raw(tensor), file.raw(tensor).tobytes()) for name, tensor in file.tensors.items()}
    for tensor in file.tensors.values():
        file.release(tensor)
    for view, content in before.values():
        assert view.tobytes() == content


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused_with_its_size(path, tmp_path_factory, data):
    whole = path.read_bytes()
    end = max(tensor.offset + tensor.num_bytes for tensor in GGUFFile(path).tensors.values())
    kept = data.draw(st.integers(4, end - 1))
    cut = tmp_path_factory.mktemp("cut") / "cut.gguf"
    cut.write_bytes(whole[:kept])
    with pytest.raises(InvalidInput, match=rf"has {kept} bytes.*not finished"):
        GGUFFile(cut)


def test_a_file_cut_in_its_weights_says_how_many_bytes_are_expected(path, tmp_path):
    cut = tmp_path / "cut.gguf"
    end = max(tensor.offset + tensor.num_bytes for tensor in GGUFFile(path).tensors.values())
    cut.write_bytes(path.read_bytes()[: end - 1])
    with pytest.raises(InvalidInput, match=f"has {end - 1} bytes but its header describes {end}"):
        GGUFFile(cut)


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 900), value=st.integers(0, 255))
def test_a_damaged_header_is_refused_or_read_but_never_crashes(path, tmp_path_factory, position, value):
    damaged = bytearray(path.read_bytes())
    damaged[position] = value
    copy = tmp_path_factory.mktemp("damaged") / "x.gguf"
    copy.write_bytes(damaged)
    try:
        dict(GGUFFile(copy).metadata)
    except InvalidInput as refusal:
        assert "x.gguf" in str(refusal)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has 0 bytes"),
        (b"GG", "is no GGUF file"),
        (b"<html>404</html>", "is no GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "version 1 is not read"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "ends inside its header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63) + b"k", "ends inside its header"),
    ],
)
def test_other_content_is_refused(tmp_path, content, said):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=said):
        GGUFFile(path)


def test_a_path_that_is_no_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(InvalidInput, match="cannot be read"):
            GGUFFile(path)


def test_a_string_that_is_not_utf8_is_refused_with_its_key(path, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(path.read_bytes().replace("größe".encode(), b"gr\xff\xff\xff\xffe"))
    file = GGUFFile(broken)
    with pytest.raises(InvalidInput, match="metadata text is not UTF-8"):
        file.metadata["text"]


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (struct.pack("<IQQ", 3, 2**29, 0), "tensor '' is there twice"),
        (struct.pack("<IQQ", 3, 0, 2**29), "metadata  is there twice"),
        (struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**40), "ends inside its header"),
    ],
    ids=["tensors", "values", "strings"],
)
def test_a_count_over_zeros_is_refused_at_once(tmp_path, head, said):
    path = tmp_path / "zeros.gguf"
    path.write_bytes(b"GGUF" + head)
    os.truncate(path, 100_000_000)
    started = time.process_time()  # a busy machine is not to blame
    with pytest.raises(InvalidInput, match=said):
        GGUFFile(path)
    assert time.process_time() - started < 1
