"""The exceptions a user may catch.

Everything Octavo refuses because of what the user gave is an `InvalidInput`; it is a `ValueError`, so callers need
not know its name. A `ValueError` that is not an `InvalidInput` is a defect of Octavo.
"""


class InvalidInput(ValueError):
    """An option, field, prompt or file is refused. The message names the value, the limit and the way out."""


class EngineDeadError(RuntimeError):
    """The engine core is gone (closed, killed or failed): nothing can be asked of it any more."""


def not_built(what: str, hint: str = "") -> InvalidInput:
    """The refusal of an option or field whose feature does not exist yet."""
    return InvalidInput(f"{what} is not built yet" + (f"; {hint}" if hint else "; leave it out"))
