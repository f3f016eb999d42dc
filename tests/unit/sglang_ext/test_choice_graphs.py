"""Replayed drafts: the right graph, padded, copied out, and used only if it says what the code says."""

import logging

import pytest
import torch
from drafter_builders import tiny_drafter

pytest.importorskip("sglang")
from angelspec.drafters.drafting import Drafts  # noqa: E402
from sglang_ext.models.graphs import ChoiceGraphs, graph_sizes  # noqa: E402
from sglang_ext.models.served import ServedBlock  # noqa: E402


class Recorder:
    """Records as a GPU does: a replay reads the recorded inputs' storage and writes into the recorded results."""

    def __init__(self, *, broken=None, unable_from=None):
        self.recorded, self.replayed = [], []
        self.broken, self.unable_from = broken, unable_from

    def __call__(self, function):
        results = function()
        rows = results.tokens_BK.shape[0]
        if self.unable_from is not None and rows >= self.unable_from:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.recorded.append(rows)

        def replay():
            self.replayed.append(rows)
            again = function()
            results.tokens_BK.copy_(again.tokens_BK if self.broken != rows else again.tokens_BK + 1)
            results.confidence_BK.copy_(again.confidence_BK)

        results.tokens_BK.zero_()
        return replay, results


@pytest.fixture
def world():
    drafter = tiny_drafter("dfly").eval()
    generator = torch.Generator().manual_seed(1)
    config = drafter.config
    embedding_VD, head_VD = (torch.randn(config.vocab_size, config.hidden_size, generator=generator) for _ in range(2))

    def states(rows, seed=0):
        generator = torch.Generator().manual_seed(seed)
        hidden_BKD = torch.randn(rows, config.num_proposals, config.hidden_size, generator=generator)
        return hidden_BKD, torch.randint(0, config.vocab_size, (rows,), generator=generator)

    def choose(hidden_BKD, anchor_B):
        return drafter.choose(
            hidden_BKD, anchor_tokens_B=anchor_B, embedding_VD=embedding_VD, head_VD=head_VD, shortlist=8
        )

    return drafter, embedding_VD, head_VD, states, choose


def _graphs(choose, states, record, sizes=(1, 2, 4)):
    return ChoiceGraphs(choose, like_BKD=states(1)[0], vocab_size=50, sizes=sizes, record=record)


def _equal(one: Drafts, other: Drafts):
    torch.testing.assert_close(one.confidence_BK, other.confidence_BK)
    return torch.equal(one.tokens_BK, other.tokens_BK)


@pytest.mark.parametrize("rows, used", [(1, 1), (2, 2), (3, 4), (4, 4), (5, None)])
def test_the_smallest_graph_that_holds_the_rows_is_replayed(world, rows, used):
    *_, states, choose = world
    record = Recorder()
    graphs = _graphs(choose, states, record)
    assert record.recorded == [4, 2, 1]
    record.replayed.clear()
    found = graphs(*states(rows))
    assert _equal(found, choose(*states(rows)))
    assert found.tokens_BK.shape == (rows, 3)
    assert record.replayed == ([] if used is None else [used])


def test_results_outlive_the_next_replay(world):
    *_, states, choose = world
    graphs = _graphs(choose, states, Recorder())
    first = graphs(*states(2, seed=1))
    graphs(*states(2, seed=2))
    assert _equal(first, choose(*states(2, seed=1)))


def test_a_graph_that_says_something_else_is_refused(world):
    *_, states, choose = world
    with pytest.raises(RuntimeError, match="the graph of 2 rows gives other drafts"):
        _graphs(choose, states, Recorder(broken=2))


def test_a_served_drafter_drafts_by_its_graphs_or_goes_on_without(world, caplog):
    drafter, embedding_VD, head_VD, states, choose = world
    served = ServedBlock(drafter, first_layer=0, tap_columns=None, shortlist=8)
    arguments = {"embedding_VD": embedding_VD, "head_VD": head_VD, "multiply": torch.nn.functional.linear}
    with pytest.raises(RuntimeError, match="capturing"):
        served.record_choices([1, 4], record=Recorder(unable_from=2), **arguments)
    assert served._graphs is None, "nothing of a failed recording may be used"
    record = Recorder()
    served.record_choices([1, 4], record=record, **arguments)
    record.replayed.clear()
    assert _equal(served._graphs(*states(3)), choose(*states(3)))
    assert record.replayed == [4]


def test_one_drafter_without_graphs_is_named_and_the_others_have_theirs(world, caplog):
    from sglang_ext.models.drafters import AngelSpecDrafters

    drafter, embedding_VD, head_VD, *_ = world
    served = {name: ServedBlock(drafter, first_layer=0, tap_columns=None, shortlist=8) for name in ("one", "two")}
    model = AngelSpecDrafters.__new__(AngelSpecDrafters)
    torch.nn.Module.__init__(model)
    model.served, model._copies = torch.nn.ModuleDict(served), (embedding_VD, head_VD)
    able, unable = Recorder(), Recorder(unable_from=1)
    turns = iter([unable, able])
    with caplog.at_level(logging.WARNING):
        model.record_choices([2], record=lambda function: next(turns)(function))
    assert "drafter 'one' drafts without CUDA graphs: operation not permitted" in caplog.text
    assert served["one"]._graphs is None and served["two"]._graphs is not None


@pytest.mark.parametrize(
    "most, sizes", [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (500, [1, 2, 4, 8, 16, 24, 32, 48, 64])]
)
def test_graphs_cover_every_batch_up_to_the_largest(most, sizes):
    assert graph_sizes(most) == sizes
