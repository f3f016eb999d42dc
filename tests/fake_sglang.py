"""A loopback server that speaks the contract of an SGLang server with our extension, and misbehaves on demand.

Answers are words; how many depends on the prompt alone, so that every choice answers alike. A drafter commits a fixed
number of tokens per step: the accepted proposals, then the target's own token. As a program it takes SGLang's flags,
and its behaviour from the variable FAKE_SGLANG (JSON of ``Behaviour``).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from angelspec.core.bundle import Bundle, BundleDrafter, BundleTarget, load_bundle
from angelspec.core.errors import RequestError
from angelspec.core.modes import mode_family
from angelspec.core.request_label import RequestRecord, parse_label
from angelspec.core.routing import choose_route
from sglang_ext.metrics import Counters


@dataclass
class Behaviour:
    """What the server does."""

    committed: dict[str, int] = field(default_factory=lambda: {"mtp": 2, "dfly": 4})
    """Tokens per step by drafter; one that is not named commits one (nothing is ever accepted)."""
    step_seconds: float = 0.0
    healthy_after: float = 0.0
    never_healthy: bool = False
    extension: bool = True
    """False: plain SGLang."""
    metadata: bool = True
    dies: str | None = None
    """"start": before it listens; "probe": at the first request; "bind": it can't listen, and waits."""
    words: str | None = None
    """The answer, one word per token; None: made from the prompt."""
    break_after: int | None = None
    """Steps after which a stream's connection is closed."""
    end_after: int | None = None
    """Steps after which a stream ends in order, but without its last events."""
    error_after: int | None = None
    """Steps after which a stream reports an error."""
    api_key: str | None = None
    """What requests must carry; None: anything goes."""
    stubborn: bool = False
    """Ignores SIGTERM."""
    child: bool = False
    """Starts a process of its own, which outlives it."""


def small_bundle(drafters=("mtp", "dfly")) -> Bundle:
    return Bundle(
        name="fake",
        target=BundleTarget(source="/models/tiny", mode_family="smollm2"),
        drafters=tuple(
            BundleDrafter(
                name=name, source=f"/drafters/{name}", family="mtp" if name == "mtp" else "block", mode="no-think",
                depth=3 if name == "mtp" else 7, algorithm=None if name == "mtp" else name,
            )
            for name in drafters
        ),
    )  # fmt: skip


class FakeSGLang:
    """The server, in a thread of this process (``with`` starts and stops it)."""

    def __init__(self, bundle: Bundle | None = None, behaviour: Behaviour | None = None, *, address=("127.0.0.1", 0)):
        self.bundle = bundle or small_bundle()
        self.behaviour = behaviour or Behaviour()
        self.speculation = "on"
        self.requests: list[tuple[str, dict]] = []
        self.aborted: list[str] = []
        self.disconnected: list[str] = []
        """Requests whose client left before the end."""
        self.running = 0
        self.most_running = 0
        self.counters = Counters()
        self.calibrations: dict[str, dict] = {}
        self.lock = threading.Lock()
        self.started = time.monotonic()
        self.http = ThreadingHTTPServer(address, _handler(self))
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self):
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()

    def info(self) -> dict:
        state = {"last_gen_throughput": 1.0}
        if self.behaviour.extension:
            state["angelspec"] = {
                "bundle": self.bundle.name, "target": self.bundle.target.source,
                "mode_family": self.bundle.target.mode_family, "speculation": self.speculation,
                "drafters": [
                    {"name": d.name, "algorithm": d.algorithm, "family": d.family, "mode": d.mode, "depth": d.depth,
                     "source": d.source}
                    for d in self.bundle.drafters
                ],
                "costs": None, "calibrations": self.calibrations, "draft_bytes_per_token": 128, "ratios": None,
                "counters": self.counters.as_dict(),
            }  # fmt: skip
        return {"version": "0.5.23", "model_path": self.bundle.target.source, "dtype": "float32",
                "internal_states": [state]}  # fmt: skip

    def words(self, prompt: str, limit: int) -> tuple[list[str], str]:
        """The answer's tokens, and why it ends."""
        if self.behaviour.words is not None:
            words = self.behaviour.words.split(" ")
        else:
            words = [f"w{index}" for index in range(6 + sum(prompt.encode()) % 9)]
        pieces = [word if index == 0 else f" {word}" for index, word in enumerate(words)]
        return pieces[:limit], "length" if limit < len(pieces) else "stop"


@dataclass
class Job:
    """A request that is being answered."""

    rid: str
    steps: list[list[tuple[str, int]]]
    """Tokens by step, with their positions in the draft (0: the target's own)."""
    record: RequestRecord
    name: str
    reason: str


def _handler(server: FakeSGLang):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        # -------------------------------------------------------------------------------------- routes

        def do_GET(self):
            path = urlsplit(self.path).path
            if self.has_no_key():
                return
            if path == "/health":
                behaviour = server.behaviour
                ready = time.monotonic() - server.started >= behaviour.healthy_after and not behaviour.never_healthy
                self.reply(200 if ready else 503, {})
            elif path == "/server_info":
                self.reply(200, server.info())
            else:
                self.reply(404, {"detail": "Not Found"})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
            path = urlsplit(self.path).path
            if self.has_no_key():
                return
            server.requests.append((path, body))
            if path == "/set_internal_state":
                value = body["server_args"]["angelspec_speculation"]
                if isinstance(value, str):
                    self.reply(400, {"object": "error", "message": "Input should be a valid integer"})
                    return
                known = server.behaviour.extension
                if known:
                    server.speculation = "on" if value else "off"
                self.reply(200, [known])
            elif path == "/flush_cache":
                self.reply(200, {})
            elif path == "/abort_request":
                server.aborted.append(body["rid"])
                self.reply(200, {})
            elif path in ("/generate", "/v1/chat/completions"):
                self.answer(body, native=path == "/generate")
            else:
                self.reply(404, {"detail": "Not Found"})

        def has_no_key(self):
            key = server.behaviour.api_key
            if key is None or self.headers["Authorization"] == f"Bearer {key}":
                return False
            self.reply(401, {"error": "Unauthorized"})
            return True

        def reply(self, status, value):
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        # ------------------------------------------------------------------------------------- answers

        def answer(self, body, *, native):
            if server.behaviour.dies == "probe":
                print("the engine crashed: out of coffee", flush=True)
                os._exit(3)
            try:
                job = self.job(body, native=native)
            except RequestError as error:
                if native:
                    self.reply(400, {"error": {"message": str(error)}})
                else:
                    self.reply(400, {"object": "error", "message": str(error), "type": "BadRequest", "code": 400})
                return
            try:
                if body.get("stream"):
                    self.stream(job, body, native=native)
                else:
                    for _ in self.steps(job):
                        pass
                    self.reply(200, self.whole(job, body, native=native))
            except (BrokenPipeError, ConnectionResetError):
                server.disconnected.append(job.rid)
                self.close_connection = True

        def job(self, body, *, native):
            parameters = body["sampling_params"] if native else body
            prompt = str(body.get("text") or body.get("input_ids") or body["messages"][-1]["content"])
            limit = parameters.get("max_new_tokens" if native else "max_tokens") or 128
            pieces, reason = server.words(prompt, limit)
            label = parse_label(parameters.get("custom_params") if server.behaviour.extension else None)
            arguments = body.get("chat_template_kwargs") or {}
            mode = label.mode or mode_family(server.bundle.target.mode_family).mode_of(arguments)
            workload = label.workload or "chat"
            route = choose_route(server.bundle, label, workload=workload, mode=mode, batch_size=1)
            name = route.drafters[0] if route.drafters else "ar"
            name = name if server.behaviour.extension else "ar"
            per_step = 1 if name == "ar" else server.behaviour.committed.get(name, 1)
            record = RequestRecord(route.why, workload, mode)
            steps = []
            for start in range(0, len(pieces), per_step):
                taken = pieces[start : start + per_step]
                positions = [*range(1, len(taken)), 0]
                steps.append(list(zip(taken, positions, strict=True)))
            return Job(body.get("rid", "none"), steps, record, name, reason)

        def steps(self, job):
            """Does the steps one after another; yields each one's tokens. Ended before a client knows it."""
            with server.lock:
                server.running += 1
                server.most_running = max(server.most_running, server.running)
            try:
                yield from self.each_step(job)
            finally:
                with server.lock:
                    server.running -= 1

        def each_step(self, job):
            depth = {d.name: d.depth for d in server.bundle.drafters}.get(job.name, 0)
            for tokens in job.steps:
                time.sleep(server.behaviour.step_seconds)
                if job.rid in server.aborted:
                    job.reason = "abort"
                    return
                job.record.add(job.name, committed=len(tokens), drafted=depth, verified=depth)
                with server.lock:
                    server.counters.steps += 1
                    server.counters.speculative_steps += job.name != "ar"
                yield tokens

        def event(self, value):
            data = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            payload = f"data: {data}\n\n".encode()
            self.wfile.write(f"{len(payload):x}\r\n".encode())
            half = len(payload) // 2  # in two writes, so that characters and lines are torn
            self.wfile.write(payload[:half])
            self.wfile.flush()
            self.wfile.write(payload[half:] + b"\r\n")
            self.wfile.flush()

        def stream(self, job, body, *, native):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            done = []
            if not native:
                self.event(self.chat_event(job, "", (), done, body, role="assistant"))
            for number, tokens in enumerate(self.steps(job)):
                if number == server.behaviour.break_after:
                    self.close_connection = True
                    self.connection.close()
                    raise BrokenPipeError
                if number == server.behaviour.end_after:
                    self.wfile.write(b"0\r\n\r\n")
                    return
                if number == server.behaviour.error_after:
                    self.event({"error": {"message": "the scheduler ran out of memory", "code": 500}})
                    break
                done += tokens
                if native:
                    self.event(self.native_body(job, done, finished=False))
                else:
                    self.event(self.chat_event(job, "".join(text for text, _ in tokens), tokens, done, body))
            else:
                if native:
                    self.event(self.native_body(job, done, finished=True))
                else:
                    self.event(self.chat_event(job, "", (), done, body, reason=job.reason))
                    usage = self.usage(done)
                    self.event({"choices": [], "usage": usage})
            self.event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")

        def chat_event(self, job, text, tokens, done, body, *, reason=None, role=None):
            delta = {"content": text, **({"role": role} if role else {})}
            event = {"id": job.rid, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
            if (body.get("stream_options") or {}).get("continuous_usage_stats"):
                event["usage"] = self.usage(done)
            return {**event, **self.details(job, tokens, body)}

        def details(self, job, tokens, body):
            if not (
                server.behaviour.extension and server.behaviour.metadata and body.get("return_spec_tokens_details")
            ):
                return {}
            pieces = [{"text": text, "position": position} for text, position in tokens]
            return {"angelspec": {"metadata": job.record.metadata.model_dump(), "pieces": pieces}}

        def whole(self, job, body, *, native):
            tokens = [token for step in job.steps for token in step]
            if native:
                return self.native_body(job, tokens, finished=True)
            text = "".join(text for text, _ in tokens)
            choice = {"message": {"role": "assistant", "content": text}, "finish_reason": job.reason}
            if body.get("return_meta_info") and server.behaviour.metadata:
                choice["meta_info"] = self.native_body(job, tokens, finished=True)["meta_info"]
            return {"id": job.rid, "choices": [choice], "usage": self.usage(tokens)}

        def native_body(self, job, tokens, *, finished):
            meta = {"id": job.rid, "prompt_tokens": 5, "completion_tokens": len(tokens), "cached_tokens": 0,
                    "finish_reason": {"type": job.reason} if finished else None}  # fmt: skip
            if server.behaviour.extension:
                meta["angelspec"] = job.record.metadata.model_dump()
                meta["angelspec_positions"] = [position for _, position in tokens]
            return {"text": "".join(text for text, _ in tokens), "output_ids": list(range(len(tokens))),
                    "meta_info": meta}  # fmt: skip

        def usage(self, tokens):
            return {"prompt_tokens": 5, "completion_tokens": len(tokens), "total_tokens": 5 + len(tokens)}

    return Handler


def main(arguments: list[str]) -> None:
    """Run as ``sglang.launch_server``."""
    import signal
    import subprocess

    behaviour = Behaviour(**json.loads(os.environ.get("FAKE_SGLANG", "{}")))
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    print("fake sglang:", " ".join(arguments), flush=True)
    if behaviour.dies == "start":
        print("RuntimeError: the draft model lacks draft.layers.0.weight", flush=True)
        raise SystemExit(7)
    if behaviour.dies == "bind":
        print(
            "ERROR:    [Errno 98] error while attempting to bind on address: in use",
            flush=True,
        )
        print("INFO:     Waiting for application shutdown.", flush=True)
        time.sleep(600)
    if behaviour.child:
        child = subprocess.Popen(
            [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
        )
        print(f"child {child.pid}", flush=True)
    if behaviour.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    bundle = load_bundle(__import__("pathlib").Path(os.environ["ANGELSPEC_BUNDLE"]))
    server = FakeSGLang(bundle, behaviour, address=(options["--host"], int(options["--port"])))
    print("ready to serve", flush=True)
    server.http.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
