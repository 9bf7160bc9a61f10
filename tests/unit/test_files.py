"""files: content or one sentence, whatever lies at the path."""

import os
import socket
from pathlib import Path

import pytest

from octavo.errors import InvalidInput, printable, short_repr
from octavo.files import exists, open_regular, read_bounded


def test_a_regular_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(InvalidInput, match="has more than 4 bytes"):
        read_bounded(path, 4)
    (tmp_path / "link").symlink_to(path)
    assert read_bounded(tmp_path / "link", 5) == b"12345"


def test_what_is_no_regular_file_is_refused_with_its_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for path, said in [("pipe", "it is a pipe"), (".", "it is a folder"), ("/dev/zero", "it is a device")]:
            with pytest.raises(InvalidInput, match=said):
                open_regular(Path(path))
        with pytest.raises(InvalidInput, match="socket cannot be read"):
            open_regular(Path("socket"))


@pytest.mark.parametrize("name", ["a" * 3000, "a\0b", "none/none"])
def test_what_cannot_be_opened_is_refused_in_one_sentence(tmp_path, name):
    with pytest.raises(InvalidInput, match="cannot be read") as refusal:
        open_regular(tmp_path / name)
    assert len(str(refusal.value)) < 400


def test_existence_that_cannot_be_told_is_refused(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("none")
    assert exists(tmp_path)
    assert not exists(tmp_path / "none") and not exists(tmp_path / "dangling")
    for name in ("loop", "a" * 3000, "a\0b"):
        with pytest.raises(InvalidInput, match="cannot be read"):
            exists(tmp_path / name)


def test_values_are_cut_to_a_sentence():
    nested = []
    for _ in range(500):
        nested = [nested]
    for value in ("a" * 10**6, [1] * 10**6, {i: i for i in range(1000)}, 10**4000, nested):
        assert len(short_repr(value)) < 300
    assert short_repr([64, "x", None]) == "[64, 'x', None]"
    assert printable("short") == "short" and len(printable("a" * 10**6)) < 300
