"""The process an engine core runs in: `python -m octavo.engine.core_process`. Started by `core_launcher` only.

It ends when it is told to, or by itself when its parent has died. Two signs of that: its standard input, a pipe that
only the parent writes to, is at its end; or it has another parent. (A parent-death signal would follow the thread that
started this process, not the parent as a whole, and would leave the sockets' folder behind.) Either way it removes the
sockets' folder, which a parent that ends in a hurry may leave.
"""

import argparse
import atexit
import gc
import os
import select
import shutil
import signal
import sys
import threading

CLIENT_SOCKET = "client"
CORE_SOCKET = "core"
"""Names of the sockets in their folder."""

_PARENT_CHECK_SECONDS = 1.0


def main() -> int:
    """Serve until told to stop. Exit status 0, or 1 if the core failed."""
    parser = argparse.ArgumentParser(description="Serves an engine core. Not to be started by hand.")
    parser.add_argument("socket_dir")
    parser.add_argument("parent_pid", type=int)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    watch = threading.Thread(target=_end_with_parent, args=(args.parent_pid, args.socket_dir), daemon=True)
    watch.start()

    import zmq  # only now: from here on loading takes seconds, and the parent may die meanwhile

    from octavo.engine.core_server import CoreServer
    from octavo.logging import configure_logging

    configure_logging()
    atexit.register(gc.freeze)  # a last collection over all of torch takes most of a second, and the parent waits
    inbox, outbox = (f"ipc://{args.socket_dir}/{name}" for name in (CORE_SOCKET, CLIENT_SOCKET))
    try:
        with zmq.Context() as context:
            return 0 if CoreServer(context, inbox, outbox).run() else 1
    finally:
        shutil.rmtree(args.socket_dir, ignore_errors=True)


def _end_with_parent(parent_pid: int, socket_dir: str) -> None:
    stdin = 0
    while os.getppid() == parent_pid:
        if select.select([stdin], [], [], _PARENT_CHECK_SECONDS)[0] and not os.read(stdin, 1):
            break
    shutil.rmtree(socket_dir, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
