"""What drafters share of the target is put together from the ranks' shards, without what pads them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sglang_ext.ranks import QuantisedError, Ranks

VOCABULARY, PADDED, HIDDEN = 300, 320, 8
WEIGHT_VD = torch.randn(PADDED, HIDDEN, generator=torch.Generator().manual_seed(0))
SIZE = {"rows": VOCABULARY, "columns": HIDDEN, "name": "vocabulary head"}


class Group:
    """Two ranks of which this process plays the second."""

    world_size, rank_in_group = 2, 1

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        assert dim == 0 and torch.equal(tensor, WEIGHT_VD[PADDED // 2 :])
        return WEIGHT_VD

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        assert src == 0
        return tensor.fill_(7)

    def broadcast_object(self, value: object, src: int) -> object:
        return "the first rank's"


def test_a_matrix_is_whole_without_its_padding() -> None:
    whole_VD = Ranks(Group()).whole(WEIGHT_VD[PADDED // 2 :], **SIZE)
    assert torch.equal(whole_VD, WEIGHT_VD[:VOCABULARY])
    alone = Ranks(SimpleNamespace(world_size=1, rank_in_group=0))
    assert alone.whole(WEIGHT_VD, **SIZE).data_ptr() == WEIGHT_VD.data_ptr()


@pytest.mark.parametrize(
    "weight", [WEIGHT_VD.to(torch.float8_e4m3fn), WEIGHT_VD.to(torch.int8), WEIGHT_VD.t().contiguous()]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_quantised_head_is_refused_on_any_number_of_ranks(weight: Tensor, ranks: int) -> None:
    group = SimpleNamespace(world_size=ranks, rank_in_group=0)
    with pytest.raises(QuantisedError, match="vocabulary head is stored as"):
        Ranks(group).whole(weight, **SIZE)


def test_the_first_rank_s_values_are_taken() -> None:
    ranks = Ranks(Group())
    assert ranks.several and not ranks.is_first
    assert ranks.agree("mine") == "the first rank's"
    assert ranks.sync(torch.zeros(3)).tolist() == [7, 7, 7]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_multiplies_without_its_padding(ranks: int, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sglang")
    from sglang_ext.models import drafters

    mine_VD = WEIGHT_VD if ranks == 1 else WEIGHT_VD[PADDED // 2 :]
    embedding = SimpleNamespace(weight=mine_VD)
    head = SimpleNamespace(
        weight=mine_VD if tied else mine_VD.clone(),
        quant_method=SimpleNamespace(apply=lambda layer, x: F.linear(x, layer.weight)),
    )
    group = Group() if ranks == 2 else SimpleNamespace(world_size=1, rank_in_group=0)
    monkeypatch.setattr(drafters, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    model = object.__new__(drafters.AngelSpecDrafters)
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(vocab_size=VOCABULARY, hidden_size=HIDDEN)
    model._copies = None
    model.attach_shared_modules(embed_tokens=embedding, lm_head=head)
    states = torch.randn(2, 3, HIDDEN)
    assert torch.allclose(model.multiply(states, model.head_VD), states @ WEIGHT_VD[:VOCABULARY].T, atol=1e-5)
    assert torch.equal(model.embedding_VD[:VOCABULARY], WEIGHT_VD[:VOCABULARY])
