"""A server for tests that speaks the contract of SGLang with our extension, over loopback, at a believable pace."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from angelspec.core.request_label import RequestRecord
from sglang_ext.metrics import Counters

ACCEPTANCE = {"mtp": (1, 0, 2, 3, 1), "dfly": (3, 1, 5, 2, 7, 0, 4), "dfly-think": (2, 4, 1, 3)}
"""Accepted proposals of a drafter's steps, over and over."""
DRAFTERS = [
    {"name": "mtp", "algorithm": "mtp", "family": "mtp", "mode": "no-think", "depth": 3, "source": "mtp"},
    {"name": "dfly", "algorithm": "dfly", "family": "block", "mode": "no-think", "depth": 7, "source": "dfly"},
    {"name": "dfly-think", "algorithm": "dfly", "family": "block", "mode": "high-think", "depth": 7, "source": "x"},
]
ANSWER = """Paper was first made in China, where fibres of mulberry bark were soaked, beaten and dried on a screen.

```python
def merge(left: list[int], right: list[int]) -> list[int]:
    merged = []
    while left and right:
        merged.append((left if left[0] <= right[0] else right).pop(0))
    return merged + left + right
```

From there it travelled along the trade roads: first to Samarkand, then to Baghdad, and later to Europe. Mills driven by
water made it cheap, printing made it needed, and wood pulp made it plentiful.
"""
THINKING = "<think>\nThe question is short, so a short answer will do. Let me order the facts first.\n</think>\n\n"


@dataclass
class DemoServer:
    """Runs in a thread of its own; use it as a context."""

    step_seconds: float = 0.02
    """A step of one row alone; each further row that runs adds a fifth."""
    extension: bool = True
    answer: str = ANSWER
    refuse: Callable[[Mapping[str, Any]], str | None] = lambda body: None
    """Words of a 400 for a request; None: it is taken."""
    break_after: Callable[[Mapping[str, Any]], int | None] = lambda body: None
    """Steps after which the connection of a request is closed; None: never."""
    api_key: str | None = None
    """What requests must carry; None: anything goes."""
    algorithm: str | None = None
    """By which a server without the extension speculates."""
    deterministic: bool = False
    """Whether it says that it heeds seeds."""
    hold_reading: bool = False
    """While it is true no request without a stream is answered."""
    hold: bool = False
    """While it is true no answer goes on behind its first token."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Every chat request that came."""
    running: int = 0
    most_running: int = 0
    abandoned: int = 0
    """Requests whose client went away before the end."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _http: ThreadingHTTPServer | None = None

    def __enter__(self) -> Self:
        self._http = _Quiet(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._http is not None
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        assert self._http is not None
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def info(self) -> dict[str, Any]:
        """Body of /server_info."""
        state: dict[str, Any] = {"max_running_requests": 8}
        if self.extension:
            state["angelspec"] = {
                "bundle": "embedded", "target": "models/smollm2-135m", "mode_family": "smollm2", "speculation": "on",
                "drafters": DRAFTERS, "draft_bytes_per_token": 1024, "ratios": None,
                "counters": Counters(steps=1).as_dict(),
            }  # fmt: skip
        return {"version": "0.5.23", "model_path": "models/smollm2-135m", "speculative_algorithm": self.algorithm,
                "enable_deterministic_inference": self.deterministic, "internal_states": [state]}  # fmt: skip

    def entered(self, by: int) -> int:
        with self._lock:
            self.running += by
            self.most_running = max(self.most_running, self.running)
            return self.running


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def _handler(server: DemoServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else a small event may wait 40 ms for the one before it

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self._has_no_key():
                return
            self._json(200, server.info() if self.path == "/server_info" else {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self._has_no_key():
                return
            if self.path != "/v1/chat/completions":
                self._json(200, {})
                return
            server.bodies.append(body)
            if (words := server.refuse(body)) is not None:
                self._json(400, {"error": {"message": words, "code": 400}})
                return
            if not body.get("stream"):
                while server.hold_reading:
                    time.sleep(0.02)
                self._json(200, {"choices": [{"message": {"content": "x"}, "finish_reason": "length"}]})
                return
            server.entered(1)
            try:
                whole = self._stream(body)
            except (BrokenPipeError, ConnectionResetError):
                server.abandoned += 1
                self.close_connection = True
                whole = False
            finally:
                server.entered(-1)
            if whole:  # only now: who reads it may ask for the next answer before this thread gets on
                self.wfile.write(b"data: [DONE]\n\n")

        def _has_no_key(self) -> bool:
            if server.api_key is None or self.headers["Authorization"] == f"Bearer {server.api_key}":
                return False
            self._json(401, {"error": "Unauthorized"})
            return True

        def _json(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, body: Mapping[str, Any]) -> bool:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.close_connection = True
            self.end_headers()
            steps, breaks = Steps(server, body), server.break_after(body)
            for number, event in enumerate(steps.events()):
                if breaks is not None and number >= breaks:
                    return False
                time.sleep(server.step_seconds * (1 + 0.2 * (server.running - 1)) * (4 if number == 0 else 1))
                self._event(event)
                while server.hold:
                    time.sleep(0.02)
            usage = {"prompt_tokens": 12, "completion_tokens": steps.tokens}
            self._event({"choices": [], "usage": usage})
            return True

        def _event(self, value: Any) -> None:
            self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
            self.wfile.flush()

    return Handler


class Steps:
    """The events of one answer."""

    def __init__(self, server: DemoServer, body: Mapping[str, Any]) -> None:
        self.server, self.body = server, body
        label = body.get("custom_params") or {}
        self.mode = "high-think" if (body.get("chat_template_kwargs") or {}).get("enable_thinking") else "no-think"
        best = "dfly" if self.mode == "no-think" else "dfly-think"
        asked = label.get("route", "auto")
        self.drafter = (best if asked == "auto" else asked) if server.extension else "ar"
        self.why = f"{best} 61.0 tokens/s expected for code at 1 row" if asked == "auto" else "asked for by the request"
        self.cut = label.get("dcut", "auto") != "off"
        prompt = body["messages"][-1]["content"]
        text = (THINKING if self.mode == "high-think" else "") + f"“{prompt}”\n\n{server.answer}"
        self.words = re.findall(r"\s*\S{1,6}", text)[: body.get("max_tokens") or 4096]
        self.tokens = 0
        self.record = RequestRecord(self.why, "code", self.mode)

    def events(self) -> Any:
        depth = {drafter["name"]: drafter["depth"] for drafter in DRAFTERS}.get(self.drafter, 0)
        runs = ACCEPTANCE.get(self.drafter, (0,))
        step = 0
        while self.tokens < len(self.words):
            accepted = min(runs[step % len(runs)], depth) if step else 0
            kept = min(depth, accepted + 2) if self.cut else depth
            positions = [*range(1, accepted + 1), 0]
            words = self.words[self.tokens : self.tokens + len(positions)]
            self.tokens += len(words)
            if step:  # the first token is prefill's
                self.record.add(self.drafter, committed=len(words), drafted=depth, verified=kept)
            finish = "length" if self.tokens >= len(self.words) else None
            event: dict[str, Any] = {
                "choices": [{"index": 0, "delta": {"content": "".join(words)}, "finish_reason": finish}]
            }
            if self.body.get("return_spec_tokens_details") and self.server.extension:
                pieces = [{"text": t, "position": p} for t, p in zip(words, positions, strict=False)]
                event["angelspec"] = {"metadata": self.record.metadata.model_dump(mode="json"), "pieces": pieces}
            yield event
            step += 1
