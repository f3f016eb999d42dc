"""Chat templates that angelspec brings: the plain text where no thinking is asked for, and one switch for servers."""

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from target_builders import FAMILIES, MODE_FAMILIES, tiny_target, user

from angelspec.core.modes import mode_family
from angelspec.targets.sources import TEMPLATE_FOLDER

IDENTITY = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def smollm2(messages, **arguments):
    """Rendered as transformers (and so a server) does."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.Undefined)
    template = environment.from_string((TEMPLATE_FOLDER / "smollm2.jinja").read_text(encoding="utf-8"))
    return template.render(messages=messages, **{"add_generation_prompt": False, **arguments})


def turn(role, text):
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def say(role, content, **more):
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}])
def test_without_thinking_it_is_the_original_format(arguments):
    talk = [say("user", " a\n"), say("assistant", "b"), say("user", "c")]
    plain = turn("user", " a\n") + turn("assistant", "b") + turn("user", "c")
    assert smollm2(talk, **arguments) == turn("system", IDENTITY) + plain
    assert smollm2(talk, **arguments, add_generation_prompt=True).endswith(
        turn("user", "c") + "<|im_start|>assistant\n"
    )
    own = [say("system", "Be brief."), *talk]
    assert smollm2(own, **arguments) == turn("system", "Be brief.") + plain


def test_thinking_asks_for_reasoning_and_opens_it():
    text = smollm2([say("user", "a")], enable_thinking=True, add_generation_prompt=True)
    system, rest = text.split("<|im_end|>\n", 1)
    assert system.startswith(f"<|im_start|>system\n{IDENTITY}\n\n")
    assert "<think>" in system
    assert "</think>" in system
    assert "tep by step" in system
    assert rest == turn("user", "a") + "<|im_start|>assistant\n<think>\n"


def test_thinking_keeps_the_users_system_message():
    text = smollm2([say("system", "Be brief."), say("user", "a")], enable_thinking=True)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n")
    assert IDENTITY not in text
    assert text.count("<|im_start|>system") == 1
    assert "</think>" in text


@pytest.mark.parametrize("thinking", [True, False])
def test_history_has_no_reasoning(thinking):
    inline = say("assistant", "<think>\nsecret\n</think>\n\nb")
    field = say("assistant", "d", reasoning_content="secret")
    text = smollm2([say("user", "a"), inline, say("user", "c"), field, say("user", "e")], enable_thinking=thinking)
    assert "secret" not in text
    assert text.endswith(
        turn("user", "a") + turn("assistant", "b") + turn("user", "c") + turn("assistant", "d") + turn("user", "e")
    )


@pytest.mark.parametrize(
    "answer",
    [say("assistant", "5", reasoning_content="2+3\nis 5"), say("assistant", "<think>\n2+3\nis 5\n</think>\n\n5")],
)
def test_last_answer_shows_its_reasoning(answer):
    prompt = smollm2([say("user", "a")], enable_thinking=True, add_generation_prompt=True)
    whole = smollm2([say("user", "a"), answer], enable_thinking=True)
    assert whole == prompt + "2+3\nis 5\n</think>\n\n5<|im_end|>\n"
    assert "2+3" not in smollm2([say("user", "a"), say("assistant", "5", reasoning_content="2+3")])


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_templates_switch_as_their_family(family):
    target = tiny_target(family)
    modes = mode_family(MODE_FAMILIES[family])
    off, on = (
        target.tokenizer.decode(target.render(user("Hi"), mode=mode, add_generation_prompt=True))
        for mode in modes.modes
    )
    assert off != on
    # the reasoning that the mode opens, or leaves to the model to open, is closed before a plain answer only
    assert on.count(modes.think_open) >= on.count(modes.think_close)
    if family != "llama":
        assert off.endswith(modes.think_close + ("\n\n" if family == "qwen3" else ""))
        assert not on.rstrip().endswith(modes.think_close)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["no-think", "high-think"])
def test_tiny_prompts_are_prefixes_of_whole_turns(family, mode):
    target = tiny_target(family)
    prompt = target.render(user("Hi"), mode=mode, add_generation_prompt=True)
    answer = say("assistant", "yes", **({"reasoning_content": "hm"} if mode == "high-think" else {}))
    whole = target.render([*user("Hi"), answer], mode=mode, add_generation_prompt=False)
    assert whole[: len(prompt)] == prompt
    shown = target.tokenizer.decode(whole[len(prompt) :])
    assert "yes<|im_end|>" in shown
    assert ("hm" in shown) == (mode == "high-think")
