"""Safetensors folders: whole ones load, and whatever is missing or cut short is refused with the file's name."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_models import LLAMA, random_weights, write_model

from octavo.errors import InvalidInput
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.safetensors import SafetensorsFiles, read_header

WEIGHTS = random_weights(LLAMA)


def shard(folder, parts=3):
    """Spread model.safetensors over `parts` shards with an index; returns the shards' paths."""
    folder.joinpath("model.safetensors").unlink(missing_ok=True)
    names = sorted(WEIGHTS)
    weight_map = {}
    for number in range(parts):
        file_name = f"model-{number + 1:05}-of-{parts:05}.safetensors"
        mine = names[number::parts]
        save_file({name: WEIGHTS[name] for name in mine}, folder / file_name)
        weight_map |= dict.fromkeys(mine, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return [folder / file_name for file_name in sorted(set(weight_map.values()))]


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model", weights=WEIGHTS)


def assert_holds_all_weights(checkpoint):
    loaded = dict(checkpoint.tensors())
    assert loaded.keys() == WEIGHTS.keys()
    assert all(torch.equal(loaded[name], WEIGHTS[name]) for name in WEIGHTS)
    assert checkpoint.num_weights() == sum(tensor.numel() for tensor in WEIGHTS.values())


def test_one_file_gives_every_tensor(folder):
    assert_holds_all_weights(open_checkpoint(folder))


@pytest.mark.parametrize("parts", [1, 3])
def test_shards_give_every_tensor_once(folder, parts):
    shard(folder, parts)
    assert_holds_all_weights(open_checkpoint(folder))


def test_another_name_of_the_single_file_is_found(folder):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert_holds_all_weights(open_checkpoint(folder))


def test_the_stored_dtype_is_that_of_the_weights_whatever_the_config_says(folder):
    half = {name: tensor.bfloat16() for name, tensor in WEIGHTS.items()}
    save_file(half, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.dtype == "bfloat16"
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in checkpoint.tensors())


def test_a_missing_shard_is_refused_by_name(folder):
    shards = shard(folder)
    shards[1].unlink()
    with pytest.raises(InvalidInput, match=f"{shards[1].name} is missing"):
        open_checkpoint(folder)


def test_an_index_naming_an_absent_tensor_is_refused_by_file_and_tensor(folder):
    shards = shard(folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = shards[2].name
    index.write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match=rf"{shards[2].name} does not hold model.extra.weight"):
        open_checkpoint(folder)


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/passwd", "", 3, "."])
def test_an_index_cannot_point_outside_the_folder(folder, place):
    shard(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": place}}))
    with pytest.raises(InvalidInput, match="no file name of this folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "nothing"])
def test_an_index_without_a_map_is_refused_by_name(folder, content):
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InvalidInput, match=r"model.safetensors.index.json"):
        open_checkpoint(folder)


def test_shards_without_an_index_are_refused(folder):
    shard(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(InvalidInput, match=r"no model.safetensors.index.json"):
        open_checkpoint(folder)


def test_a_folder_of_pytorch_files_says_what_to_do(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InvalidInput, match=r"pytorch_model.bin is not read, convert it to safetensors"):
        open_checkpoint(folder)


@settings(max_examples=60, deadline=None)
@given(fraction=st.floats(0, 1, exclude_max=True))
def test_a_shard_cut_anywhere_is_refused_with_both_sizes(tmp_path_factory, fraction):
    folder = write_model(tmp_path_factory.mktemp("cut"), weights=WEIGHTS)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    kept = int(len(whole) * fraction)
    path.write_bytes(whole[:kept])
    with pytest.raises(InvalidInput, match=rf"model.safetensors has {kept} bytes, expected are \d+"):
        open_checkpoint(folder)


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 9, 100, -1])
def test_the_boundaries_of_the_header_are_no_exception(folder, kept):
    path = folder / "model.safetensors"
    whole = path.read_bytes()[:kept]
    path.write_bytes(whole)
    with pytest.raises(InvalidInput, match=f"has {len(whole)} bytes, expected are"):
        read_header(path)


def test_bytes_behind_the_end_are_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(InvalidInput, match="but its header describes"):
        open_checkpoint(folder)


def test_a_git_lfs_pointer_is_named_as_what_it_is(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(InvalidInput, match="Git LFS pointer"):
        open_checkpoint(folder)


def test_other_content_is_refused(folder):
    (folder / "model.safetensors").write_text("<html>404 not found</html>" * 10)
    with pytest.raises(InvalidInput, match="is no safetensors file"):
        open_checkpoint(folder)


def write_raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("header", [b"[]", b"{", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [1]}}'])
def test_a_header_of_another_form_is_refused(tmp_path, header):
    write_raw(tmp_path / "model.safetensors", header)
    with pytest.raises(InvalidInput, match="not a safetensors header"):
        SafetensorsFiles(tmp_path)


def test_places_that_do_not_fit_the_shape_are_refused_before_anything_is_read(tmp_path):
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}
    write_raw(tmp_path / "model.safetensors", header, b"1234")
    with pytest.raises(InvalidInput, match=r"model.safetensors is not readable"):
        SafetensorsFiles(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [float("inf"), 1]},
        {"shape": [1e308, 1]},
        {"shape": [-1, -1]},
        {"shape": [True]},
        {"shape": [1.0]},
        {"shape": "1"},
        {"shape": [1] * 65},
        {"data_offsets": [0, float("inf")]},
        {"data_offsets": [float("nan"), 4]},
        {"data_offsets": [-4, 0]},
        {"data_offsets": [0]},
        {"data_offsets": [0, 4, 8]},
    ],
    ids=str,
)
def test_sizes_that_are_no_whole_numbers_are_no_header(tmp_path, entry):
    whole = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    write_raw(tmp_path / "model.safetensors", {"a": {**whole, **entry}}, b"1234")
    with pytest.raises(InvalidInput, match="not a safetensors header"):
        SafetensorsFiles(tmp_path)


@pytest.mark.parametrize("entry", [{"shape": [10**300, 64]}, {"shape": [2**62] * 3}, {"data_offsets": [8, 4]}], ids=str)
def test_sizes_that_do_not_fit_the_place_are_refused_with_the_tensor(tmp_path, entry):
    whole = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    write_raw(tmp_path / "model.safetensors", {"a": {**whole, **entry}}, b"1234")
    with pytest.raises(InvalidInput, match="its header gives a the shape") as refusal:
        SafetensorsFiles(tmp_path)
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize("name", ["b" * 3000, "ü" * 200, "a\0", "\ud800", "..", "../a", "", 3])
def test_an_index_that_names_what_cannot_be_a_file_is_refused_in_one_sentence(folder, name):
    shard(folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match=r"no file name of this folder|cannot be read") as refusal:
        open_checkpoint(folder)
    assert len(str(refusal.value)) < 700


def test_quantised_tensors_are_refused_by_name_and_dtype(folder):
    save_file({**WEIGHTS, "model.norm.weight": torch.zeros(64, dtype=torch.int8)}, folder / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"model.norm.weight is I8"):
        open_checkpoint(folder)
