"""The machine's certificates, for those who talk to a server."""

from __future__ import annotations

import functools
import ssl


@functools.cache
def certificates(*, trust_env: bool) -> ssl.SSLContext:
    """Read once a process: a client that is made without them reads them anew, 60 to 100 ms for each request."""
    import httpx2

    return httpx2.create_ssl_context(trust_env=trust_env)
