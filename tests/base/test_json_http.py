"""The machine's certificates are read once, whoever asks."""

from __future__ import annotations

import httpx2
import pytest

from keel.base.json_http import certificates
from keel.rollout.vllm.connection import SamplingServer


def test_they_are_read_once_for_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    certificates.cache_clear()
    made, real = [], httpx2.create_ssl_context

    def counting(*args: object, **options: object) -> object:
        made.append(options)
        return real(*args, **options)

    monkeypatch.setattr(httpx2, "create_ssl_context", counting)
    server = SamplingServer("http://127.0.0.1:9", headers={})
    for _ in range(3):
        server.client(1.0).close()
    assert certificates(trust_env=False) is certificates(trust_env=False)
    assert len(made) == 1
