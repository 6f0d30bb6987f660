"""A port of this machine for a job's store, held from when it is chosen until the store has served on it.

A number that is only looked up can be given to any connection of the machine before the store listens on it, since
systems give both from one range.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """A TCP port that nobody else is given while this is open, and on which one store can listen.

    A socket is bound to the port and never listens. With SO_REUSEADDR, which torch's TCPStore sets too, Linux lets one
    other socket listen there, and gives the port to no connection and to nobody who asks for a free one. On other
    systems the port is free when this begins, and no more.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":  # elsewhere a bound port may be refused to the store
            holder.close()
        yield port
