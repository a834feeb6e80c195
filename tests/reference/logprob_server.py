"""A loopback server that answers as vLLM does: `/v1/models`, and `/v1/completions` with `prompt_logprobs`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch


class LogprobServer:
    """Serves a model; `change` alters an answer before it is sent."""

    def __init__(self, model: Any, tokenizer: Any, *, name: str = "teacher", longest: int = 64, most: int = 20) -> None:
        self.model, self.tokenizer, self.name, self.longest, self.most = model.eval(), tokenizer, name, longest, most
        self.change: Callable[[dict[str, Any]], tuple[int, Any]] = lambda answer: (200, answer)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, outer.models() if self.path == "/v1/models" else {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.headers.append(dict(self.headers))
                self.reply(*outer.complete(body))

            def reply(self, status: int, answer: Any) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def models(self) -> dict[str, Any]:
        cards = [{"id": name, "object": "model", "max_model_len": self.longest} for name in (self.name, "an-adapter")]
        return {"object": "list", "data": cards}

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        ids, k = body["prompt"], body["prompt_logprobs"]
        refusal = None
        if k > self.most:
            refusal = f"Requested prompt logprobs of {k}, which is greater than max allowed: {self.most}"
        if len(ids) + body["max_tokens"] > self.longest:
            refusal = f"maximum context length is {self.longest} tokens"
        if max(ids) >= self.model.config.vocab_size:
            refusal = f"Token id {max(ids)} is out of vocabulary"
        if refusal is not None:
            return 400, {"error": {"message": refusal, "type": "BadRequestError", "code": 400}}
        with self._lock, torch.no_grad():
            self.asked.append(body)
            logprobs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        entries: list[Any] = [None]
        for row, token in zip(logprobs[:-1], ids[1:], strict=True):
            top = row.topk(k).indices.tolist()
            entries.append(
                {
                    str(each): {
                        "logprob": row[each].item(),
                        "rank": int((row > row[each]).sum()) + 1,
                        "decoded_token": self.tokenizer.decode([each]),
                    }
                    for each in dict.fromkeys([token, *top])
                }
            )
        return self.change({"model": body["model"], "choices": [{"index": 0, "text": "", "prompt_logprobs": entries}]})


@contextmanager
def serving(model: Any, tokenizer: Any, **options: Any) -> Iterator[LogprobServer]:
    server = LogprobServer(model, tokenizer, **options)
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join()
