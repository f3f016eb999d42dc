"""A target's tokens, taps, hidden states and logits, and that start-up refuses every way in which they can be wrong."""

import json
import shutil

import pytest
import torch
from target_builders import FAMILIES, MODE_FAMILIES, fresh_target, tiny_section, tiny_target, user
from torch import nn

from angelspec.core.errors import RecipeError, TargetError
from angelspec.core.geometry import TargetGeometry
from angelspec.core.known_targets import KNOWN_TARGETS, TINY_VOCABULARY
from angelspec.core.recipe import TargetSection
from angelspec.targets.target import load_target, verify_target

TOKENS = torch.tensor([[257, 72, 105, 258, 10, 33]])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_those_of_plain_transformers(family, dtype):
    target = tiny_target(family, dtype)
    verify_target(target, layer_ids=(0, 2, 5))
    verify_target(target, layer_ids=())  # MTP taps nothing
    states = target.forward(TOKENS, layer_ids=(1, 3))
    plain = target.model(input_ids=TOKENS, output_hidden_states=True, use_cache=False)
    assert states.taps_BTF.dtype == states.hidden_BTD.dtype == dtype
    assert states.taps_BTF.shape == (1, 6, 128)
    assert torch.equal(states.taps_BTF, torch.cat([plain.hidden_states[2], plain.hidden_states[4]], dim=-1))
    assert torch.equal(states.hidden_BTD, plain.hidden_states[-1])
    assert target.logits(states.hidden_BTD).dtype == torch.float32
    assert torch.equal(target.logits(states.hidden_BTD), plain.logits.float())
    assert not states.hidden_BTD.requires_grad


def test_taps_of_other_calls_leave_no_trace():
    target = tiny_target("llama")
    wide = target.forward(TOKENS, layer_ids=(1, 2, 3))
    narrow = target.forward(TOKENS, layer_ids=(1, 3))
    assert torch.equal(narrow.taps_BTF, torch.cat([wide.taps_BTF[..., :64], wide.taps_BTF[..., 128:]], dim=-1))
    assert target.forward(TOKENS).taps_BTF.shape == (1, 6, 0)
    for ids, said in (((3, 1), "ascending"), ((1, 1), "ascending"), ((6,), "0..5"), ((-1,), "0..5")):
        with pytest.raises(ValueError, match=said):
            target.forward(TOKENS, layer_ids=ids)


def test_documents_of_a_packed_row_are_apart():
    target = tiny_target("qwen3")
    both = torch.cat([TOKENS, TOKENS.flip(1)], dim=1)
    document = torch.tensor([0] * 6 + [1] * 6)
    visible = (document[:, None] == document) & torch.ones(12, 12, dtype=torch.bool).tril()
    positions = torch.arange(6).repeat(2)[None]
    packed = target.forward(both, positions_BT=positions, attention_mask=visible[None, None], layer_ids=(2,))
    for span, row in ((slice(0, 6), TOKENS), (slice(6, 12), TOKENS.flip(1))):
        alone = target.forward(row, layer_ids=(2,))
        torch.testing.assert_close(packed.hidden_BTD[:, span], alone.hidden_BTD, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(packed.taps_BTF[:, span], alone.taps_BTF, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_tiny_target_is(family):
    target = tiny_target(family)
    assert target.geometry == KNOWN_TARGETS[f"tiny-{family}"].geometry
    assert target.stop_token_ids == (258,)
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    tied = family == "llama"
    assert (target.head_VD.data_ptr() == target.embedding_VD.data_ptr()) == tied
    text = "".join(map(chr, range(1, 128))) + "é漢\U0001f600"
    ids = target.tokenizer.encode(text, add_special_tokens=False)
    assert bytes(ids) == text.encode()
    assert target.tokenizer.decode(ids) == text
    assert len(target.tokenizer) == TINY_VOCABULARY


@pytest.mark.parametrize("family", FAMILIES)
def test_rendering_is_that_of_the_tokenizer(family):
    target = tiny_target(family)
    for mode in ("no-think", "high-think"):
        ids = target.render(user("Grüße"), mode=mode, add_generation_prompt=True)
        theirs = target.tokenizer.apply_chat_template(
            user("Grüße"), add_generation_prompt=True, tokenize=True, return_dict=False,
            **target.mode_family.arguments(mode),
        )  # fmt: skip
        assert ids == list(theirs)


class Off(nn.Module):
    """A module whose output is changed."""

    def __init__(self, inner, change):
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, *arguments, **options):
        return self.change(self.inner(*arguments, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [-1, 1])
def test_an_off_by_one_does_not_start(dtype, shift):
    target = fresh_target("qwen3", dtype)
    target._layers = [*target._layers[shift:], *target._layers[:shift]]
    with pytest.raises(TargetError, match=r"layer id 2 .* nearest is the output of layer"):
        verify_target(target, layer_ids=(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_side_of_the_norm_does_not_start(dtype):
    target = fresh_target("llama", dtype)
    decoder = target._decoder
    target._decoder = Off(decoder, lambda out: type(out)(last_hidden_state=decoder.norm(out.last_hidden_state)))
    target._decoder.norm = decoder.norm
    with pytest.raises(TargetError, match="last hidden state"):
        verify_target(target, layer_ids=(1,))


def test_other_logits_do_not_start():
    target = fresh_target("qwen3")
    target.model.lm_head = Off(target.model.lm_head, lambda logits: 30 * torch.tanh(logits / 30))
    with pytest.raises(TargetError, match="scale, cap or shift"):
        verify_target(target, layer_ids=(1,))


def test_a_cache_that_forgets_does_not_start():
    target = fresh_target("llama")
    new_cache = target.new_cache

    def broken(**options):
        cache = new_cache(**options)
        cache.mask = lambda: None if cache._fresh else torch.ones(1, 1, cache.positions().shape[1], cache.width).bool()
        return cache

    target.new_cache = broken
    with pytest.raises(TargetError, match="through the cache"):
        verify_target(target, layer_ids=(1,))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ANGELSPEC_CACHE", str(tmp_path / "cache"))
    return shutil.copytree(tiny_target("llama").folder, tmp_path / "model")


def section(folder, **changes):
    return TargetSection(source=f"folder:{folder}", mode_family="smollm2", **changes)


def drop_template(folder):
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("chat_template")
    path.write_text(json.dumps(settings))


def test_no_chat_template(folder, tmp_path):
    drop_template(folder)
    with pytest.raises(TargetError, match="has no chat template") as caught:
        load_target(section(folder), dtype=torch.float32)
    assert str(folder) in caught.value.message
    assert "target.chat_template" in caught.value.mend
    with pytest.raises(TargetError, match="does not exist"):
        load_target(section(folder, chat_template=str(tmp_path / "none.jinja")), dtype=torch.float32)


def test_own_chat_template(folder, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}!")
    before = load_target(section(folder), dtype=torch.float32)
    target = load_target(section(folder, chat_template=str(own)), dtype=torch.float32)
    assert bytes(target.render(user("Hi"), mode="no-think", add_generation_prompt=True)) == b"Hi!"
    assert target.digest != before.digest
    # it ignores the switch, so no mode but the plain one may be rendered with it
    with pytest.raises(TargetError, match="no thinking switch") as caught:
        target.render(user("Hi"), mode="high-think", add_generation_prompt=True)
    assert "smollm2.jinja" in caught.value.mend


def test_template_that_refuses(folder, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text("{{ raise_exception('roles must alternate') }}")
    target = load_target(section(folder, chat_template=str(own)), dtype=torch.float32)
    with pytest.raises(TargetError, match="roles must alternate"):
        target.render(user("Hi"), mode="no-think", add_generation_prompt=True)


def test_mode_that_the_family_lacks(folder):
    target = load_target(TargetSection(source=f"folder:{folder}", mode_family="plain"), dtype=torch.float32)
    with pytest.raises(RecipeError, match="high-think"):
        target.render(user("Hi"), mode="high-think", add_generation_prompt=True)


def test_not_what_the_recipe_says(folder):
    said = KNOWN_TARGETS["tiny-llama"].geometry.model_copy(update={"hidden_size": 128})
    with pytest.raises(TargetError, match="hidden_size is 64, not 128"):
        load_target(section(folder, geometry=said), dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    del config["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match="vocab_size"):
        load_target(section(folder), dtype=torch.float32)


def test_no_end_of_text(folder):
    shutil.rmtree(folder)
    shutil.copytree(tiny_target("qwen3").folder, folder)
    for name, keys in (("config.json", ["eos_token_id"]), ("tokenizer_config.json", ["eos_token"])):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({key: value for key, value in values.items() if key not in keys}))
    (folder / "generation_config.json").write_text("{}")
    with pytest.raises(TargetError, match="end-of-text"):
        load_target(section(folder), dtype=torch.float32)


def test_several_stop_tokens(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
    assert load_target(section(folder), dtype=torch.float32).stop_token_ids == (256, 258)


def test_sliding_windows_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    kinds = ["full_attention", "sliding_attention"] * 3
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "layer_types": kinds,
               "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match="sliding_attention"):
        load_target(section(folder), dtype=torch.float32)


@pytest.mark.parametrize("sharded", [False, True])
def test_tied_head_without_a_head_in_the_file(folder, sharded):
    """B22: the head is the embedding, also where the weights lie in shards."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    if sharded:
        names = sorted(weights)
        parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, keys in parts.items():
            save_file({key: weights[key] for key in keys}, folder / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {key: file for file, keys in parts.items() for key in keys}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "model.safetensors").unlink()
    target = load_target(section(folder), dtype=torch.float32)
    assert target.head_VD.data_ptr() == target.embedding_VD.data_ptr()
    assert torch.equal(target.head_VD, weights["model.embed_tokens.weight"])
    verify_target(target, layer_ids=(1,))


@pytest.mark.parametrize(
    "spelling",
    [{"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
     {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
     {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                          "original_max_position_embeddings": 256}}],
)  # fmt: skip
def test_rope_in_every_spelling(folder, spelling):
    """B23: the same geometry, and the frequencies that transformers computes for it."""
    config = json.loads((folder / "config.json").read_text())
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps({**config, **spelling}))
    target = load_target(section(folder), dtype=torch.float32)
    rope = target.geometry.rope
    assert (rope.theta, rope.type, rope.scaling["factor"]) == (1e6, "yarn", 4.0)
    assert TargetGeometry.from_config(target.model.config.to_dict()).rope.theta == 1e6
    frequencies = target._decoder.rotary_emb.inv_freq
    assert frequencies[0] == 1.0
    assert 0 < frequencies[-1] < 1e6 ** -(14 / 16) / 2  # the slowest is interpolated by the factor
    verify_target(target, layer_ids=(1,))


def test_section_is_needed_in_full():
    with pytest.raises(TargetError, match="not set"):
        load_target(TargetSection(source="random:llama"), dtype=torch.float32)
    assert tiny_section("hy3").mode_family == MODE_FAMILIES["hy3"]


def test_a_template_that_cannot_be_read_is_named_in_every_mode(folder, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text("{% if %}")
    target = load_target(section(folder, chat_template=str(own)), dtype=torch.float32)
    for mode in ("no-think", "high-think"):
        with pytest.raises(TargetError, match="the chat template of"):
            target.render(user("Hi"), mode=mode, add_generation_prompt=True)


def test_a_truncated_tokenizer_is_named(folder):
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(TargetError, match="the tokenizer of .* can't be loaded"):
        load_target(section(folder), dtype=torch.float32)


def test_a_prefill_behind_a_prefix_holds_no_scores(monkeypatch):
    target = tiny_target("llama")
    tokens = torch.randint(0, 90, (2, 140), generator=torch.Generator().manual_seed(0))
    whole = target.forward(tokens).hidden_BTD
    shapes = []
    softmax = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda scores, **how: shapes.append(scores.shape) or softmax(scores, **how))
    cache = target.new_cache(rows=2, capacity=140)
    for start, end in ((0, 20), (20, 130), (130, 140)):
        hidden = target.forward(tokens[:, start:end], cache=cache).hidden_BTD
        cache.commit(torch.full((2,), end - start))
        torch.testing.assert_close(hidden, whole[:, start:end], rtol=1e-4, atol=1e-5)
    repeats = target.geometry.num_heads // target.geometry.num_kv_heads
    assert {shape[2] for shape in shapes} <= {20 * repeats, 10 * repeats}
