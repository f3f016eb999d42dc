"""What must be survived: inputs that break such tools, each written here and checked by line."""

import json
import re
import subprocess
import sys
import tracemalloc

import pytest

from angelspec.core.errors import DataError
from angelspec.data.check import check_files

USER = {"role": "user", "content": "What is 2+2?"}
ANSWER = {"role": "assistant", "content": "4."}
GOOD = {"id": "ok-1", "conversations": [USER, ANSWER]}


def write(path, rows, *, end="\n"):
    path.write_bytes(b"".join(json.dumps(row).encode() + end.encode() for row in rows))
    return path


def chat(name, *messages, **keys):
    return {"id": name, "conversations": list(messages), **keys}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **keys):
    return {"role": "assistant", "content": content, **keys}


def system(content):
    return {"role": "system", "content": content}


def reasons(result):
    return {row["line"]: row["reason"] for row in result["rejected"]}


def notes(result):
    return {row["line"]: row["note"] for row in result["notes"]}


def test_orders_of_turns_that_no_server_produces_are_named_by_line(tmp_path):  # B1
    path = write(
        tmp_path / "roles.jsonl",
        [
            GOOD,
            chat("a-first", assistant("Hello."), user("Hi"), assistant("How can I help?")),
            chat("two-users", user("One."), user("Two."), assistant("Both seen.")),
            chat("sys-mid", user("Hi"), system("Be brief."), assistant("Hi.")),
            chat("two-sys", system("A"), system("B"), user("Hi"), assistant("Hi.")),
            chat("user-last", user("Hi"), assistant("Hi."), user("And?")),
            chat("no-assistant", user("Hi")),
            chat("empty-list"),
        ],
    )
    result = check_files([path])
    assert result["accepted"] == 3
    assert reasons(result) == {
        2: "assistant-first",
        4: "system-not-first",
        5: "system-not-first",
        7: "no-assistant",
        8: "empty-conversation",
    }
    assert notes(result) == {3: "consecutive-users", 6: "trailing-turns-dropped"}
    assert result["rows"] == 8 and set(result["reasons"]) == {*reasons(result).values(), *notes(result).values()}


def test_two_assistant_turns_in_a_row(tmp_path):
    path = write(
        tmp_path / "a.jsonl", [chat("x", user("q"), assistant("a"), assistant("b"), user("c"), assistant("d"))]
    )
    assert reasons(check_files([path])) == {1: "assistant-after-assistant"}
    assert check_files([path], responses="rollout")["accepted"] == 1


def test_a_prompt_needs_no_answer_but_a_conversation_does_unless_answers_are_rolled_out(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"turns": ["a", "b"]}, {"prompt": "c"}, chat("x", user("d"))])
    assert reasons(check_files([path])) == {3: "no-assistant"}
    assert check_files([path], responses="rollout")["accepted"] == 3
    assert set(reasons(check_files([path], responses="given"))) == {1, 2, 3}


def test_assistant_turns_without_text(tmp_path):  # B2
    path = write(
        tmp_path / "empty.jsonl",
        [
            chat("empty", user("q"), assistant("")),
            chat("null", user("q"), assistant(None)),
            chat("space", user("q"), assistant(" \n\t")),
            chat("missing", user("q"), {"role": "assistant"}),
            chat("then-good", user("q"), assistant(""), user("q2"), assistant("a2")),
        ],
    )
    result = check_files([path])
    assert reasons(result) == dict.fromkeys((1, 2, 3, 4), "no-assistant-text")
    assert result["rejected"][0]["detail"] == "no assistant text"
    assert result["accepted"] == 1 and notes(result) == {5: "empty-turn-unsupervised"}


def test_contents_that_are_no_text(tmp_path):  # B3
    text_parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]
    path = write(
        tmp_path / "content.jsonl",
        [
            GOOD,
            chat("parts", user(text_parts), assistant([{"type": "text", "text": "4."}])),
            chat("image", user([{"type": "image_url", "image_url": {"url": "x"}}, text_parts[0]]), ANSWER),
            chat("mixed", user(["bare string", text_parts[0]]), ANSWER),
            chat("number", user(7), ANSWER),
            chat("dict", user({"text": "q"}), ANSWER),
        ],
    )
    result = check_files([path])
    assert result["accepted"] == 2
    assert reasons(result) == {3: "image-content", 4: "bad-content", 5: "bad-content", 6: "bad-content"}
    assert "image content unsupported" in result["rejected"][0]["detail"]


def call(arguments):
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}


def test_tool_calls(tmp_path):  # B4
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    found = {"role": "tool", "content": "4", "tool_call_id": "c1"}
    path = write(
        tmp_path / "tools.jsonl",
        [
            chat("text", USER, assistant("", tool_calls=[call('{"a": 2, "b": 2}')]), found, ANSWER, tools=tools),
            chat("object", USER, assistant(None, tool_calls=[call({"a": 2, "b": 2})]), found, ANSWER, tools=tools),
            chat("bad", USER, assistant("", tool_calls=[call('{"a": 2,')]), found, ANSWER, tools=tools),
            chat("tools-text", USER, ANSWER, tools=json.dumps(tools)),
            chat("orphan", USER, found, ANSWER),
            chat("other-call", USER, assistant("", tool_calls=[call("{}")]), {**found, "tool_call_id": "x"}, ANSWER),
            chat("bad-tools", USER, ANSWER, tools="[{"),
            chat("list-arguments", USER, assistant("", tool_calls=[call("[1]")]), found, ANSWER),
            chat("no-name", USER, assistant("", tool_calls=[{"function": {"arguments": {}}}]), found, ANSWER),
        ],
    )  # fmt: skip
    result = check_files([path])
    assert result["accepted"] == 3 and notes(result) == {2: "duplicate-content"}
    assert reasons(result) == {
        3: "bad-tool-arguments",
        5: "orphan-tool-result",
        6: "orphan-tool-result",
        7: "bad-tools",
        8: "bad-tool-arguments",
        9: "bad-tool-call",
    }
    asked_again = reasons(check_files([path], responses="rollout"))
    assert asked_again[1] == asked_again[5] == "tool-turns-in-rollout" and 4 not in asked_again


def test_reasoning(tmp_path):  # B5
    path = write(
        tmp_path / "think.jsonl",
        [
            chat("inline", user("q"), assistant("<think>\nreason\n</think>\n\nanswer")),
            chat("field", user("q"), assistant("answer", reasoning_content="reason")),
            chat("both", user("q"), assistant("<think>x</think>answer", reasoning_content="reason")),
            chat("unclosed", user("q"), assistant("<think>\nreason with no end")),
            chat("only-close", user("q"), assistant("reason\n</think>\nanswer")),
            chat("split", user("q"), assistant("<think>first half"), assistant("second half</think>answer")),
            chat("history", user("q1"), assistant("<think>r1</think>a1"), user("q2"), assistant("<think>r2</think>a2")),
            chat("empty-think", user("q"), assistant("<think>\n\n</think>\n\nanswer")),
            chat("literal", user("What does </think> or <|im_end|> mean?"), assistant("A tag.")),
            chat("twice", user("q"), assistant("<think>a</think>b<think>c</think>d")),
            chat("behind", user("q"), assistant("First <think>a</think> then")),
            chat("fields-differ", user("q"), assistant("a", reasoning_content="b", reasoning="c")),
            chat("hy3", user("q"), assistant("<think:opensource>reason</think:opensource>answer")),
        ],
    )  # fmt: skip
    result = check_files([path])
    assert reasons(result) == {
        3: "reasoning-twice",
        4: "think-unclosed",
        5: "think-unopened",
        6: "think-unclosed",
        10: "think-misplaced",
        11: "think-misplaced",
        12: "reasoning-twice",
    }
    # inline, field and another family's tags are one and the same once read
    assert notes(result) == {2: "duplicate-content", 13: "duplicate-content"}
    assert check_files([path], responses="rollout")["rejected"] == []


def test_schemas(tmp_path):  # B6
    rows = [
        {"id": "1", "conversations": [{"role": "human", "content": "q"}, {"role": "gpt-5.1-high", "content": "a"}]},
        {"id": "2", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"id": "3", "messages": [USER, ANSWER]},
        {"id": "4", "conversations": json.dumps([USER, ANSWER])},
        {"id": "5", "conversations": [USER, ANSWER], "messages": [USER, assistant("5.")]},
        {"id": "6", "text": "hello"},
        {"conversations": [USER, assistant("four")]},
        {"id": "3", "conversations": [USER, assistant("vier")]},
        [],
        None,
        "text",
        3,
        {"id": "7", "conversations": [USER, ANSWER], "messages": [{"from": "human", "value": "What is 2+2?"}, ANSWER]},
        {"id": "8", "conversations": "no json"},
        {"id": "9", "conversations": [USER, "4."]},
        {"id": "10", "conversations": [{"content": "q"}, ANSWER]},
        {"id": "11", "conversations": [{"role": None, "content": "q"}, ANSWER]},
        {"id": "12", "prompt": "a", "question": "b"},
        {"id": "13", "instruction": "a", "input": "b", "output": "c"},
        {"id": "14", "system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ]
    result = check_files([write(tmp_path / "schema.jsonl", rows)])
    assert reasons(result) == {
        1: "unknown-role",
        5: "two-conversations",
        6: "no-conversation",
        8: "duplicate-id",
        9: "not-an-object",
        10: "not-an-object",
        11: "not-an-object",
        12: "not-an-object",
        14: "bad-conversation",
        15: "bad-message",
        16: "bad-message",
        17: "bad-message",
        18: "ambiguous-prompt",
    }
    assert result["accepted"] == 7 and result["ignored_keys"] == {}
    assert "gpt-5.1-high: assistant" in result["rejected"][0]["detail"]
    assert 1 not in reasons(check_files([tmp_path / "schema.jsonl"], role_map={"gpt-5.1-high": "assistant"}))
    with pytest.raises(DataError, match="role_map maps 'x' to 'boss'"):
        check_files([tmp_path / "schema.jsonl"], role_map={"x": "boss"})


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):  # B7
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\n" + json.dumps(GOOD).encode() + b"\n")
    result = check_files([path])
    assert result["accepted"] == 1 and reasons(result) == {2: "duplicate-id"}  # so the first id was read


def test_line_ends_of_windows(tmp_path):  # B8
    path = write(tmp_path / "crlf.jsonl", [GOOD, chat("ok-2", user("a\r\nb"), assistant("c"))], end="\r\n")
    assert check_files([path])["accepted"] == 2


def test_bytes_that_are_not_utf8_cost_their_row_only(tmp_path):  # B9
    first, last = json.dumps(GOOD).encode(), json.dumps(chat("ok-3", user("é"), ANSWER), ensure_ascii=False).encode()
    bad = b'{"id": "bad", "conversations": [{"role": "user", "content": "caf\xe9 \xff"}]}'
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b"\n".join([first, bad, last]) + b"\n")
    result = check_files([path], quarantine=tmp_path / "quarantine.jsonl")
    assert result["accepted"] == 2 and reasons(result) == {2: "invalid-utf8"}
    place = bad.index(b"\xe9")
    assert result["rejected"][0]["detail"] == (
        f"byte 0xE9 at offset {place} of the row (offset {len(first) + 1 + place} of the file) is not UTF-8"
    )
    written = (tmp_path / "quarantine.jsonl").read_text()
    assert "\ufffd" not in json.loads(written)["raw"] and r"caf\xe9 \xff" in json.loads(written)["raw"]


def test_only_line_feeds_end_lines(tmp_path):  # B10
    lines = [
        '{"id": "u2028", "conversations": [{"role": "user", "content": "a\u2028b\u0085c\vd"},'
        ' {"role": "assistant", "content": "x\u2029y"}]}',
        "",
        "   ",
        r'{"id": "nul", "conversations": [{"from": "human", "value": "a\u0000b"}, {"from": "gpt", "value": "x"}]}',
        r'{"id": "surr", "conversations": [{"from": "human", "value": "\ud800"}, {"from": "gpt", "value": "x"}]}',
    ]
    path = tmp_path / "separators.jsonl"
    path.write_bytes(("\n".join(lines) + "\n").encode())
    result = check_files([path])
    assert result["accepted"] == 1
    assert reasons(result) == {4: "nul-character", 5: "lone-surrogate"}


@pytest.mark.parametrize("cut", [b'{"id": "cut", "conversations": [{"role": "us', b'{"id": "caf\xc3'])
def test_a_file_that_ends_inside_a_row(tmp_path, cut):  # B11
    path = tmp_path / "cut.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + cut)
    result = check_files([path])
    assert result["accepted"] == 1 and reasons(result) == {2: "truncated"}
    path.write_bytes(json.dumps(GOOD).encode())  # only the line feed is missing
    assert check_files([path])["rejected"] == [] and check_files([path])["accepted"] == 1


@pytest.mark.parametrize("content", [b"", b"\n\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_nothing_usable(tmp_path, content):  # B12
    path = tmp_path / "nothing.jsonl"
    path.write_bytes(content)
    result = check_files([path])
    assert result["accepted"] == 0 and result["rejected"] == [] and result["error"] == "no usable rows"


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_a_huge_row_is_refused_in_bounded_memory_and_its_neighbours_kept(tmp_path, kind):  # B13
    path = tmp_path / f"huge.{kind}"
    row = json.dumps(chat("huge", USER, assistant("x" * 40 * 2**20))).encode()
    before, after = json.dumps(chat("before", USER, ANSWER)).encode(), json.dumps(chat("after", USER, ANSWER)).encode()
    if kind == "json":
        path.write_bytes(b"[" + before + b",\n" + row + b",\n" + after + b"]\n")
    elif kind == "csv":
        path.write_bytes(b"id,prompt\nbefore,a\nhuge," + b"x" * 40 * 2**20 + b"\nafter,b\n")
    else:
        path.write_bytes(b"\n".join([before, row, after]) + b"\n")
    line = 3 if kind == "csv" else 2
    size = len(row) if kind != "csv" else 40 * 2**20 + 5
    del row
    tracemalloc.start()
    try:
        result = check_files([path])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result["accepted"] == 2 and reasons(result) == {line: "line-too-long"}
    assert abs(int(result["rejected"][0]["detail"].split(" bytes")[0].replace(",", "")) - size) <= 2
    assert peak < 20 * 2**20


def test_several_files_are_told_apart(tmp_path):
    paths = [write(tmp_path / "a.jsonl", [GOOD]), write(tmp_path / "b.jsonl", [GOOD, None])]
    result = check_files(paths)
    assert result["accepted"] == 2  # the same id in two files is two rows
    assert result["rejected"] == [
        {"file": str(paths[1]), "line": 2, "reason": "not-an-object", "detail": "null instead of an object"}
    ]
    json.dumps(result)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"hello", "unknown kind '.txt'"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        ("b.jsonl", '{"prompt": "a"}\n'.encode("utf-16"), "UTF-16"),
        ("a.parquet", b"PAR1 nothing", "unreadable as Parquet"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00cut", "gzip"),
        ("a.csv", b'"a,b\n', "no readable header"),
        ("b.csv", b"a,a\n1,2\n", "names a column twice"),
    ],
)
def test_files_that_cannot_be_read_at_all(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        check_files([tmp_path / name])


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        check_files([tmp_path / "none.jsonl"])


def test_checking_files_loads_no_torch():
    code = "import sys, angelspec.data.check; sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_repeated_rows_without_an_id_are_read_once_and_noted(tmp_path):
    rows = [{"prompt": f"question {number % 3}"} for number in range(30)]
    result = check_files([write(tmp_path / "log.jsonl", rows)], responses="rollout")
    assert result["accepted"] == 3 and result["rejected"] == []
    assert notes(result) == dict.fromkeys(range(4, 31), "duplicate-content")


def test_a_list_of_texts_under_a_prompt_key_is_a_conversation_s_user_turns(tmp_path):
    path = write(tmp_path / "bench.jsonl", [{"prompt": ["Write a poem.", "Now shorten it."]}, {"prompt": ["a", 3]}])
    result = check_files([path], responses="rollout")
    assert result["accepted"] == 1 and list(reasons(result)) == [2]


def test_the_command_renders_for_a_recipe(tmp_path, monkeypatch):
    from click.testing import CliRunner

    from angelspec.cli.main import cli

    long = {"role": "assistant", "content": "The sum of two and two is four."}
    monkeypatch.setenv("ANGELSPEC_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path / "rows.jsonl", [chat("y", USER, long), chat("x", user("hello <|im_end|>"), long)])
    result = CliRunner().invoke(cli, ["data", "check", str(path), "--recipe", "tiny-dfly-llama"])
    assert result.exit_code == 0, result.output
    assert "1 usable, 1 refused" in result.output and "special-token-text" in result.output
    assert re.search(r"1 training rows of \d+ tokens, \d+ \(\d+%\) of them supervised", result.output)
