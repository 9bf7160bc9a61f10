"""Where the server listens: a port or the path of a Unix socket, with or without TLS. Knows nothing of HTTP.

What holds: an address that is taken and a certificate that cannot be used are refused here, before anything is loaded.
"""

import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from octavo.entrypoints.server.options import ServerArgs
from octavo.errors import InvalidInput, describe, printable, short_repr
from octavo.logging import get_logger

logger = get_logger(__name__)

Tls: TypeAlias = ssl.SSLContext | None


@contextmanager
def bound_listener(args: ServerArgs) -> Iterator[socket.socket]:
    """A socket bound to the address, not listening yet; at the end it is closed, and its path removed.

    Raises:
        InvalidInput: the address cannot be had.
    """
    listener = bind(args)
    try:
        yield listener
    finally:
        listener.close()
        if args.uds is not None:
            with suppress(OSError):
                os.unlink(args.uds)


def bind(args: ServerArgs) -> socket.socket:
    """A socket bound to the address, not listening yet. Raises InvalidInput."""
    if args.uds is not None:
        return _bind_path(args.uds)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise InvalidInput(
            f"host={short_repr(args.host)} is no address to listen at: {describe_os_error(error)}"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = describe_os_error(error)
        raise InvalidInput(
            f"cannot listen at {args.host} port {args.port}: {reason}; choose another --port or --host"
        ) from None
    return listener


def _bind_path(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_behind(path):
            os.unlink(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise InvalidInput(f"uds={short_repr(path, 200)} cannot be listened at: {describe_os_error(error)}") from None
    return listener


def _is_left_behind(path: str) -> bool:
    """Whether there is a socket that nobody listens at any more."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(path) != 0


def make_tls(args: ServerArgs) -> Tls:
    """What HTTPS needs; None without a certificate. Raises InvalidInput."""
    if args.ssl_certfile is None:
        return None
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(args, name)
        if path is not None and not Path(path).is_file():
            raise InvalidInput(f"{name}={short_repr(path, 200)} is no file; check the path")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # the password is always given, or the library would ask for one at the terminal
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password=args.ssl_keyfile_password or "")
        context.verify_mode = ssl.VerifyMode(args.ssl_cert_reqs)
        if args.ssl_ca_certs:
            context.load_verify_locations(args.ssl_ca_certs)
    except (OSError, ValueError) as error:
        named = ", ".join(
            f"{name}={short_repr(getattr(args, name), 200)}"
            for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
            if getattr(args, name)
        )
        raise InvalidInput(
            f"{named}: the certificate cannot be used: {describe_os_error(error)}; check the files"
        ) from None
    return context


def warn_if_open(listener: socket.socket, api_keys: tuple[str, ...]) -> None:
    """Say so if others than this machine's users can use the server."""
    if api_keys or listener.family == socket.AF_UNIX:
        return
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if not address.is_loopback:
        logger.warning(
            "Listening at %s port %d without an API key: everybody on the network can use this server; "
            "set --api-key or --api-key-file to close it, or --host 127.0.0.1 to keep it to this machine",
            host,
            port,
        )


def describe_address(listener: socket.socket, is_tls: bool) -> str:
    """A URL, or the path of a Unix socket."""
    if listener.family == socket.AF_UNIX:
        return str(listener.getsockname())
    host, port = listener.getsockname()[:2]
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def describe_os_error(error: Exception) -> str:
    """What went wrong, without numbers and paths."""
    return printable(getattr(error, "strerror", None) or str(error) or describe(error))
