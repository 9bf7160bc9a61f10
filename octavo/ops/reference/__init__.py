"""The reference platform: every operator in plain torch, one obvious way each. The oracle of all other platforms.

Imports without torch; ReferencePlatform does not.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.ops.reference.platform import ReferencePlatform

__all__ = ["ReferencePlatform"]


def __getattr__(name: str) -> object:
    if name != "ReferencePlatform":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from octavo.ops.reference.platform import ReferencePlatform

    return ReferencePlatform
