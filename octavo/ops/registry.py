"""Finds a platform by name: the built-in ones first, then `octavo.platforms` entry points of installed packages."""

from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING

from octavo.config.platform_traits import PlatformTraits
from octavo.errors import InvalidInput, describe
from octavo.logging import get_logger

if TYPE_CHECKING:
    from octavo.ops.interface import Platform

logger = get_logger(__name__)

ENTRY_POINT_GROUP = "octavo.platforms"

_BUILT_IN = {
    "cpu": ("octavo.ops.cpu", "CpuPlatform"),
    "reference": ("octavo.ops.reference", "ReferencePlatform"),
}
_NATIVE = "octavo.ops.cpu._native"
_HOW_TO_GET_IT = (
    "install Octavo again without OCTAVO_NATIVE=0, with a C++ compiler such as g++ (in a checkout: `make native`)"
)


def get_platform(name: str = "auto") -> "Platform":
    """The platform called `name`; "auto" is the fastest built-in one that runs here.

    Raises:
        InvalidInput: no platform of that name is built in or installed, or its native kernels are not there or broken.
    """
    if name == "auto":
        name, reason = choose_platform(name)
        if name == "reference":
            logger.warning("%s", reason)
    if name in _BUILT_IN:
        if name == "cpu":
            _check_native()
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


def choose_platform(name: str = "auto") -> tuple[str, str]:
    """(name, reason) of the platform that `get_platform(name)` would give. Imports nothing of it."""
    if name != "auto":
        return name, "as asked"
    if _has_native():
        return "cpu", "the native kernels are installed"
    return (
        "reference",
        f"this installation has no native kernels: it computes with torch, which is slower; {_HOW_TO_GET_IT}",
    )


def get_traits(name: str, checkpoint_dtype: str) -> PlatformTraits:
    """`get_platform(name).traits(checkpoint_dtype)`, for a built-in platform without importing torch.

    Raises:
        InvalidInput: as `get_platform`.
    """
    name, _ = choose_platform(name)
    if name not in _BUILT_IN:
        return get_platform(name).traits(checkpoint_dtype)
    if name == "cpu":
        _check_native()
    traits: PlatformTraits = import_module(f"{_BUILT_IN[name][0]}.traits").platform_traits(checkpoint_dtype)
    return traits


def _check_native() -> None:
    if not _has_native():
        raise InvalidInput(
            f"platform='cpu' needs the native kernels, and this installation has none; {_HOW_TO_GET_IT}, "
            "or use platform='reference'"
        )
    try:
        import_module(_NATIVE)
    except ImportError as error:
        raise InvalidInput(
            f"the native kernels are installed but cannot be loaded ({describe(error)}); {_HOW_TO_GET_IT}, "
            "or use platform='reference'"
        ) from error


def _has_native() -> bool:
    """Whether there is an extension for this Python, sound or not; nothing is imported for the answer."""
    return find_spec(_NATIVE) is not None
