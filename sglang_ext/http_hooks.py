"""Hooks in the HTTP process: requests are labelled on their way in, and answers say how they were made."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from typing import Any

from angelspec.core.classifier import classify
from angelspec.core.errors import RequestError
from angelspec.core.modes import mode_family
from angelspec.core.request_label import parse_label
from angelspec.core.routing import choose_route
from sglang_ext.answers import TOKENS_KEY, AnswerState
from sglang_ext.requests import RESOLVED_KEY, complete_label
from sglang_ext.settings import current_plan

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat."


def hooks() -> Mapping[str, Any]:
    """Dotted path of a method to what is put around it."""
    return {
        f"{_MANAGER}generate_request": _generate_request,
        f"{_MANAGER}update_request_meta_info": _update_meta_info,
        f"{_CHAT}_process_messages": _process_messages,
        f"{_CHAT}_convert_to_internal_request": _convert_chat,
        f"{_CHAT}_generate_stream_content": _stream_content,
    }


# ------------------------------------------------------------------------------------------------- requests


_rendered: ContextVar[Mapping[str, Any] | None] = ContextVar("angelspec_rendered", default=None)
"""What is known of the chat that this task has rendered (arguments of ``complete_label``)."""


def _process_messages(original: Any, serving: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Note a chat's workload, by its messages, and its mode, by what the template was given: SGLang moves the reasoning
    effort out of the template's arguments, and has a default for some models."""
    outcome = original(serving, request, *args, **kwargs)
    messages = [
        message.model_dump() if hasattr(message, "model_dump") else dict(message) for message in request.messages
    ]
    effort = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
    family = mode_family(current_plan().bundle.target.mode_family)
    mode = family.mode_of({**effort, **(request.chat_template_kwargs or {})})
    _rendered.set({"workload": classify(messages).workload, "mode": mode, "mode_known": True})
    return outcome


def _convert_chat(original: Any, serving: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Label a chat."""
    adapted, processed = original(serving, request, *args, **kwargs)
    label = _label(request.custom_params, **(_rendered.get() or {}))
    _attach(adapted, {**label, _PIECES: bool(request.stream and request.return_spec_tokens_details)})
    return adapted, processed


async def _generate_request(original: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    """Label a native request, which a chat is by now, too."""
    is_generation = hasattr(obj, "extra_key")  # embeddings come this way, too
    if is_generation:
        try:
            _refuse(obj)
            if not getattr(obj, "angelspec_labelled", False):
                _label_native(obj)
        except ValueError:
            obj.normalize_batch_and_arguments()  # SGLang's clean-up of a refused stream reads what this sets
            raise
    async for answer in original(manager, obj, *args, **kwargs):
        yield answer


def _refuse(obj: Any) -> None:
    masks = getattr(obj, "return_sampling_mask", False)
    if any(masks) if isinstance(masks, list) else masks:
        raise ValueError("return_sampling_mask is not available with angelspec's speculation")


def _label_native(obj: Any) -> None:
    params = obj.sampling_params
    texts = obj.text
    if isinstance(params, list) or isinstance(texts, list) or (texts is None and _is_batch(obj.input_ids)):
        count = len(texts) if isinstance(texts, list) else len(obj.input_ids or params)
        if not isinstance(params, list):
            params = [dict(params or {}) for _ in range(count)]
        prompts = texts if isinstance(texts, list) else [None] * count
        lists = (params, prompts, obj.extra_key if isinstance(obj.extra_key, list) else prompts)
        if any(len(one) != count for one in lists):
            return  # SGLang refuses it, in its own words
        labels = [_native_label(one, prompt) for one, prompt in zip(params, prompts, strict=True)]
        obj.sampling_params = [_with_label(one, label) for one, label in zip(params, labels, strict=True)]
        given = obj.extra_key if isinstance(obj.extra_key, list) else [obj.extra_key] * count
        obj.extra_key = [_apart(key, label) for key, label in zip(given, labels, strict=True)]
        obj.angelspec_labelled = True
        return
    _attach(obj, _native_label(params, texts))


def _is_batch(input_ids: Any) -> bool:
    return bool(input_ids) and isinstance(input_ids[0], list)


def _native_label(params: Mapping[str, Any] | None, prompt: str | None) -> dict[str, Any]:
    return _label((params or {}).get("custom_params"), **(_rendered.get() or {"prompt": prompt}))


def _label(custom_params: Any, **found: Any) -> dict[str, Any]:
    """A request's label, completed by what was found out (arguments of ``complete_label``).

    Raises:
        ValueError: the label is wrong, or its route is for another mode; SGLang answers with status 400.
    """
    bundle = current_plan().bundle
    if isinstance(custom_params, Mapping):  # a client can't speak for this process
        custom_params = {key: value for key, value in custom_params.items() if key != RESOLVED_KEY}
    try:
        label = parse_label(custom_params or None, foreign_keys=True)
        complete = complete_label(label, bundle=bundle, **found)
        choose_route(bundle, label, workload=complete["workload"], mode=complete["mode"] or None, batch_size=1)
    except RequestError as error:
        raise ValueError(str(error)) from None
    return complete


def _attach(obj: Any, label: dict[str, Any]) -> None:
    obj.sampling_params = _with_label(obj.sampling_params, label)
    obj.extra_key = _apart(obj.extra_key, label)
    obj.angelspec_labelled = True


def _with_label(params: Mapping[str, Any] | None, label: dict[str, Any]) -> dict[str, Any]:
    params = dict(params or {})
    params["custom_params"] = {**(params.get("custom_params") or {}), RESOLVED_KEY: label}
    return params


def _apart(extra_key: str | None, label: Mapping[str, Any]) -> str:
    """Prefixes of different modes are cached apart: they carry the entries of different drafters."""
    return f"{extra_key or ''}|angelspec:{label['mode'] or 'other'}"


# -------------------------------------------------------------------------------------------------- answers


def _update_meta_info(
    original: Any, manager: Any, meta_info: dict[str, Any], state: Any, customized_info: dict[str, Any], index: int,
    finish_reason: Any,
) -> Any:  # fmt: skip
    """Fold the entries of new tokens into the answer's metadata."""
    entries = customized_info.get(TOKENS_KEY)
    others = {key: value for key, value in customized_info.items() if key != TOKENS_KEY}
    outcome = original(manager, meta_info, state, others, index, finish_reason)
    if entries is not None:
        if not hasattr(state, "angelspec"):
            state.angelspec = AnswerState(tokenizer=manager.tokenizer)
        new = state.angelspec.add(entries[index])
        meta_info["angelspec"] = state.angelspec.metadata()
        # by SGLang's own means, which cut and join such lists as they do with the tokens
        manager._accumulate_request_meta_info(meta_info, state, "angelspec_positions", new)
        params = state.obj.sampling_params or {}
        if (params.get("custom_params") or {}).get(RESOLVED_KEY, {}).get(_PIECES):
            meta_info[_STATE_KEY] = _Passed(state.angelspec)
    return outcome


async def _stream_content(original: Any, serving: Any, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
    """Add metadata and the texts of tokens to the chunks of a chat that asked for them."""
    content = kwargs["content"]
    passed = content["meta_info"].pop(_STATE_KEY, None)
    answer = None if passed is None else passed.answer
    if answer is not None:
        answer.receive(content["output_ids"], incremental=serving.tokenizer_manager.incremental_streaming_output)
    async for chunk in original(serving, *args, **kwargs):
        if answer is not None and chunk.startswith(_DATA):
            document = json.loads(chunk[len(_DATA) :])
            document["angelspec"] = {"metadata": answer.metadata(), "pieces": answer.pieces()}
            chunk = f"{_DATA}{json.dumps(document)}\n\n"
        yield chunk


class _Passed:
    """An answer's state on its way from one hook to the other: opaque to a log that takes the metadata apart."""

    __slots__ = ("answer",)

    def __init__(self, answer: AnswerState) -> None:
        self.answer = answer

    def __repr__(self) -> str:
        return "..."


_DATA = "data: "
_PIECES = "pieces"
"""Key of a completed label: whether the chunks of a chat carry metadata and the texts of tokens."""
_STATE_KEY = "_angelspec_state"
"""Under which a chat's answer state passes from one hook to the other; it never leaves the process."""
