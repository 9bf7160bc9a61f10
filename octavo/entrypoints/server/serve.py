"""`octavo serve`: options to a running server."""

import atexit
import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

import tyro

from octavo.config.command_line import parse_arguments
from octavo.config.engine_args import EngineArgs
from octavo.config.options import make_engine_args
from octavo.entrypoints.server.listeners import bound_listener, make_tls, warn_if_open
from octavo.entrypoints.server.options import LATER, ServerArgs
from octavo.errors import InvalidInput, short_repr
from octavo.logging import configure_logging


@dataclass(frozen=True, kw_only=True)
class ServeArgs:
    """Serve a model over HTTP, with OpenAI's endpoints under /v1.

    The exit status is 0 after the signal to end (SIGTERM or Ctrl-C) and whatever was still running, 1 if the engine was
    lost, 2 if an option or the model is refused.
    """

    model_tag: tyro.conf.Positional[str | None] = None
    """The model to serve; the same as --model."""
    server: tyro.conf.OmitArgPrefixes[ServerArgs] = field(default_factory=ServerArgs)
    engine: tyro.conf.OmitArgPrefixes[EngineArgs] = field(default_factory=EngineArgs)


def run(argv: Sequence[str]) -> int:
    """Parse, check everything that can be checked without the model, then load it and serve until told to end.

    Returns:
        The exit status.
    """
    args = parse_arguments(ServeArgs, "octavo serve", argv, later=LATER)
    engine = args.engine
    if args.model_tag is not None:
        if engine.model not in (args.model_tag, EngineArgs().model):
            raise InvalidInput(
                f"two models are given: {short_repr(args.model_tag, 200)} and --model={short_repr(engine.model, 200)}; "
                "give one"
            )
        engine = replace(engine, model=args.model_tag)
    options = asdict(make_engine_args(**asdict(engine)))

    server = args.server.checked()
    api_keys = server.read_api_keys()
    configure_logging()
    atexit.register(gc.freeze)  # a last collection over all that is imported would only delay the exit
    with bound_listener(server) as listener:
        tls = make_tls(server)
        warn_if_open(listener, api_keys)
        return _import_serve()(server, options, api_keys, listener, tls)


def _import_serve() -> Callable[..., int]:
    """The server proper, with the web framework and all: imported only when everything else is in order."""
    try:
        from octavo.entrypoints.server.lifecycle import serve
    except ImportError as error:
        raise InvalidInput(f"a server needs the package {error.name}; pip install 'octavo[serve]'") from None
    return serve
