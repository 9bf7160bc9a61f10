"""Finding a platform by name."""

import importlib.machinery
import importlib.metadata
import logging
import sys

import pytest

from octavo.errors import InvalidInput
from octavo.ops import registry
from octavo.ops.reference import ReferencePlatform

NATIVE = "octavo.ops.cpu._native"


class ForeignPlatform(ReferencePlatform):
    name = "foreign"


@pytest.fixture
def installed_native(monkeypatch, tmp_path):
    """Puts a file in the place of the extension, or takes the extension away (None)."""

    def install(content: bytes | None) -> None:
        import octavo.ops.cpu

        if content is not None:
            (tmp_path / f"_native{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(content)
        # the folder alone, so that this machine's own extension is not seen; what is loaded comes back afterwards
        monkeypatch.setattr(octavo.ops.cpu, "__path__", [str(tmp_path)])
        for name in [name for name in sys.modules if name.startswith("octavo.ops.cpu.")]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()

    return install


def test_the_reference_platform_is_found_by_name():
    assert isinstance(registry.get_platform("reference"), ReferencePlatform)


def test_auto_is_the_cpu_platform_where_the_extension_is_installed():
    pytest.importorskip(NATIVE)
    assert registry.get_platform("auto").name == "cpu"
    assert registry.get_platform("cpu").name == "cpu"


def test_auto_without_the_extension_is_the_reference_and_says_how_to_get_the_kernels(installed_native, caplog):
    installed_native(None)
    with caplog.at_level(logging.WARNING, logger="octavo"):
        assert registry.get_platform("auto").name == "reference"
    (record,) = caplog.records
    assert "no native kernels" in record.getMessage()
    assert "OCTAVO_NATIVE=0" in record.getMessage()


def test_cpu_without_the_extension_is_refused_with_the_way_out(installed_native):
    installed_native(None)
    with pytest.raises(InvalidInput, match=r"platform='cpu' needs the native kernels.*OCTAVO_NATIVE=0.*'reference'"):
        registry.get_platform("cpu")


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_a_damaged_extension_is_told_and_not_taken_for_a_missing_one(installed_native, name):
    installed_native(b"no shared object")
    with pytest.raises(InvalidInput, match=r"installed but cannot be loaded \(ImportError: .*_native"):
        registry.get_platform(name)


def test_an_unknown_platform_is_refused_and_the_known_ones_are_listed():
    with pytest.raises(InvalidInput, match=r"'cuda'.*auto, cpu, reference"):
        registry.get_platform("cuda")


def test_an_installed_entry_point_gives_a_platform_but_never_replaces_a_built_in(monkeypatch):
    here = f"{__name__}:ForeignPlatform"
    points = [
        importlib.metadata.EntryPoint(name, here, registry.ENTRY_POINT_GROUP) for name in ("foreign", "reference")
    ]
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: ForeignPlatform)
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    assert registry.get_platform("foreign").name == "foreign"
    assert registry.get_platform("reference").name == "reference"


def test_the_default_dtype_comes_with_a_reason():
    dtype, reason = registry.get_platform("reference").default_dtype("bfloat16")
    assert dtype == "float32"
    assert "bfloat16" in reason
