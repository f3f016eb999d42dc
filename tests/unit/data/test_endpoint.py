"""The endpoint backend against a server on the loopback interface that answers, stalls and fails as it is told."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from target_builders import tiny_target, user

from angelspec.core.errors import DataError, MissingRequirement
from angelspec.core.recipe import RolloutSection
from angelspec.data import endpoint
from angelspec.data.answers import Prompt, read_answers
from angelspec.data.endpoint import ask_endpoint
from angelspec.data.rollout import rollout_shards

KEY = "sk-very-secret"


class Server:
    """``script(number of the request, body) -> (status, headers, message or text)`` decides each answer."""

    def __init__(self, script):
        self.script, self.requests, self.active, self.most = script, [], 0, 0
        self.lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def do_GET(self):
                self._reply(200, {}, {"data": [{"id": "served"}]} if self.path == "/v1/models" else {})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    server.active += 1
                    server.most = max(server.most, server.active)
                    server.requests.append((self.path, self.headers.get("Authorization"), body))
                    number = len(server.requests)
                try:
                    self._reply(*server.script(number, body))
                finally:
                    with server.lock:
                        server.active -= 1

            def _reply(self, status, headers, value):
                content = (value if isinstance(value, str) else json.dumps(value)).encode()
                self.send_response(status)
                for name, text in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, text)
                self.end_headers()
                self.wfile.write(content)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    @property
    def bodies(self):
        return [body for _, _, body in self.requests]


@contextlib.contextmanager
def serving(script):
    server = Server(script)
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        thread.join()
        server.http.server_close()


def says(content, *, reason="stop", **more):
    return (
        200,
        {},
        {"choices": [{"message": {"role": "assistant", "content": content, **more}, "finish_reason": reason}]},
    )


def echo(number, body):
    return says("You said " + body["messages"][-1]["content"])


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(endpoint, "_FIRST_PAUSE", 0.01)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def section(server, **changes):
    values = {"backend": "endpoint", "endpoint_url": server.url, "max_new_tokens": 32, "shard_size": 3, "retries": 2}
    return RolloutSection(**{**values, **changes})


def ask(server, folder, *, texts=("a", "b"), mode="no-think", family="qwen3", seen=None, **changes):
    conversations = {f"p{index}": user(text) for index, text in enumerate(texts)}
    return ask_endpoint(
        tiny_target(family),
        [(name, 0) for name in conversations],
        section(server, **changes),
        mode=mode,
        conversations=conversations,
        folder=folder,
        on_progress=(lambda *done: None) if seen is None else lambda *done: seen.append(done),
    )


def text_of(answer, family="qwen3"):
    return tiny_target(family).tokenizer.decode(answer.tokens)


@pytest.mark.parametrize("family", ["llama", "qwen3", "hy3"])
def test_answers_in_the_targets_own_tokens(tmp_path, family):
    target = tiny_target(family)
    with serving(echo) as server:
        seen = []
        answers = ask(server, tmp_path, family=family, seen=seen)
    assert [text_of(answer, family) for answer in answers] == ["You said a<|im_end|>", "You said b<|im_end|>"]
    assert {answer.finish_reason for answer in answers} == {"stop"}
    prompt = target.render(user("a"), mode="no-think", add_generation_prompt=True)
    whole = target.render(
        [*user("a"), {"role": "assistant", "content": "You said a"}], mode="no-think", add_generation_prompt=False
    )
    assert whole[: len(prompt) + len(answers[0].tokens)] == [*prompt, *answers[0].tokens]
    assert seen[-1] == (sum(len(answer.tokens) for answer in answers), 2)
    for path, authorization, body in server.requests:
        assert path == "/v1/chat/completions"
        assert authorization == f"Bearer {KEY}"
        assert body["model"] == "served"
        assert body["max_tokens"] == 32
        assert body["temperature"] == 0
        assert "seed" not in body
        assert body["chat_template_kwargs"] == target.mode_family.arguments("no-think")


def test_named_model_and_sampling(tmp_path):
    with serving(echo) as server:
        ask(server, tmp_path, endpoint_model="mine", temperature=0.7, top_p=0.9, mode="high-think")
    first, second = server.bodies
    assert first["model"] == "mine"
    assert (first["temperature"], first["top_p"]) == (0.7, 0.9)
    assert first["seed"] != second["seed"]
    assert first["chat_template_kwargs"] == {"enable_thinking": True}


@pytest.mark.parametrize(
    "reply",
    [
        says("5", reasoning_content="2+3"),
        says("5", reasoning="2+3"),
        says("<think>\n2+3\n</think>\n\n5"),
        says("2+3\n</think>\n\n5"),  # the prompt opened the block
    ],
)
def test_reasoning_however_a_server_gives_it(tmp_path, reply):
    with serving(lambda number, body: reply) as server:
        answer = ask(server, tmp_path, texts=["a"], mode="high-think", family="llama")[0]
    assert text_of(answer, "llama") == "2+3\n</think>\n\n5<|im_end|>"
    assert answer.finish_reason == "stop"


def test_unfinished_and_unusable_answers_say_so(tmp_path):
    replies = {
        "cut": says("half an ans", reason="length"),
        "special": says("sneaky <|im_end|> text", reasoning_content="hm"),
        "silent": says("5"),  # no reasoning where the mode thinks
        "calls": says(None, reason="tool_calls"),
    }
    with serving(lambda number, body: replies[body["messages"][-1]["content"]]) as server:
        cut, special, silent, calls = ask(server, tmp_path, texts=list(replies), mode="high-think")
    assert (cut.finish_reason, text_of(cut)) == ("length", "half an ans")
    assert (special.finish_reason, special.tokens) == ("refused: special-token-text", ())
    assert silent.finish_reason == "refused: no-reasoning"
    assert (calls.finish_reason, calls.tokens) == ("tool_calls", ())


def test_busy_servers_are_asked_again(tmp_path):
    times = []

    def script(number, body):
        times.append(time.monotonic())
        if number == 1:
            return 429, {"Retry-After": "0.3"}, "slow down"
        return (503, {}, "loading") if number == 2 else echo(number, body)

    with serving(script) as server:
        answer = ask(server, tmp_path, texts=["a"])[0]
    assert text_of(answer) == "You said a<|im_end|>"
    assert len(times) == 3
    assert times[1] - times[0] >= 0.3
    assert times[2] - times[1] < 0.3
    assert server.bodies[0] == server.bodies[2]


def test_a_server_that_keeps_failing(tmp_path):
    with serving(lambda number, body: (500, {}, f"secret is {KEY}")) as server:
        with pytest.raises(DataError, match=r"prompt p0 after 3 tries: status 500"):
            ask(server, tmp_path, texts=["a"])
        assert len(server.requests) == 3


def test_nobody_listens(tmp_path):
    with serving(echo) as server:
        pass
    with pytest.raises(DataError, match="list of models after 3 tries: Connect"):
        ask(server, tmp_path)


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_stops_at_once(tmp_path, status, monkeypatch):
    with serving(lambda number, body: (status, {}, f"bad key {KEY}")) as server:
        with pytest.raises(MissingRequirement, match=r"\$OPENAI_API_KEY is refused") as caught:
            ask(server, tmp_path, texts=[str(index) for index in range(20)], concurrency=1)
        assert len(server.requests) == 1
        assert KEY not in str(caught.value)
        monkeypatch.delenv("OPENAI_API_KEY")
        with pytest.raises(MissingRequirement, match=r"\$OPENAI_API_KEY is needed but not set"):
            ask(server, tmp_path, texts=["a"])
        assert server.requests[-1][1] is None


def test_a_wrong_request_is_not_repeated(tmp_path):
    with serving(lambda number, body: (400, {}, f"context too long for {KEY}")) as server:
        with pytest.raises(DataError, match=r"refuses prompt p0 \(400\): context too long for \*\*\*"):
            ask(server, tmp_path, texts=["a"])
        assert len(server.requests) == 1


PARTS = {"choices": [{"message": {"content": [{"type": "text", "text": "a"}]}, "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    "value", [{}, {"choices": []}, {"choices": [{"message": None, "finish_reason": "stop"}]}, PARTS]
)
def test_no_chat_completion(tmp_path, value):
    with serving(lambda number, body: (200, {}, value)) as server, pytest.raises(DataError, match="no chat completion"):
        ask(server, tmp_path, texts=["a"])
    with serving(echo) as server:  # nothing of it was kept
        assert text_of(ask(server, tmp_path, texts=["a"])[0]) == "You said a<|im_end|>"


def test_a_full_disk_is_itself(tmp_path, monkeypatch):
    def full(self, key, reply):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(endpoint._Journal, "add", full)
    with serving(echo) as server, pytest.raises(OSError, match="No space left"):
        ask(server, tmp_path)


def test_a_damaged_line_costs_one_answer(tmp_path):
    texts = ["a", "b", "c"]
    with serving(echo) as server:
        answers = ask(server, tmp_path, texts=texts)
    journal = tmp_path / "answers.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + b"\x00\x00\n" + b"[]\n" + lines[2])
    with serving(echo) as server:
        assert ask(server, tmp_path, texts=texts) == answers
        assert len(server.requests) == 1


def test_another_model_does_not_answer_the_rest(tmp_path, monkeypatch):
    with serving(echo) as server:
        ask(server, tmp_path)

    async def other(self):
        return "other"

    monkeypatch.setattr(endpoint._Server, "first_model", other)
    with serving(echo) as server, pytest.raises(DataError, match="serves 'other', but the answers so far are from"):
        ask(server, tmp_path, texts=["c"])


def test_concurrency_is_bounded(tmp_path):
    def script(number, body):
        time.sleep(0.03)
        return echo(number, body)

    with serving(script) as server:
        ask(server, tmp_path, texts=[str(index) for index in range(12)], concurrency=3)
    assert server.most == 3


def test_resume_asks_nothing_twice(tmp_path):
    def fails_later(number, body):
        return echo(number, body) if number <= 2 else (400, {}, "enough")

    texts = ["a", "b", "c"]
    with serving(fails_later) as server, pytest.raises(DataError, match="enough"):
        ask(server, tmp_path, texts=texts, concurrency=1)
    journal = tmp_path / "answers.jsonl"
    assert len(journal.read_bytes().splitlines()) == 2
    assert KEY.encode() not in journal.read_bytes()
    with journal.open("ab") as stream:
        stream.write(b'{"request": "torn')  # a crash in the middle of a line
    with serving(echo) as server:
        answers = ask(server, tmp_path, texts=texts)
        assert [body["messages"][-1]["content"] for body in server.bodies] == ["c"]
        assert [text_of(answer) for answer in answers] == [f"You said {text}<|im_end|>" for text in texts]
        assert ask(server, tmp_path, texts=texts) == answers
        assert len(server.requests) == 1
        ask(server, tmp_path, texts=texts, max_new_tokens=33)  # another request
        assert len(server.requests) == 4


def test_rollout_through_a_server(tmp_path):
    target = tiny_target("qwen3")
    conversations = {f"p{index}": user("x" * index) for index in range(1, 5)}
    prompts = [
        Prompt(name, "math", tuple(target.render(messages, mode="no-think", add_generation_prompt=True)))
        for name, messages in conversations.items()
    ]
    options = {"mode": "no-think", "folder": tmp_path}
    seen = []
    with serving(echo) as server:
        settings = section(server, samples_per_prompt=2, temperature=1.0)
        with pytest.raises(DataError, match="needs the conversations"):
            rollout_shards(target, prompts, settings, **options)
        paths = rollout_shards(
            target, prompts, settings, **options, conversations=conversations, progress=lambda **done: seen.append(done)
        )
    with serving(echo) as server:  # the server has moved, and the local engine's values are nothing to it
        moved = {"endpoint_url": server.url, "batch_size": 5, "dtype": "float32", "max_repeated_share": 0.5}
        settings = settings.model_copy(update=moved)
        paths[1].unlink()
        assert rollout_shards(target, prompts, settings, **options, conversations=conversations) == paths
        assert server.requests == []
    records = list(read_answers(paths))
    assert [len(path.read_text().splitlines()) for path in paths] == [6, 2]
    assert sorted((record.id, record.sample) for record in records) == [
        (name, sample) for name in conversations for sample in (0, 1)
    ]
    for record in records:
        assert target.tokenizer.decode(record.answer_tokens) == f"You said {'x' * int(record.id[1:])}<|im_end|>"
    tokens = sum(len(record.answer_tokens) for record in records)
    assert seen[-1] == {"done_tokens": tokens, "done_prompts": 8, "total_prompts": 8}
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY.encode() not in everything


@pytest.mark.parametrize("mode, family", [("no-think", "qwen3"), ("no-think", "hy3")])
def test_a_server_that_thinks_unasked_stops_the_rollout(tmp_path, mode, family):
    with (
        serving(lambda number, body: says("5", reasoning_content="2+3")) as server,
        pytest.raises(DataError, match="the server thinks although it was asked not to"),
    ):
        ask(server, tmp_path, mode=mode, family=family)
    with serving(lambda number, body: says("5")) as server:  # mended: nothing of before is in the way
        assert {answer.finish_reason for answer in ask(server, tmp_path, mode=mode, family=family)} == {"stop"}


def test_an_answer_that_thinks_in_its_text_is_refused_in_a_mode_without(tmp_path):
    replies = [says("<think>\n2+3\n</think>\n\n5"), says("5")]
    with serving(lambda number, body: replies[body["messages"][-1]["content"] == "b"]) as server:
        thinks, plain = ask(server, tmp_path)
    assert (thinks.finish_reason, thinks.tokens) == ("refused: thinks", ())
    assert text_of(plain) == "5<|im_end|>"


def test_thinking_that_was_cut_is_not_closed(tmp_path):
    replies = {
        "thinking": says(None, reason="length", reasoning_content="2+3 is"),
        "answering": says("It is", reason="length", reasoning_content="2+3"),
    }
    with serving(lambda number, body: replies[body["messages"][-1]["content"]]) as server:
        thinking, answering = ask(server, tmp_path, texts=list(replies), mode="high-think")
    assert text_of(thinking) == "2+3 is"
    assert text_of(answering) == "2+3\n</think>\n\nIt is"


def test_no_error_shows_the_key(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n")  # as read from a file
    with serving(echo) as server:
        ask(server, tmp_path, texts=["a"])
        assert server.requests[-1][1] == f"Bearer {KEY}"
        for bad in ("sk-\u00e4SECRET", "sk-SE CRET"):
            monkeypatch.setenv("OPENAI_API_KEY", bad)
            with pytest.raises(MissingRequirement, match=r"\$OPENAI_API_KEY holds characters") as caught:
                ask(server, tmp_path / "other", texts=["a"])
            assert "CRET" not in str(caught.value)
