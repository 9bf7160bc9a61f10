import re
from pathlib import PurePath

from octavo.config.engine_args import EngineArgs
from octavo.loader.catalogue import catalogue


def test_the_default_model_is_in_the_catalogue():
    assert EngineArgs().model in catalogue()


def test_every_entry_is_complete():
    for name, entry in catalogue().items():
        assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name), "an alias must not look like a path or a hub id"
        assert PurePath(entry.file).name == entry.file
        assert re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
        assert entry.bytes > 0
        assert entry.wheel.bytes > 0
        assert entry.wheel.requirement == f"{entry.wheel.package}=={entry.wheel.version}"
        assert entry.title and entry.licence
