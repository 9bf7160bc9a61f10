"""Finds a platform by name: the built-in ones first, then `octavo.platforms` entry points of installed packages."""

from importlib import import_module
from importlib.metadata import entry_points

from octavo.errors import InvalidInput
from octavo.ops.interface import Platform

ENTRY_POINT_GROUP = "octavo.platforms"

_BUILT_IN = {"reference": ("octavo.ops.reference", "ReferencePlatform")}
_AUTO = "reference"


def get_platform(name: str = "auto") -> Platform:
    """The platform called `name`; "auto" is the fastest built-in one that runs here.

    Raises:
        InvalidInput: no platform of that name is built in or installed.
    """
    name = _AUTO if name == "auto" else name
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name]
        platform_class: type[Platform] = getattr(import_module(module), attribute)
        return platform_class()
    installed = entry_points(group=ENTRY_POINT_GROUP)
    for entry_point in installed:
        if entry_point.name == name:
            platform: Platform = entry_point.load()()
            return platform
    known = ", ".join(["auto", *_BUILT_IN, *sorted(e.name for e in installed)])
    raise InvalidInput(f"platform={name!r} is not known; use one of {known}, or install the package that provides it")
