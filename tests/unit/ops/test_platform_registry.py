"""Finding a platform by name."""

import importlib.metadata

import pytest

from octavo.errors import InvalidInput
from octavo.ops import registry
from octavo.ops.reference import ReferencePlatform


class ForeignPlatform(ReferencePlatform):
    name = "foreign"


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_built_in_platforms_are_found_by_name(name):
    assert isinstance(registry.get_platform(name), ReferencePlatform)


def test_an_unknown_platform_is_refused_and_the_known_ones_are_listed():
    with pytest.raises(InvalidInput, match=r"'cuda'.*auto, reference"):
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
    dtype, reason = registry.get_platform().default_dtype("bfloat16")
    assert dtype == "float32"
    assert "bfloat16" in reason
