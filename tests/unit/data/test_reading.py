import gzip
import json

import pytest

from angelspec.core.errors import DataError, MissingRequirement
from angelspec.core.recipe import DataSection, PromptSource
from angelspec.data import sources, typed_tables
from angelspec.data.byte_rows import read_array, read_lines
from angelspec.data.check import check_files
from angelspec.data.messages import read_content
from angelspec.data.prompt_items import read_questions
from angelspec.data.reading import read_source, read_sources
from angelspec.data.reasons import EXPLANATIONS, Reason, Remark
from angelspec.data.sources import locate

ROWS = [
    {"id": f"r{i}", "workload": "math", "language": "en", "turns": [f"question {i}", "and then?"]} for i in range(20)
]


def section(**changes):
    source = PromptSource(name="any", source="builtin:train")
    return DataSection(**{"train": (source,), "evaluation": (source,), **changes})


def source_of(path, **changes):
    return PromptSource(**{"name": "mine", "source": f"file:{path}", **changes})


def lines_of(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_word_is_explained():
    assert set(EXPLANATIONS) == {*Reason, *Remark}


def test_the_shipped_prompts_are_read_whole_and_labelled():
    result = read_source(PromptSource(name="shipped", source="builtin:train"), section())
    assert result.rejected == [] and len(result.accepted) > 300
    assert {conversation.workload for conversation in result.accepted} == {"chat", "code", "math"}
    assert all(message.role == "user" for row in result.accepted for message in row.messages)
    only = read_source(PromptSource(name="code", source="builtin:eval/code"), section())
    assert {conversation.workload for conversation in only.accepted} == {"code"}
    with pytest.raises(DataError, match="not shipped") as caught:
        locate(PromptSource(name="x", source="builtin:../core"))
    assert "train/chat" in caught.value.mend


def test_turns_become_user_messages_and_ids_carry_their_source(tmp_path):
    result = read_source(source_of(lines_of(tmp_path / "a.jsonl", ROWS)), section())
    first = result.accepted[0]
    assert first.id == "mine/r0" and first.line == 1 and first.language == "en" and first.workload == "math"
    assert [(m.role, m.content) for m in first.messages] == [("user", "question 0"), ("user", "and then?")]


def test_a_limit_draws_by_content_and_not_by_place(tmp_path):
    rows = [{**row, "workload": "chat"} for row in ROWS]
    one = read_source(source_of(lines_of(tmp_path / "a.jsonl", rows), limit=5), section())
    two = read_source(source_of(lines_of(tmp_path / "b.jsonl", rows[::-1]), limit=5), section())
    other = read_source(source_of(tmp_path / "a.jsonl", limit=5), section(seed=1))
    assert len(one.accepted) == 5 and one.not_drawn == 15
    assert {c.id for c in one.accepted} == {c.id for c in two.accepted} != {c.id for c in other.accepted}
    assert [c.line for c in one.accepted] == sorted(c.line for c in one.accepted)


def test_every_kind_of_file_gives_the_same_conversations(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"id": "1", "domain": "code", "messages": [{"role": "user", "content": 'a\r\nb, "c"'},
                                                  {"role": "assistant", "content": "é\u2028"}]},
        {"id": "2", "domain": "chat", "messages": [{"role": "user", "content": "[]{}\\"},
                                                  {"role": "assistant", "content": "tab\t"}]},
    ]  # fmt: skip
    folder = tmp_path / "rows"
    folder.mkdir()
    lines_of(folder / "a.jsonl", rows)
    (folder / "b.json").write_text(json.dumps(rows, indent=2, ensure_ascii=False))
    (folder / "c.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with gzip.open(folder / "d.jsonl.gz", "wt", encoding="utf-8") as stream:
        stream.write("".join(json.dumps(row) + "\n" for row in rows))
    flat = [{**row, "messages": json.dumps(row["messages"])} for row in rows]
    for name, mark in (("e.csv", ","), ("f.tsv", "\t")):
        quoted = [[f'"{value.replace(chr(34), chr(34) * 2)}"' for value in row.values()] for row in flat]
        text = "\n".join(mark.join(fields) for fields in [list(flat[0]), *quoted]) + "\n"
        (folder / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    pq.write_table(pa.Table.from_pylist(rows), folder / "g.parquet")
    read = {}
    for path in sorted(folder.iterdir()):
        result = read_source(source_of(path), section(responses="given"))
        assert result.rejected == [], path
        read[path.name] = [(c.id, c.workload, c.messages) for c in result.accepted]
    assert len(read) == 7 and all(value == read["a.jsonl"] for value in read.values())
    assert len(read["a.jsonl"]) == 2 and read["a.jsonl"][0][2][0].content == 'a\r\nb, "c"'
    whole = read_source(source_of(folder), section(responses="given"))
    assert len(whole.accepted) == 2 and len(whole.rejected) == 12  # the same ids again and again
    assert len(locate(source_of(folder / "*.json")).files) == 2


def test_table_rows_that_do_not_fit_are_refused_by_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,prompt\n1,"two\r\nlines"\n2\n3,b,c\n4,\xff\n\n5,"open"x\n6,good\n7,"never closed\n')
    result = read_source(source_of(path, workload="chat"), section())
    assert [(c.line, c.messages[0].content) for c in result.accepted] == [(2, "two\r\nlines"), (9, "good")]
    assert {r.line: str(r.reason) for r in result.rejected} == {
        4: "wrong-columns",
        5: "wrong-columns",
        6: "invalid-utf8",
        8: "wrong-columns",
        10: "truncated",
    }


def test_parquet_bytes_and_absent_values(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    good, bad = b"good", b"caf\xe9"
    texts = pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\4\0\0\0\10\0\0\0"), pa.py_buffer(good + bad))
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "bytes.parquet")
    result = read_source(source_of(tmp_path / "bytes.parquet", workload="chat"), section())
    assert [c.messages[0].content for c in result.accepted] == ["good"]
    assert [(r.line, str(r.reason)) for r in result.rejected] == [(2, "invalid-utf8")]
    struct = [{"role": "user", "content": "q", "reasoning_content": None, "tool_calls": None},
              {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": None}]  # fmt: skip
    pq.write_table(pa.Table.from_pylist([{"id": None, "messages": struct}]), tmp_path / "none.parquet")
    kept = read_source(source_of(tmp_path / "none.parquet", workload="chat"), section(responses="given")).accepted
    assert kept[0].messages[1].reasoning == "r" and kept[0].id.startswith("mine/row-")


def test_elements_of_an_array_stand_alone(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[\n  {"prompt": "a, [b]"},\n  {"prompt": oops},\n\n  {"prompt": "c\\"]"}, 7\n]\n trailing')
    result = read_source(source_of(path, workload="chat"), section())
    assert [(c.line, c.messages[0].content) for c in result.accepted] == [(2, "a, [b]"), (5, 'c"]')]
    assert [(r.line, str(r.reason)) for r in result.rejected] == [
        (3, "invalid-json"),
        (5, "not-an-object"),
        (7, "invalid-json"),
    ]
    for text, reason in (
        ('[{"prompt": "a"}', "truncated"),
        ('[{"prompt": "a"},', "truncated"),
        ("[1,,", "invalid-json"),
    ):
        path.write_text(text)
        reasons = {str(r.reason) for r in read_source(source_of(path, workload="chat"), section()).rejected}
        assert reason in reasons


@pytest.mark.parametrize(
    ("text", "reason", "words"),
    [
        ('{"prompt": "a"} trailing', "invalid-json", "Extra data"),
        ('{"prompt": "a"}\r{"prompt": "b"}', "invalid-json", "carriage returns alone"),
        ('{"prompt": oops}', "invalid-json", "Expecting value"),
        ('{"prompt": "a", "prompt": "b"}', "invalid-json", "'prompt' stands twice"),
        ('{"prompt": "a', "truncated", "middle of this row"),
        ('{"prompt": tru', "truncated", "middle of this row"),
        ('{"prompt": "a",', "truncated", "middle of this row"),
    ],
)
def test_a_last_row_is_wrong_or_cut_off(tmp_path, text, reason, words):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "whole"}\n' + text.encode())
    (refused,) = read_source(source_of(path, workload="chat"), section(max_bad_fraction=0.9)).rejected
    assert (str(refused.reason), refused.line) == (reason, 2) and words in refused.detail


class Trickle:
    """A file that gives a few bytes at a time, so that every boundary falls somewhere."""

    def __init__(self, data, step):
        self.data, self.step, self.place = data, step, 0

    def read(self, _size):
        piece = self.data[self.place : self.place + self.step]
        self.place += self.step
        return piece


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64])
def test_rows_do_not_depend_on_how_the_bytes_arrive(step):
    lines = b'\xef\xbb\xbf{"a": 1}\r\n\n' + b"x" * 50 + b'\n"\xe2\x80\xa8"\nlast'
    expected = [
        (1, 3, b'{"a": 1}', False, True),
        (4, 65, b'"\xe2\x80\xa8"', False, True),
        (5, 71, b"last", False, False),
    ]
    rows = [(r.line, r.offset, r.data, r.too_long, r.terminated) for r in read_lines(Trickle(lines, step), limit=20)]
    assert rows[1][0] == 3 and rows[1][3] and rows.pop(1) and rows == expected
    array = b' [ {"k": "]}\\\\"} ,\n[1, {"x": [2]}],\n "' + b"y" * 50 + b'", "\\"" ] '
    rows = list(read_array(Trickle(array, step), limit=20))
    assert [(r.line, r.data) for r in rows if not r.too_long] == [
        (1, b'{"k": "]}\\\\"}'),
        (2, b'[1, {"x": [2]}]'),
        (3, b'"\\""'),
    ]
    assert [(r.line, r.size) for r in rows if r.too_long] == [(3, 52)]
    assert all(array[r.offset : r.offset + len(r.data)] == r.data for r in rows)


def test_workload_must_be_known_somewhere(tmp_path):
    path = lines_of(
        tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b", "domain": "maths"}, {"prompt": "c", "domain": "math"}]
    )
    result = read_source(source_of(path), section())
    assert {r.line: str(r.reason) for r in result.rejected} == {1: "unknown-workload", 2: "unknown-workload"}
    assert "did you mean 'math'" in result.rejected[1].detail
    assert {c.workload for c in read_source(source_of(path, workload="code"), section()).accepted} == {"code"}


def test_prompt_columns(tmp_path):
    rows = [
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        {"text": "mine", "prompt": "other"},
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]},
    ]
    path = lines_of(tmp_path / "a.jsonl", rows)
    result = read_source(source_of(path, workload="chat"), section())
    assert result.accepted[0].messages[0].content == "Add.\n\n1 and 2" and len(result.accepted[0].messages) == 1
    assert [m.role for m in result.accepted[2].messages] == ["system", "user"]
    given = read_source(source_of(path, workload="chat"), section(responses="given"))
    assert [m.content for m in given.accepted[0].messages] == ["Add.\n\n1 and 2", "3"] and len(given.rejected) == 2
    keyed = read_source(source_of(path, workload="chat", prompt_key="text"), section())
    assert [c.messages[0].content for c in keyed.accepted] == ["mine"]
    assert {str(r.reason) for r in keyed.rejected} == {"no-conversation"}


def test_a_rollout_asks_the_questions_again_and_ignores_the_answers(tmp_path):
    rows = [
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q1"},
                      {"role": "assistant", "content": [{"type": "image"}]}, {"role": "user", "content": "q2"},
                      {"role": "assistant", "content": "<think>never closed"}]},
        {"messages": [{"role": "assistant", "content": "hello"}]},
    ]  # fmt: skip
    result = read_source(source_of(lines_of(tmp_path / "a.jsonl", rows), workload="chat"), section())
    assert [(m.role, m.content) for m in result.accepted[0].messages] == [
        ("system", "s"),
        ("user", "q1"),
        ("user", "q2"),
    ]
    assert [str(r.reason) for r in result.rejected] == ["no-user"]


def test_content_is_joined_without_a_separator_and_never_a_repr():
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]
    assert read_content(parts, where="x") == "What is 2+2?"


def test_the_run_stops_when_too_many_rows_fall_and_says_which(tmp_path):
    path = lines_of(tmp_path / "a.jsonl", [*ROWS[:8], {"turns": []}, "no row"])
    mine = source_of(path)
    kept = read_sources([mine], section(max_bad_fraction=0.2), quarantine=tmp_path / "q" / "bad.jsonl")
    assert len(kept.accepted) == 8 and kept.counts == {"empty-conversation": 1, "not-an-object": 1}
    written = [json.loads(line) for line in (tmp_path / "q" / "bad.jsonl").read_text().splitlines()]
    assert [(row["line"], row["reason"], row["raw"]) for row in written] == [
        (9, "empty-conversation", '{"turns": []}'),
        (10, "not-an-object", '"no row"'),
    ]
    with pytest.raises(DataError) as caught:
        read_sources([mine], section(max_bad_fraction=0.19), quarantine=tmp_path / "bad.jsonl")
    for part in ("source 'mine'", "2 of 10 rows", "empty-conversation", f"{path}:9:", "bad.jsonl"):
        assert part in str(caught.value)
    assert (tmp_path / "bad.jsonl").exists()  # what was refused can be looked at


def test_nothing_left_is_an_error_with_the_reasons(tmp_path):
    with pytest.raises(DataError, match="no usable rows") as caught:
        read_sources([source_of(lines_of(tmp_path / "a.jsonl", [{}, {}]))], section(max_bad_fraction=1.0))
    assert "no-conversation" in str(caught.value)
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match="the source is empty"):
        read_sources([source_of(tmp_path / "empty.jsonl")], section())


def test_sources_need_names_of_their_own():
    twice = PromptSource(name="a", source="builtin:train")
    with pytest.raises(DataError, match="share the name a"):
        read_sources([twice, twice], section())


def test_the_content_of_a_source_names_it(tmp_path):
    path = lines_of(tmp_path / "a.jsonl", ROWS)
    before = locate(source_of(path)).inputs()
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(path.read_bytes())
    assert locate(source_of(copy)).inputs() == before
    lines_of(path, ROWS[1:])
    assert locate(source_of(path)).inputs() != before


@pytest.mark.parametrize("source", ["nowhere:x", "file:", "hf:", "train.jsonl"])
def test_unknown_kinds_of_source(source):
    with pytest.raises(DataError, match="no known kind"):
        locate(PromptSource(name="x", source=source))


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_hub_dataset_is_pinned_and_streamed(monkeypatch):
    import datasets

    asked = {}

    def load_dataset(name, subset, **arguments):
        asked.update(name=name, subset=subset, **arguments)
        return iter([{"id": 1, "prompt": "a", "tools": None}, {"id": 2, "prompt": None}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(sources, "hub_revision", lambda name, revision: COMMIT)
    source = PromptSource(name="hub", source="hf:org/name", split="test", subset="small", workload="chat")
    result = read_source(source, section())
    assert asked == {"name": "org/name", "subset": "small", "split": "test", "revision": COMMIT, "streaming": True}
    assert [c.id for c in result.accepted] == ["hub/1"] and result.contents[0].inputs()["commit"] == COMMIT
    assert [(r.file, r.line) for r in result.rejected] == [("hf:org/name@01234567", 2)]

    def fails(*_arguments, **_keywords):
        yield {"id": 1, "prompt": "a"}
        raise ValueError("Unknown split")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(DataError, match="failed after row 1: Unknown split"):
        read_source(source, section())


def test_a_full_commit_needs_no_hub_and_a_silent_hub_is_named(monkeypatch):
    import huggingface_hub

    class Hub:
        def dataset_info(self, name, *, revision):
            raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert typed_tables.hub_revision("org/name", revision=COMMIT) == COMMIT
    with pytest.raises(MissingRequirement, match="cannot be reached"):
        typed_tables.hub_revision("org/name", revision="main")
    with pytest.raises(DataError, match="state the revision once"):
        locate(PromptSource(name="x", source="hf:a/b@one", revision="two"))


GOOD = [f'{{"id": "g{i}", "prompt": "question {i}"}}' for i in range(40)]


def test_a_broken_first_line_costs_one_row_of_a_json_file(tmp_path):
    path = tmp_path / "lines.json"
    path.write_text("\n".join(['{"id": "g", "prompt":"cut', *GOOD]))
    result = check_files([path], responses="rollout")
    assert (result["accepted"], result["counts"]) == (40, {"invalid-json": 1})
    path.write_text("\n".join(['{"id": "g", "prompt":"' + "x" * 4000 + '"}', *GOOD]))
    result = check_files([path], responses="rollout", max_line_bytes=2000)
    assert (result["accepted"], result["counts"]) == (40, {"line-too-long": 1})
    path.write_text('{\n  "prompt": "one object"\n}\n')
    assert check_files([path], responses="rollout")["accepted"] == 1


def test_an_open_quote_that_swallows_a_table_is_an_error_of_the_file(tmp_path):
    path = tmp_path / "table.csv"
    rows = [f"g{i},question {i}" for i in range(40)]
    path.write_text("\n".join(["id,prompt", *rows[:5], 'x,"open', *rows[5:]]))
    with pytest.raises(DataError, match="a quote that line 7 opens is never closed; 35 lines behind it"):
        check_files([path], responses="rollout")
    path.write_text("\n".join(["id,prompt", *rows, 'x,"cut']))
    result = check_files([path], responses="rollout")
    assert (result["accepted"], result["counts"]) == (40, {"truncated": 1})


def test_the_quarantine_is_no_file_that_is_checked(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join([*GOOD, "{"]))
    with pytest.raises(DataError, match="is checked and can't be the quarantine"):
        check_files([path], responses="rollout", quarantine=tmp_path / "." / "q.jsonl")
    assert path.read_text() == "\n".join([*GOOD, "{"])


def test_rows_that_do_not_say_their_workload_are_classified_where_they_are_only_measured(tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_text(
        '{"prompt": "Write a Python function that reverses a linked list."}\n'
        '{"prompt": "Solve 3x + 7 = 22 for x."}\n{"prompt": "odd", "workload": "chat"}\n'
    )
    found = read_questions([f"mine={path}"])
    assert [item.workload for item in found["mine"]] == ["code", "math", "chat"]
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "workload": "coding"}\n')
    result = check_files([path], responses="rollout")
    assert (result["accepted"], result["counts"]) == (1, {"unknown-workload": 1})
