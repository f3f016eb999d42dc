import json

import numpy as np
import pytest
import torch

from angelspec.core.errors import DataError
from angelspec.data.answers import AnswerRecord, Prompt, read_answers, select_answers
from angelspec.data.dataset import load_rows, pack
from angelspec.data.fitting import count_anchors, fit_rows
from angelspec.data.split import split_held_out
from angelspec.data.tokenised import TokenisedRow, answered_row
from angelspec.ops.anchors import anchor_candidates


def row(name, prompt, answer, *, group=None, workload="chat", start=1, **changes):
    tokens = list(range(start, start + prompt + answer))
    return answered_row(tokens[:prompt], tokens[prompt:], id=name, workload=workload, group=group or name, **changes)


def some_rows():
    return [row("a", 3, 5), row("b", 2, 4, workload="code", finish_reason="stop"), row("c", 1, 6, start=50)]


def test_documents_stand_alone_in_the_rows():
    packed = pack(some_rows(), row_length=15, pad_id=0)
    assert packed.tokens_RT.tolist() == [[*range(1, 9), *range(1, 7), 0], [*range(50, 57), *[0] * 8]]
    assert packed.document_RT.tolist() == [[0] * 8 + [1] * 6 + [-1], [2] * 7 + [-1] * 8]
    assert packed.position_RT.tolist() == [[*range(8), *range(6), 0], [*range(7), *[0] * 8]]
    assert packed.loss_mask_RT.sum(dim=1).tolist() == [9, 6] and not packed.loss_mask_RT[0, :3].any()
    assert [packed.tokens_RT.dtype, packed.document_RT.dtype, packed.position_RT.dtype] == [torch.int32] * 3
    assert [(d.id, d.workload, d.finish_reason, d.num_tokens, d.num_supervised) for d in packed.documents] == [
        ("a", "chat", "given", 8, 5),
        ("b", "code", "stop", 6, 4),
        ("c", "chat", "given", 7, 6),
    ]
    summary = packed.summary()
    assert summary["tokens"] == 21 and summary["supervised_tokens"] == 15 and summary["rows"] == 2
    assert summary["padding_share"] == pytest.approx(9 / 30)
    assert summary["documents_by_workload"] == {"chat": 2, "code": 1}
    summary = packed.only(workloads=["code"]).summary()
    assert (summary["supervised_tokens"], summary["documents_by_workload"]) == (4, {"code": 1})


@pytest.mark.parametrize("seed", range(5))
def test_every_row_comes_back_out_of_the_packed_rows(seed):
    draw = np.random.default_rng(seed)
    rows = [row(f"r{i}", int(draw.integers(0, 20)), int(draw.integers(1, 20)), start=100 * i) for i in range(60)]
    packed = pack(rows, row_length=40, pad_id=7)
    found = {}
    for number in packed.document_RT.unique().tolist():
        where = packed.document_RT == number
        if number < 0:
            assert (packed.tokens_RT[where] == 7).all() and not packed.loss_mask_RT[where].any()
            continue
        line, column = where.nonzero(as_tuple=True)
        assert line.unique().numel() == 1 and torch.equal(column, torch.arange(column[0], column[-1] + 1))
        assert torch.equal(packed.position_RT[where], torch.arange(len(column), dtype=torch.int32))
        found[packed.documents[number].id] = (packed.tokens_RT[where].tolist(), packed.loss_mask_RT[where].tolist())
    assert found == {r.id: (r.tokens.tolist(), r.loss_mask.tolist()) for r in rows}


def test_rows_and_workloads_can_be_chosen():
    packed = pack(some_rows(), row_length=15, pad_id=0)
    assert packed.rows([1]).tokens_RT.tolist() == packed.tokens_RT[1:].tolist()
    code = packed.only(workloads=["code"])
    assert code.loss_mask_RT.sum() == 4 and not code.loss_mask_RT[0, :8].any() and not code.loss_mask_RT[1].any()
    assert code.document_RT.tolist() == packed.document_RT.tolist()  # the neighbours stay, unsupervised
    with pytest.raises(DataError, match="no document of workload math"):
        packed.only(workloads=["math"])


def test_what_cannot_be_packed_is_named():
    with pytest.raises(DataError, match="row 'a' has 8 tokens; a packed row has 7"):
        pack([row("a", 3, 5)], row_length=7, pad_id=0)
    with pytest.raises(DataError, match="row 'x' supervises no token"):
        pack([row("x", 3, 0)], row_length=7, pad_id=0)
    with pytest.raises(DataError, match="no rows"):
        pack([], row_length=7, pad_id=0)


def test_saved_rows_come_back_and_damage_shows(tmp_path):
    packed = pack(some_rows(), row_length=15, pad_id=0)
    packed.save(tmp_path / "rows")
    again = load_rows(tmp_path / "rows", vocab_size=57, mask_token_id=20)
    assert again.documents == packed.documents and again.digest == packed.digest
    assert all(torch.equal(getattr(again, n), getattr(packed, n)) for n in packed._tensors())
    assert sorted(path.name for path in (tmp_path / "rows").iterdir()) == ["rows.json", "rows.safetensors"]
    before = [path.read_bytes() for path in sorted((tmp_path / "rows").iterdir())]
    packed.save(tmp_path / "rows")
    assert before == [path.read_bytes() for path in sorted((tmp_path / "rows").iterdir())]

    other = pack([*some_rows()[:2], row("c", 1, 6, start=51)], row_length=15, pad_id=0)
    other.save(tmp_path / "other")
    (tmp_path / "other" / "rows.safetensors").replace(tmp_path / "rows" / "rows.safetensors")
    with pytest.raises(DataError, match="has changed since it was written"):
        load_rows(tmp_path / "rows")
    packed.save(tmp_path / "rows")
    index = json.loads((tmp_path / "rows" / "rows.json").read_text())
    (tmp_path / "rows" / "rows.json").write_text(json.dumps({**index, "format_version": 99}))
    with pytest.raises(DataError, match="format version 99"):
        load_rows(tmp_path / "rows")
    (tmp_path / "rows" / "rows.json").unlink()
    with pytest.raises(DataError, match="no whole set"):
        load_rows(tmp_path / "rows")
    packed.save(tmp_path / "rows")
    cut = (tmp_path / "rows" / "rows.safetensors").read_bytes()[:-16]
    (tmp_path / "rows" / "rows.safetensors").write_bytes(cut)
    with pytest.raises(DataError, match="no whole set"):
        load_rows(tmp_path / "rows")


def test_the_mask_token_may_occur_in_no_document(tmp_path):  # B19
    packed = pack(some_rows(), row_length=15, pad_id=0)
    packed.save(tmp_path)
    with pytest.raises(DataError, match=r"mask token id 4 occurs in 2 rows \(2 times\), first in 'a'"):
        load_rows(tmp_path, vocab_size=57, mask_token_id=4)
    packed.require_tokens(vocab_size=57, mask_token_id=0)  # padding is no document
    with pytest.raises(DataError, match="1 tokens are outside the target's vocabulary of 56, the first is 56"):
        packed.require_tokens(vocab_size=56, mask_token_id=0)


@pytest.mark.parametrize(("length", "anchors"), [(7, 0), (8, 1), (9, 2), (16, 9)])
def test_a_block_needs_room_behind_its_anchor(length, anchors):  # B14
    mask = np.ones(length, dtype=bool)
    assert count_anchors(mask, block_size=8) == anchors
    packed = pack([TokenisedRow("x", "chat", np.arange(length), mask, "g")], row_length=20, pad_id=0)
    candidates = anchor_candidates(packed.loss_mask_RT, packed.document_RT, block_size=8)
    assert int(candidates.sum()) == anchors  # the filter and the sampler agree


def test_anchors_stay_inside_their_document():  # B15
    documents = [TokenisedRow(n, "chat", np.arange(8), np.ones(8, bool), n) for n in "abc"]
    packed = pack(documents, row_length=24, pad_id=0)
    candidates = anchor_candidates(packed.loss_mask_RT, packed.document_RT, block_size=8)
    assert candidates.nonzero().tolist() == [[0, 0], [0, 8], [0, 16]]


def test_rows_are_cut_first_and_judged_afterwards():  # B16
    source = [row("long", 100, 20)]
    with pytest.raises(DataError, match="no row can be trained on") as caught:
        fit_rows(source, max_document_tokens=90, block_size=8)
    assert "no-supervised-token-after-truncation" in str(caught.value)
    fitted = fit_rows(source, max_document_tokens=110, block_size=10)
    assert fitted.kept[0].num_supervised == 10 and len(fitted.kept[0]) == 110 and fitted.num_cut == 1
    fitted = fit_rows([*source, row("short", 2, 11)], max_document_tokens=110, block_size=11)
    assert [r.id for r in fitted.kept] == ["short"] and fitted.counts == {"no-anchor": 1}
    assert "10 supervised from token 100; a block has 11" in fitted.dropped[0].detail
    fitted = fit_rows([row("silent", 9, 0), row("good", 2, 11)], max_document_tokens=110, block_size=8)
    assert fitted.counts == {"no-supervised-token": 1} and fitted.num_cut == 0


def test_the_split_depends_on_content_alone():
    rows = [row(f"r{i}", 3, 5, group=f"g{i // 2}") for i in range(400)]
    split = split_held_out(rows, fraction=0.1, seed=0)
    held = {r.id for r in split.held_out}
    assert 20 < len(held) < 70 and len(split.train) + len(held) == 400
    assert {r.group for r in split.train}.isdisjoint({r.group for r in split.held_out})
    backwards = split_held_out(rows[::-1], fraction=0.1, seed=0)
    assert {r.id for r in backwards.held_out} == held and backwards.train == split.train[::-1]
    fewer = split_held_out(rows[:300], fraction=0.1, seed=0)
    assert {r.id for r in fewer.held_out} == held & {f"r{i}" for i in range(300)}
    assert {r.id for r in split_held_out(rows, fraction=0.1, seed=1).held_out} != held


def test_a_small_set_still_has_both_sides():
    rows = [row("a", 3, 5), row("b", 3, 5)]
    for fraction in (1e-9, 0.499999):
        split = split_held_out(rows, fraction=fraction, seed=3)
        assert len(split.train) == len(split.held_out) == 1
    with pytest.raises(DataError, match="cannot be split"):
        split_held_out(rows[:1], fraction=0.1, seed=0)


def record(name="p", **changes):
    values = {"id": name, "workload": "math", "prompt_tokens": (1, 2), "answer_tokens": (3, 9), "finish_reason": "stop",
              "repeated_share": 0.0, "mode": "no-think"}  # fmt: skip
    return AnswerRecord(**{**values, **changes})


def test_records_survive_their_file(tmp_path):
    records = [record(), record("ü", sample=1, group="g", repeated_share=0.25)]
    path = tmp_path / "shard.jsonl"
    path.write_text("".join(r.to_json() + "\n" for r in records), encoding="utf-8")
    assert list(read_answers([path])) == records
    assert record().group == Prompt("p", "math", (1, 2)).group  # by default the hash of the prompt
    bare = json.loads(record().to_json())
    del bare["sample"], bare["group"]
    assert AnswerRecord.from_json(json.dumps(bare)) == record()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "loud"}, "mode 'loud'"),
        ({"answer_tokens": [1, "2"]}, "answer_tokens is no list"),
        ({"extra": 1}, "unknown field extra"),
        ({"id": None}, "missing field id"),
    ],
)
def test_damaged_records_are_named_by_file_and_line(tmp_path, change, message):
    value = {**json.loads(record().to_json()), **change}
    value = {key: item for key, item in value.items() if item is not None}
    path = tmp_path / "shard.jsonl"
    path.write_text(record().to_json() + "\n" + json.dumps(value) + "\n")
    with pytest.raises(DataError, match=f"shard.jsonl:2: .*{message}"):
        list(read_answers([path]))


def test_answers_that_do_not_end_or_loop_are_counted_out():
    records = [
        record("good"),
        record("cut", finish_reason="length"),
        record("loops", repeated_share=0.6),
        record("says nothing", answer_tokens=(9,)),
    ]
    selected = select_answers(records, keep_finish_reasons=("stop",), max_repeated_share=0.5)
    assert [r.id for r in selected.kept] == ["good"]
    assert selected.counts == {"answer-empty": 1, "answer-repeats": 1, "answer-unfinished": 1}
    everything = select_answers(records, keep_finish_reasons=("stop", "length"), max_repeated_share=1.0)
    assert [r.id for r in everything.kept] == ["good", "cut", "loops"]
