"""Which columns servers offer, and what runs side by side."""

from __future__ import annotations

import asyncio

import pytest
from demo_server import DRAFTERS, DemoServer

from angelspec.core.errors import RequestError
from angelspec.core.request_label import parse_label
from angelspec.demo.columns import (
    Seen,
    Server,
    lanes,
    look,
    offered_columns,
    offered_modes,
    parse_servers,
    seed_note,
)
from angelspec.demo.render import server_lines
from angelspec.serving.wire import server_info

HERE = Server("embedded", "http://127.0.0.1:30000")


def seen(
    server: Server = HERE, *, drafters=DRAFTERS, extension: bool = True, model: str | None = None, algorithm=None,
    deterministic: bool = False,
) -> Seen:  # fmt: skip
    body = DemoServer(extension=extension, algorithm=algorithm, deterministic=deterministic).info()
    if extension:
        body["internal_states"][0]["angelspec"]["drafters"] = drafters
    return Seen(server, server_info({**body, "model_path": model or body["model_path"]}))


def titles(*found: Seen, mode="no-think") -> list[str]:
    return [column.name for column in offered_columns(found, mode)]


def test_one_server_offers_plain_each_drafter_cut_and_automatic():
    assert titles(seen()) == ["Plain", "MTP", "DFly", "DFly with D-cut", "Automatic"]
    assert titles(seen(), mode="high-think") == ["Plain", "DFly", "DFly with D-cut", "Automatic"]
    assert titles(seen(drafters=[])) == ["Plain"]


def test_every_label_is_one_that_the_server_takes():
    for mode in ("no-think", "high-think"):
        for column in offered_columns([seen()], mode):
            label = parse_label(column.label)
            assert label.route == column.key.split("/")[1]
            assert label.ratio == (None if column.title.endswith("D-cut") or column.title == "Automatic" else 1.0)


def test_drafters_of_one_algorithm_are_told_apart_by_name():
    twice = [dict(DRAFTERS[1], name="dfly-small"), dict(DRAFTERS[1], name="dfly-large")]
    assert titles(seen(drafters=twice))[1:5] == [
        "dfly-small", "dfly-small with D-cut", "dfly-large", "dfly-large with D-cut",
    ]  # fmt: skip


def test_several_servers_are_told_apart_and_a_dead_one_keeps_a_column():
    stock, gone = Server("stock", "http://127.0.0.1:1"), Seen(Server("gone", "http://127.0.0.1:9"), error="refused")
    found = offered_columns([seen(), seen(stock, extension=False), gone], "no-think")
    assert [column.name for column in found] == [
        "embedded: Plain", "embedded: MTP", "embedded: DFly", "embedded: DFly with D-cut", "embedded: Automatic",
        "stock", "gone",
    ]  # fmt: skip
    assert found[-2].plain and found[-2].label is None and not found[-1].plain
    assert len({column.key for column in found}) == len(found)


def test_a_stock_server_that_speculates_by_itself_is_not_plain():
    (column,) = offered_columns([seen(extension=False, algorithm="EAGLE3")], "no-think")
    assert not column.plain and column.subtitle == "without the extension, speculates by EAGLE3"
    assert "speculates by EAGLE3" in server_lines([seen(extension=False, algorithm="EAGLE3")])
    assert offered_columns([seen(algorithm="ANGELSPEC")], "no-think")[0].plain


def test_modes_are_those_of_the_target():
    assert offered_modes([seen()]) == ("no-think", "high-think")
    assert offered_modes([seen(extension=False)]) == ("no-think",)
    assert offered_modes([seen(extension=False, model="Qwen/Qwen3-8B")]) == ("no-think", "high-think")
    assert offered_modes([]) == ("no-think",)


def test_servers_that_heed_no_seeds_are_named():
    stock, gone = Server("stock", "http://127.0.0.1:1"), Seen(Server("gone", "http://127.0.0.1:9"), error="refused")
    heeding = seen(stock, extension=False, deterministic=True)
    note = seed_note([seen(), heeding, gone])
    assert note.startswith("Not heeded by embedded: ") and "--enable-deterministic-inference" in note
    assert seed_note([seen(), seen(stock, extension=False)]).startswith("Not heeded by embedded, stock: ")
    assert seed_note([heeding, seen(deterministic=True), gone]) == seed_note([gone]) == ""


def test_columns_of_one_machine_wait_for_each_other():
    near, far = Server("near", "http://localhost:1"), Server("far", "http://10.0.0.1:1")
    columns = offered_columns([seen(), seen(near, extension=False), seen(far, extension=False)], "no-think")
    rows = lanes(columns, together=False)
    assert [[column.server.name for column in row] for row in rows] == [["embedded"] * 5 + ["near"], ["far"]]
    assert lanes(columns, together=True) == [[column] for column in columns]


def test_servers_are_named():
    assert parse_servers(["a=http://x:1/", "b=https://y"]) == [Server("a", "http://x:1"), Server("b", "https://y")]
    (keyed,) = parse_servers(["a=http://[::1]:1"], api_key="s3cret")
    assert keyed.api_key == "s3cret" and "s3cret" not in repr(keyed)


@pytest.mark.parametrize(
    "texts",
    [
        ["http://x:1"], ["=http://x:1"], ["a=x:1"], ["a=http://"], ["a=http://x", "a=http://y"], ["a=http://x:abc"],
        ["a=http://[::1"], ["a=http://x:99999"], ["a=http://x:0"], ["a=http://a..b"], ["a=http://[zz]"],
    ],
)  # fmt: skip
def test_a_wrong_server_is_refused_with_the_form(texts):
    with pytest.raises(RequestError) as caught:
        parse_servers(texts)
    assert texts[-1] in caught.value.message and caught.value.mend


def test_looking_finds_what_is_there_and_what_is_not():
    async def both(url: str) -> list[Seen]:
        return [await look(Server("up", url)), await look(Server("gone", "http://127.0.0.1:9"))]

    with DemoServer() as server:
        up, gone = asyncio.run(both(server.url))
    assert up.info is not None and up.info.engine is not None and len(up.info.engine.drafters) == 3
    assert gone.info is None and "127.0.0.1:9" in gone.error and "angelspec serve" in gone.mend and not gone.refused


def test_a_server_with_a_key_is_not_down():
    async def both(url: str) -> list[Seen]:
        return [await look(Server("a", url, key)) for key in ("s3cret", None)]

    with DemoServer(api_key="s3cret") as server:
        let_in, shut_out = asyncio.run(both(server.url))
    assert let_in.info is not None
    assert shut_out.refused and "--api-key" in shut_out.mend and "ANGELSPEC_SERVER_KEY" in shut_out.mend
    assert "refuses" in server_lines([shut_out]) and "down:" not in server_lines([shut_out])
    assert offered_columns([shut_out], "no-think")[0].subtitle == "refuses"


def test_looking_at_what_is_no_address_stops_nothing():
    assert "no address" in asyncio.run(look(Server("a", "http://x:abc"))).error
