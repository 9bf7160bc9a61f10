"""The reference platform: every operator in plain torch, one obvious way each. The oracle of all other platforms."""

from octavo.ops.reference.platform import ReferencePlatform

__all__ = ["ReferencePlatform"]
