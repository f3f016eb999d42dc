"""The frugal head path against whole logits and autograd: every loss, support, strategy and chunking.

Shapes: N token positions, M distinct teacher rows, V vocabulary, D hidden, R rank of the trainable addition.
"""

from __future__ import annotations

import pytest
import torch

from angelspec.objectives import (
    Budget,
    Channel,
    HeadLoss,
    JudgedTeacher,
    LowRank,
    Support,
    Teacher,
    Workspace,
    head_loss,
    judge_rows,
    reference_head_loss,
    vocabulary_sweep,
)

N, M, V, D, R = 53, 17, 301, 24, 5

CHANNELS = {
    "ce": Channel(ce=1.0),
    "ce-scaled": Channel(ce=0.3),
    "kl": Channel(kl=1.0),
    "tv": Channel(tv=1.0),
    "l1": Channel(l1=0.7),
    "lk-hybrid": Channel(lk_hybrid=1.0, eta=3.0),
    "lk-hybrid-eta": Channel(lk_hybrid=0.5, eta=0.4),
    "lk-alpha": Channel(lk_alpha=1.0),
    "dspark": Channel(ce=0.1, l1=0.9),
    "everything": Channel(ce=0.3, kl=0.2, tv=0.5, l1=0.1, lk_hybrid=0.7, lk_alpha=0.4, eta=2.0),
}
SUPPORTS = {
    "full": Support(),
    "top-k": Support(top_k=6),
    "renormalised": Support(top_k=6, renormalise=True),
    "cut": Support(top_k=150),
    "cut and renormalised": Support(top_k=150, renormalise=True),
}
BUDGETS = {
    "one-piece": Budget(buffer_bytes=1 << 30, tile_columns=4096, product_columns=4096),
    "ragged": Budget(buffer_bytes=1, tile_columns=97, product_columns=41, min_rows=7),
    "single-rows": Budget(buffer_bytes=1, tile_columns=V, product_columns=1, min_rows=1),
}


@pytest.fixture(autouse=True)
def six_tokens_are_gathered_and_150_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary_sweep, "GATHERED_SHARE", V // 6)


def inputs(*, dtype=torch.float32, seed: int = 0, low_rank: bool = False) -> dict:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    teacher_MD = normal(M, D)
    index_N = torch.randint(0, M, (N,), generator=generator)
    given = {
        "hidden_ND": (teacher_MD[index_N] + 0.7 * normal(N, D)).requires_grad_(),
        "head_VD": 0.4 * normal(V, D),
        "labels_N": torch.randint(0, V, (N,), generator=generator),
        "teacher": Teacher(teacher_MD, index_N),
    }
    if low_rank:
        given["low_rank"] = LowRank(normal(N, R).requires_grad_(), (0.3 * normal(V, R)).requires_grad_())
    return given


def run(function, given: dict, **options) -> HeadLoss:
    given = dict(given)
    return function(given.pop("hidden_ND"), **given, **options)


def trained(given: dict) -> list[torch.Tensor]:
    return [given["hidden_ND"], *given.get("low_rank", ())]


def weighted_sum(result: HeadLoss) -> torch.Tensor:
    """A scalar in which every token of every channel has its own upstream weight, some of them 0 or negative."""
    return sum(
        (loss_N * torch.linspace(-0.3, 1.0 + number, len(loss_N), dtype=loss_N.dtype).relu()).sum()
        for number, loss_N in enumerate(result.losses.values())
    )


def assert_same(result: HeadLoss, expected: HeadLoss, given: dict, *, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    assert list(result.losses) == list(expected.losses)
    close = {"rtol": rtol, "atol": atol}
    for name, loss_N in result.losses.items():
        torch.testing.assert_close(
            loss_N, expected.losses[name], **close, msg=lambda text, name=name: f"{name}: {text}"
        )
    for field, value in result.statistics._asdict().items():
        torch.testing.assert_close(
            value, getattr(expected.statistics, field), **close, msg=lambda t, f=field: f"{f}: {t}"
        )
    found = torch.autograd.grad(weighted_sum(result), trained(given))
    wanted = torch.autograd.grad(weighted_sum(expected), trained(given))
    for gradient, reference in zip(found, wanted, strict=True):
        assert reference.abs().max() > 1e-3
        torch.testing.assert_close(gradient, reference, **close)


@pytest.mark.parametrize("low_rank", [False, True], ids=["unit-gradients", "recomputed"])
@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("channel", CHANNELS)
def test_each_channel_matches_the_reference(channel: str, support: str, low_rank: bool) -> None:
    given = inputs(low_rank=low_rank)
    options = {"channels": {channel: CHANNELS[channel]}, "support": SUPPORTS[support]}
    result = run(head_loss, given, **options, budget=BUDGETS["ragged"])
    assert_same(result, run(reference_head_loss, given, **options), given)


@pytest.mark.parametrize("low_rank", [False, True], ids=["unit-gradients", "recomputed"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("support", SUPPORTS)
def test_all_channels_at_once_in_any_pieces(support: str, budget: str, low_rank: bool) -> None:
    given = inputs(seed=1, low_rank=low_rank)
    options = {"channels": CHANNELS, "support": SUPPORTS[support]}
    result = run(head_loss, given, **options, budget=BUDGETS[budget])
    assert_same(result, run(reference_head_loss, given, **options), given)


def test_a_channel_does_not_disturb_one_that_comes_later() -> None:
    """The last channel is written over the probabilities; the order of channels must not matter."""
    given = inputs()
    for order in (["tv", "ce", "lk-hybrid"], ["lk-hybrid", "tv", "ce"], ["ce", "lk-hybrid", "tv"]):
        options = {"channels": {name: CHANNELS[name] for name in order}, "support": SUPPORTS["top-k"]}
        result = run(head_loss, given, **options, budget=BUDGETS["ragged"])
        assert_same(result, run(reference_head_loss, given, **options), given)


@pytest.mark.parametrize("low_rank", [False, True], ids=["unit-gradients", "recomputed"])
@pytest.mark.parametrize("support", SUPPORTS)
def test_gradients_pass_gradcheck_in_float64(support: str, low_rank: bool) -> None:
    """Only losses without a constant inside (lambda of the hybrid) are the derivative of their own value."""
    given = inputs(dtype=torch.float64, low_rank=low_rank)
    smooth = {"channels": {"mix": Channel(ce=0.3, kl=0.5, tv=0.4, lk_alpha=0.2), "ce": Channel(ce=1.0)}}

    def losses(*parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, *addition = parameters
        rest = {**given, "hidden_ND": hidden, **({"low_rank": LowRank(*addition)} if addition else {})}
        result = run(head_loss, rest, **smooth, support=SUPPORTS[support], budget=BUDGETS["ragged"])
        return tuple(result.losses.values())

    assert torch.autograd.gradcheck(losses, tuple(trained(given)), fast_mode=True, eps=1e-7, atol=1e-4)


def test_cross_entropy_needs_no_teacher() -> None:
    given = inputs() | {"teacher": None}
    options = {"channels": {"ce": Channel(ce=1.0)}}
    result = run(head_loss, given, **options, budget=BUDGETS["ragged"])
    assert result.statistics.alpha_N is None
    assert_same(result, run(reference_head_loss, given, **options), given)


def test_a_teacher_without_an_index_judges_row_by_row() -> None:
    given = inputs()
    rows_ND = given["teacher"].hidden_MD[given["teacher"].index_N]
    options = {"channels": CHANNELS, "support": SUPPORTS["top-k"], "budget": BUDGETS["ragged"]}
    shared = run(head_loss, given, **options)
    own = run(head_loss, given | {"teacher": Teacher(rows_ND)}, **options)
    assert_same(own, shared, given)


@pytest.mark.parametrize("support", SUPPORTS)
def test_rows_that_were_judged_before_give_what_their_states_give(support: str) -> None:
    given, workspace = inputs(), Workspace()
    options = {"channels": CHANNELS, "support": SUPPORTS[support], "budget": BUDGETS["ragged"], "workspace": workspace}
    teacher_MD, index_N = given["teacher"]
    rows = judge_rows(teacher_MD, head_VD=given["head_VD"], **options)
    for _ in range(2):  # the second call finds them unharmed
        expected = run(reference_head_loss, given, channels=CHANNELS, support=SUPPORTS[support])
        assert_same(run(head_loss, given | {"teacher": JudgedTeacher(rows, index_N)}, **options), expected, given)


@pytest.mark.parametrize("support", SUPPORTS)
def test_neighbouring_judges_are_read_in_place_and_give_the_same(support: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions in a row, as MTP has them: judge of each is the one after the judge of the one before."""
    given = inputs(seed=2)
    rows, start = 12, 3
    part = {
        "hidden_ND": given["hidden_ND"].detach()[:rows].requires_grad_(),
        "head_VD": given["head_VD"],
        "labels_N": given["labels_N"][:rows],
    }
    states, index = given["teacher"].hidden_MD, torch.arange(start, start + rows)
    options = {"channels": CHANNELS, "support": SUPPORTS[support], "budget": BUDGETS["ragged"]}
    workspace = Workspace()
    judged = judge_rows(states, head_VD=given["head_VD"], **options, workspace=workspace)
    expected = run(
        reference_head_loss, part | {"teacher": Teacher(states, index)}, channels=CHANNELS, support=SUPPORTS[support]
    )

    def refuse(*_args, **_kwargs) -> None:
        raise AssertionError("neighbours were gathered")

    monkeypatch.setattr(torch, "index_select", refuse)
    result = run(head_loss, part | {"teacher": JudgedTeacher(judged, index)}, **options, workspace=workspace)
    assert_same(result, expected, part)


def test_the_tokens_that_share_the_last_place_of_a_cut_all_count() -> None:
    given = inputs()
    given["head_VD"][100:] = given["head_VD"][99]  # 202 tokens of one logit
    teacher_MD = given["teacher"].hidden_MD
    order = (teacher_MD @ given["head_VD"].T).argsort(1, descending=True)
    count = 150
    tied = (order[:, :count] >= 99).any(1)
    assert tied.any()
    options = {"support": Support(top_k=count, renormalise=True), "channels": {"kl": Channel(kl=1.0)}}
    result = run(head_loss, given, **options, budget=BUDGETS["ragged"])
    student = given["hidden_ND"] @ given["head_VD"].T
    teacher = (teacher_MD @ given["head_VD"].T)[given["teacher"].index_N]
    inside = teacher >= teacher.topk(count, 1).values[:, -1:]
    log_q, log_p = (x.masked_fill(~inside, -torch.inf).log_softmax(1) for x in (student, teacher))
    expected = torch.where(inside, log_p.exp() * (log_p - log_q), 0.0).sum(1)
    torch.testing.assert_close(result.losses["kl"], expected, rtol=2e-4, atol=2e-5)


def test_a_token_far_below_the_peak_still_belongs_to_a_cut_support() -> None:
    """Its p would be 0 in float32; the student's mass on it counts all the same."""
    states = torch.eye(V, D)[:1] * 300.0
    head = torch.zeros(V, D)
    head[0, 0], head[200:, 0] = 1.0, -1.0  # the teacher: token 0 at 300, the next 199 at 0, the rest at -300
    head[100:200, 1] = torch.linspace(0.0, 1.0, 100)  # distinct for the student alone
    given = {
        "hidden_ND": torch.eye(V, D)[[1, 1]].requires_grad_(),
        "head_VD": head,
        "labels_N": torch.zeros(2, dtype=torch.long),
        "teacher": Teacher(states, torch.zeros(2, dtype=torch.long)),
    }
    options = {
        "support": Support(top_k=200, renormalise=True),
        "channels": {"ce": Channel(ce=1.0), "tv": Channel(tv=1.0)},
    }
    result = run(head_loss, given, **options, budget=BUDGETS["ragged"])
    assert_same(result, run(reference_head_loss, given, **options), given)


def test_a_student_whose_mass_lies_outside_a_cut_support_has_finite_losses() -> None:
    given = inputs()
    given["hidden_ND"] = (-40.0 * given["teacher"].hidden_MD[given["teacher"].index_N]).requires_grad_()
    result = run(
        head_loss, given, channels=CHANNELS, support=SUPPORTS["cut and renormalised"], budget=BUDGETS["ragged"]
    )
    assert all(loss_N.isfinite().all() for loss_N in result.losses.values())
    assert torch.autograd.grad(weighted_sum(result), trained(given))[0].isfinite().all()


def test_shared_teacher_rows_are_projected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given, rows = inputs(), []
    original = vocabulary_sweep.VocabularySweep._logits

    def counting(self, chunk: vocabulary_sweep.ChunkInput) -> torch.Tensor:
        rows.append(len(chunk.states_XD) - len(chunk.labels_R))
        return original(self, chunk)

    monkeypatch.setattr(vocabulary_sweep.VocabularySweep, "_logits", counting)
    budget = Budget(buffer_bytes=1, tile_columns=V, product_columns=V, min_rows=20)
    run(head_loss, given, channels={"tv": Channel(tv=1.0)}, budget=budget)
    distinct = len(given["teacher"].index_N.unique())
    assert len(rows) == 3
    assert distinct <= sum(rows) <= distinct + len(rows) - 1


def test_no_buffer_grows_with_the_number_of_positions() -> None:
    given, workspace = inputs(), Workspace()
    run(head_loss, given, channels=CHANNELS, budget=BUDGETS["ragged"], workspace=workspace)
    rows, tile = 7, 97
    assert workspace.num_bytes <= 4 * (3 * rows * V + 2 * rows * tile)


def test_a_workspace_can_be_reused_by_calls_of_other_sizes_and_in_inference_mode() -> None:
    workspace = Workspace()
    options = {"channels": CHANNELS, "support": SUPPORTS["top-k"], "budget": BUDGETS["ragged"]}
    with torch.inference_mode():
        run(head_loss, inputs(seed=3), **options, workspace=workspace)
    given = inputs(seed=4)
    larger = options | {"budget": BUDGETS["one-piece"]}
    for choice in (options, larger, options):
        assert_same(run(head_loss, given, **choice, workspace=workspace), run(head_loss, given, **choice), given)


@pytest.mark.parametrize("low_rank", [False, True])
def test_without_gradients_the_values_are_the_same_and_nothing_is_pulled_back(
    low_rank: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(low_rank=low_rank)
    options = {"channels": CHANNELS, "support": SUPPORTS["top-k"], "budget": BUDGETS["ragged"]}
    expected = run(head_loss, given, **options)

    def refuse(*_args, **_kwargs) -> None:
        raise AssertionError("gradient work without a gradient")

    monkeypatch.setattr(vocabulary_sweep.VocabularySweep, "logit_gradient", refuse)
    monkeypatch.setattr(vocabulary_sweep.VocabularySweep, "pull_back", refuse)
    with torch.no_grad():
        result = run(head_loss, given, **options)
    for name, loss_N in result.losses.items():
        assert not loss_N.requires_grad
        torch.testing.assert_close(loss_N, expected.losses[name])
    torch.testing.assert_close(result.statistics, expected.statistics)


@pytest.mark.parametrize("low_rank", [False, True])
def test_no_positions_give_empty_losses_with_a_graph(low_rank: bool) -> None:
    given = inputs(low_rank=low_rank)
    empty = given | {
        "hidden_ND": torch.zeros(0, D, requires_grad=True),
        "labels_N": given["labels_N"][:0],
        "teacher": Teacher(given["teacher"].hidden_MD, given["teacher"].index_N[:0]),
    }
    if low_rank:
        empty["low_rank"] = LowRank(torch.zeros(0, R, requires_grad=True), given["low_rank"].weight_VR)
    result = run(head_loss, empty, channels=CHANNELS)
    total = sum(loss_N.sum() for loss_N in result.losses.values())
    gradients = torch.autograd.grad(total, trained(empty))
    assert total == 0
    assert [gradient.shape for gradient in gradients] == [parameter.shape for parameter in trained(empty)]
    assert all(gradient.eq(0).all() for gradient in gradients)


def test_pieces_of_a_batch_add_up_to_the_whole() -> None:
    given = inputs()
    options = {"channels": CHANNELS, "support": SUPPORTS["top-k"], "budget": BUDGETS["ragged"]}
    whole = run(head_loss, given, **options)
    (gradient,) = torch.autograd.grad(sum(x.sum() for x in whole.losses.values()), [given["hidden_ND"]])
    accumulated = torch.zeros_like(gradient)
    for part in torch.arange(N).split(20):
        piece = given | {
            "hidden_ND": given["hidden_ND"][part],
            "labels_N": given["labels_N"][part],
            "teacher": Teacher(given["teacher"].hidden_MD, given["teacher"].index_N[part]),
        }
        result = run(head_loss, piece, **options)
        total = sum(x.sum() for x in result.losses.values())
        accumulated += torch.autograd.grad(total, [given["hidden_ND"]])[0]
        for name, loss_N in result.losses.items():
            torch.testing.assert_close(loss_N, whole.losses[name][part], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(accumulated, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("low_rank", [False, True], ids=["unit-gradients", "recomputed"])
@pytest.mark.parametrize("support", SUPPORTS)
def test_bfloat16_products_match_the_bfloat16_reference_and_stay_near_float32(support: str, low_rank: bool) -> None:
    given = inputs(low_rank=low_rank)
    narrow = given | {"head_VD": given["head_VD"].bfloat16()}
    options = {"channels": CHANNELS, "support": SUPPORTS[support]}
    result = run(head_loss, narrow, **options, budget=BUDGETS["ragged"])
    rounded, exact = run(reference_head_loss, narrow, **options), run(reference_head_loss, given, **options)
    for name, loss_N in result.losses.items():
        assert loss_N.dtype == torch.float32
        torch.testing.assert_close(loss_N, rounded.losses[name], rtol=0.02, atol=0.02)
        assert (loss_N - exact.losses[name]).abs().median() < 0.03
    found, near, wanted = (torch.autograd.grad(weighted_sum(run_), trained(given)) for run_ in (result, rounded, exact))
    for gradient, close, reference in zip(found, near, wanted, strict=True):
        assert gradient.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(gradient.flatten(), close.flatten(), dim=0) > 0.9995
        assert torch.nn.functional.cosine_similarity(gradient.flatten(), reference.flatten(), dim=0) > 0.97


def test_bfloat16_states_get_bfloat16_gradients() -> None:
    given = inputs()
    given["hidden_ND"] = given["hidden_ND"].detach().bfloat16().requires_grad_()
    result = run(head_loss, given, channels={"ce": Channel(ce=1.0)})
    (gradient,) = torch.autograd.grad(result.losses["ce"].sum(), [given["hidden_ND"]])
    assert gradient.dtype == torch.bfloat16
    assert result.losses["ce"].dtype == torch.float32


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_inputs_show_in_losses_and_gradients(poison: float) -> None:
    given = inputs()
    hidden = given["hidden_ND"].detach().clone()
    hidden[5, 3] = poison
    given["hidden_ND"] = hidden.requires_grad_()
    result = run(head_loss, given, channels=CHANNELS, support=SUPPORTS["top-k"], budget=BUDGETS["ragged"])
    (gradient,) = torch.autograd.grad(weighted_sum(result), [hidden])
    for name, loss_N in result.losses.items():
        assert not loss_N[5].isfinite(), name
        assert loss_N[torch.arange(N) != 5].isfinite().all(), name
    assert not gradient.isfinite().all()


def test_a_non_finite_teacher_shows_in_every_comparison() -> None:
    given = inputs()
    given["teacher"].hidden_MD[given["teacher"].index_N[5]] = float("nan")
    for support in SUPPORTS.values():
        result = run(head_loss, given, channels=CHANNELS, support=support, budget=BUDGETS["ragged"])
        for name, loss_N in result.losses.items():
            assert CHANNELS[name].compares != bool(loss_N[5].isfinite()), name


def test_equal_student_and_teacher_have_no_divergence() -> None:
    given = inputs()
    given["hidden_ND"] = given["teacher"].hidden_MD[given["teacher"].index_N].clone().requires_grad_()
    channels = {name: CHANNELS[name] for name in ("kl", "tv", "l1", "lk-hybrid", "lk-alpha")}
    result = run(head_loss, given, channels=channels, budget=BUDGETS["ragged"])
    torch.testing.assert_close(result.statistics.alpha_N, torch.ones(N))
    for loss_N in result.losses.values():
        torch.testing.assert_close(loss_N, torch.zeros(N), rtol=0, atol=1e-5)
    (gradient,) = torch.autograd.grad(result.losses["kl"].sum(), [given["hidden_ND"]])
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-5)


def test_disjoint_distributions_keep_the_lk_alpha_loss_finite() -> None:
    head_VD = torch.eye(4) * 200
    given = {
        "hidden_ND": torch.eye(4)[:1].clone().requires_grad_(),
        "head_VD": head_VD,
        "labels_N": torch.tensor([0]),
        "teacher": Teacher(torch.eye(4)[1:2]),
    }
    result = run(head_loss, given, channels={"lk-alpha": Channel(lk_alpha=1.0)})
    assert result.statistics.alpha_N == 0
    assert result.losses["lk-alpha"].isfinite()
    assert torch.autograd.grad(result.losses["lk-alpha"].sum(), [given["hidden_ND"]])[0].isfinite().all()


def test_a_label_that_ties_with_an_earlier_token_is_not_correct() -> None:
    """Otherwise an untrained head of zeros would report perfect accuracy."""
    given = {
        "hidden_ND": torch.zeros(3, D, requires_grad=True),
        "head_VD": torch.randn(V, D),
        "labels_N": torch.tensor([0, 1, V - 1]),
    }
    result = run(head_loss, given, channels={"ce": Channel(ce=1.0)}, budget=BUDGETS["ragged"])
    assert result.statistics.correct_N.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"teacher": None}, "none was given"),
        ({"labels_N": torch.zeros(3, dtype=torch.long)}, "labels_N"),
        ({"head_VD": torch.zeros(V, D + 1)}, "head_VD"),
        ({"head_VD": torch.zeros(V, D, requires_grad=True)}, "frozen"),
        ({"teacher": Teacher(torch.zeros(M, D))}, "teacher.hidden_MD"),
        ({"low_rank": LowRank(torch.zeros(N, R), torch.zeros(V, R + 1))}, "low_rank"),
        ({"support": Support(top_k=V + 1)}, "top_k"),
    ],
)
@pytest.mark.parametrize("function", [head_loss, reference_head_loss])
def test_requests_that_do_not_fit_are_refused(function, change: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        run(function, inputs() | change, channels=CHANNELS)


def test_judged_rows_and_a_trainable_addition_do_not_go_together() -> None:
    given = inputs(low_rank=True)
    rows = judge_rows(given["teacher"].hidden_MD, head_VD=given["head_VD"], channels=CHANNELS, workspace=Workspace())
    with pytest.raises(ValueError, match="judged rows"):
        run(head_loss, given | {"teacher": JudgedTeacher(rows, given["teacher"].index_N)}, channels=CHANNELS)
