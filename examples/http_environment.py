"""An environment behind HTTP, for `task.name=http`: guess a digit in four turns; the server says higher or lower.

    ENV_TOKEN=secret python examples/http_environment.py --port 8123
    ENV_TOKEN=secret keel train configs/games.yaml run.name=digits rollout.max_turns=4 task='{name: http,
        url: "http://127.0.0.1:8123", headers: {Authorization: Bearer $ENV_TOKEN},
        player: examples.http_environment:player}'

Every request is a POST with a JSON object; docs/environments.md has the protocol. Without ENV_TOKEN no secret is asked
for. The server listens on this machine alone.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import random
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TURNS = 4
FORGET_S = 600  # an episode that was never closed


class Episode:
    """One game: a digit drawn from the seed, and what the guesses have left of the range."""

    def __init__(self, seed: int) -> None:
        self.digit, self.low, self.high = random.Random(seed).randrange(10), 0, 9
        self.turns, self.used = 0, time.monotonic()

    def step(self, text: str) -> dict[str, Any]:
        self.turns, self.used = self.turns + 1, time.monotonic()
        text = text.strip()
        guess = int(text) if text.isdecimal() and text.isascii() and len(text) < 3 else None
        if guess == self.digit:
            return {"reward": 1.0, "done": True, "metrics": {"turns": self.turns}}
        if guess is None:
            told = "a digit, please"
        elif guess < self.digit:
            told, self.low = "higher", max(self.low, guess + 1)
        else:
            told, self.high = "lower", min(self.high, guess - 1)
        done = self.turns == TURNS
        return {"observation": told, "reward": 0.0, "done": done, "low": self.low, "high": self.high}


def player(answer: dict[str, Any], observation: str) -> str:
    """The middle of the range, for the warm start; `answer` is the server's last answer."""
    return str((answer["low"] + answer["high"]) // 2)


class Server(ThreadingHTTPServer):
    """The episodes of a run; each is played by one client, one request after another."""

    daemon_threads = True

    def __init__(self, port: int, token: str = "") -> None:
        self.episodes: dict[str, Episode] = {}
        self.lock, self.token = threading.Lock(), token
        super().__init__(("127.0.0.1", port), Handler)

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to a request, None where there is no such path or episode."""
        if path == "/reset":
            episode, name = Episode(body["seed"]), uuid.uuid4().hex
            with self.lock:
                oldest = time.monotonic() - FORGET_S
                self.episodes = {key: other for key, other in self.episodes.items() if other.used > oldest}
                self.episodes[name] = episode
            return {"id": name, "observation": "guess a digit", "low": 0, "high": 9}
        if path == "/close":
            with self.lock:
                self.episodes.pop(body["id"], None)
            return {}
        found = self.episodes.get(body["id"]) if path == "/step" else None
        return None if found is None else found.step(body["text"])


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"  # a client keeps its connection for the whole episode
    timeout = 60
    disable_nagle_algorithm = True  # header and body are two writes

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            return self.send(401, {"error": "the secret is another one"})
        answer = self.server.answer(self.path, json.loads(body))
        return self.send(404, {"error": "no such path or episode"}) if answer is None else self.send(200, answer)

    def send(self, status: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=8123)
    server = Server(parser.parse_args().port, os.environ.get("ENV_TOKEN", ""))
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
