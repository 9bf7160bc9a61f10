"""The copy that rivals get has the same weights and metadata."""

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type
from gguf.gguf_writer import GGUFWriter
from gguf.quants import dequantize, quantize

from octavo.bench.plain_gguf import TYPES, write_plain
from octavo.gguf_file import GGUFFile


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "q.gguf"
    matrix = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    writer = GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b\u00e9", ""])
    writer.add_uint32("llama.block_count", 1)
    for name, kind in (("blk.0.attn_q.weight", Type.Q4_1), ("token_embd.weight", Type.Q8_0)):
        writer.add_tensor(name, quantize(matrix, kind), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", matrix[0])
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


@pytest.mark.parametrize("dtype", TYPES)
def test_a_plain_copy_has_the_same_metadata_and_weights(tmp_path, source, dtype):
    target = tmp_path / "plain.gguf"
    write_plain(source, target, dtype)
    before, after = GGUFFile(source), GGUFFile(target)
    assert dict(after.metadata) == dict(before.metadata) and list(after.tensors) == list(before.tensors)
    for name, tensor in after.tensors.items():
        old = before.tensors[name]
        assert tensor.shape == old.shape
        assert tensor.type == (TYPES[dtype] if len(tensor.shape) > 1 else Type.F32)
        wanted = dequantize(before.raw(old), old.type).reshape(-1)
        stored = dequantize(after.raw(tensor), tensor.type).reshape(-1)
        assert np.array_equal(stored, dequantize(quantize(wanted, tensor.type), tensor.type).reshape(-1))
