"""The machine's TLS certificates for HTTP clients."""

from __future__ import annotations

import functools
import ssl


@functools.cache
def certificates(*, trust_env: bool) -> ssl.SSLContext:
    """One SSL context per process. A client without it rereads the certificates: 60 to 100 ms a request."""
    import httpx2

    return httpx2.create_ssl_context(trust_env=trust_env)
