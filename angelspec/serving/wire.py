"""The server's protocol, without a connection: request bodies, events of a stream, and the words of an error."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from pydantic import ValidationError

from angelspec.core.problems import problems
from angelspec.core.request_label import RequestLabel, RequestMetadata
from angelspec.serving.answers import (
    ChatAnswer,
    ChatChunk,
    EngineState,
    GenerateAnswer,
    GenerateChunk,
    Piece,
    ServerInfo,
    Usage,
)
from angelspec.serving.failures import ServerUnreachable

Messages = Sequence[Mapping[str, Any]]
Label = RequestLabel | Mapping[str, Any] | None
"""What a request wishes: typed, or the raw ``custom_params``."""
CHAT, GENERATE = "/v1/chat/completions", "/generate"
_MOST_WORDS = 600


@dataclass(frozen=True)
class Sampling:
    """How an answer is drawn; None leaves a value to the server."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the endpoint, as they are (``response_format``, ``logprobs``, ...)."""

    def fields(self, *, native: bool) -> dict[str, Any]:
        """The values under the names of the endpoint."""
        values: dict[str, Any] = {
            "max_new_tokens" if native else "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "sampling_seed" if native else "seed": self.seed,
            "stop": list(self.stop) or None,
        }
        return {key: value for key, value in values.items() if value is not None}


def label_params(label: Label) -> dict[str, Any]:
    """The ``custom_params`` of a label; empty where nothing is wished."""
    if label is None or isinstance(label, Mapping):
        return dict(label or {})
    wishes: dict[str, Any] = {"workload": label.workload, "mode": label.mode}
    wishes["route"] = None if label.route == "auto" else label.route
    wishes["dcut"] = "off" if label.ratio == 1.0 else label.ratio
    return {key: value for key, value in wishes.items() if value is not None}


class ChatOptions(TypedDict, total=False):
    """What a chat request may say beside its messages."""

    sampling: Sampling
    """How the answer is drawn."""
    label: Label
    """Workload, mode, route and cut that are wished."""
    template_arguments: Mapping[str, Any]
    """Of the chat template; ``core.modes.mode_family(name).arguments(mode)`` gives a mode's."""
    model: str
    """Name of the served model."""
    details: bool
    """Whether pieces and metadata are wanted."""


def chat_body(
    messages: Messages,
    *,
    stream: bool,
    request_id: str,
    sampling: Sampling = Sampling(),
    label: Label = None,
    template_arguments: Mapping[str, Any] = {},
    model: str = "default",
    details: bool = False,
) -> dict[str, Any]:
    """Body of ``POST /v1/chat/completions``; see ``ChatOptions``."""
    body: dict[str, Any] = {"model": model, "messages": [dict(message) for message in messages], "rid": request_id}
    body |= sampling.fields(native=False)
    if template_arguments:
        body["chat_template_kwargs"] = dict(template_arguments)
    if params := label_params(label):
        body["custom_params"] = params
    if details:
        body["return_spec_tokens_details"] = True
        if not stream:  # SGLang refuses it for streams
            body["return_meta_info"] = True
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return {**body, **sampling.extra}


def generate_body(
    prompt: str | Sequence[int],
    *,
    stream: bool,
    request_id: str,
    sampling: Sampling = Sampling(),
    label: Label = None,
) -> dict[str, Any]:
    """Body of ``POST /generate``; a prompt is text or token ids."""
    parameters = sampling.fields(native=True)
    if params := label_params(label):
        parameters["custom_params"] = params
    body: dict[str, Any] = {"sampling_params": parameters, "rid": request_id}
    body |= {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    if stream:
        body["stream"] = True
    return {**body, **sampling.extra}


# -------------------------------------------------------------------------------------------------- stream


class Events:
    """Cuts the bytes of a stream into the data of its events.

    On bytes, since neither a character nor a line must be torn, and text may hold separators (U+2028) that are line
    ends to ``str.splitlines`` but not here.
    """

    DONE = "[DONE]"

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        """Data of the events that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                yield line[5:].strip().decode("utf-8", "replace")


def event_object(data: str) -> dict[str, Any]:
    """The JSON of one event.

    Raises:
        ServerUnreachable: no JSON object.
    """
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ServerUnreachable(f"the server sent an event that is no JSON object: {data[:200]}")
    return value


def event_error(event: Mapping[str, Any]) -> tuple[str, int] | None:
    """Words and status of an error that a stream reports in place of an answer; None: it reports none.

    SGLang answers a streamed request with status 200 before it has looked at it.
    """
    error = event.get("error")
    if error is None:
        return None
    code = error.get("code") if isinstance(error, Mapping) else None
    return error_words(error), code if isinstance(code, int) else 500


def error_words(body: Any) -> str:
    """The explanation in an error's body, in any of the forms that SGLang uses."""
    if isinstance(body, bytes | str):
        try:
            body = json.loads(body)
        except ValueError:
            text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
            return text.strip()[:_MOST_WORDS] or "no explanation"
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(key):
            return error_words(body[key])
    return (body if isinstance(body, str) else json.dumps(body, ensure_ascii=False))[:_MOST_WORDS]


def chat_chunk(event: Mapping[str, Any], *, seconds: float) -> ChatChunk:
    """One event of a chat stream."""
    choice = next(iter(event.get("choices") or []), {})
    delta = choice.get("delta") or {}
    pieces, metadata = _details(event.get("angelspec"))
    return ChatChunk(
        text=delta.get("content") or "",
        reasoning=delta.get("reasoning_content") or "",
        pieces=pieces,
        metadata=metadata,
        usage=_usage(event.get("usage")),
        finish_reason=choice.get("finish_reason"),
        seconds=seconds,
    )


def joined(answer: ChatAnswer, chunk: ChatChunk) -> ChatAnswer:
    """The answer so far with what another event brings."""
    said = bool(chunk.text or chunk.reasoning)
    first = chunk.seconds if said and answer.first_token_seconds is None else answer.first_token_seconds
    return ChatAnswer(
        text=answer.text + chunk.text,
        reasoning=answer.reasoning + chunk.reasoning,
        pieces=answer.pieces + chunk.pieces,
        metadata=chunk.metadata or answer.metadata,
        usage=chunk.usage or answer.usage,
        finish_reason=chunk.finish_reason or answer.finish_reason,
        first_token_seconds=first,
        seconds=chunk.seconds,
    )


def chat_answer(body: Mapping[str, Any], *, seconds: float) -> ChatAnswer:
    """A chat answer that was not streamed."""
    choice = next(iter(body.get("choices") or []), {})
    message = choice.get("message") or {}
    pieces, metadata = _details(body.get("angelspec"))
    if metadata is None:  # return_meta_info
        metadata = _metadata((choice.get("meta_info") or {}).get("angelspec"))
    return ChatAnswer(
        text=message.get("content") or "",
        reasoning=message.get("reasoning_content") or "",
        pieces=pieces,
        metadata=metadata,
        usage=_usage(body.get("usage")),
        finish_reason=choice.get("finish_reason"),
        seconds=seconds,
    )


def generate_answer(body: Mapping[str, Any], *, seconds: float) -> GenerateAnswer:
    """A native answer that was not streamed, or one event of a stream."""
    meta = body.get("meta_info") or {}
    reason = meta.get("finish_reason")
    return GenerateAnswer(
        text=body.get("text") or "",
        output_ids=tuple(body.get("output_ids") or ()),
        positions=tuple(meta.get("angelspec_positions") or ()),
        metadata=_metadata(meta.get("angelspec")),
        usage=_usage(meta) if "completion_tokens" in meta else None,
        finish_reason=reason.get("type") if isinstance(reason, Mapping) else reason,
        seconds=seconds,
        meta_info=meta,
    )


def generate_chunk(answer: GenerateAnswer, event: Mapping[str, Any], *, seconds: float) -> GenerateChunk:
    """One event of a native stream, after ``answer``.

    SGLang repeats the whole text in every event unless it runs with ``--incremental-streaming-output``; then an
    event's tokens are fewer than the tokens of the request.
    """
    now = generate_answer(event, seconds=seconds)
    if now.usage is not None and now.output_ids and len(now.output_ids) < now.usage.completion_tokens:
        now = replace(now, text=answer.text + now.text, output_ids=answer.output_ids + now.output_ids)
    new = now.text[len(answer.text) :]
    first = answer.first_token_seconds if answer.first_token_seconds is not None else seconds if new else None
    return GenerateChunk(new, replace(now, first_token_seconds=first))


# --------------------------------------------------------------------------------------------------- state


def server_info(body: Mapping[str, Any]) -> ServerInfo:
    """The body of ``GET /server_info``.

    Raises:
        ServerUnreachable: the extension's state is not readable.
    """
    states = [state for state in body.get("internal_states") or [] if isinstance(state, Mapping)]
    ours = next((state["angelspec"] for state in states if state.get("angelspec") is not None), None)
    try:
        engine = None if ours is None else EngineState.model_validate(ours)
    except ValidationError as error:
        first = problems(error, EngineState)[0]
        raise ServerUnreachable(f"the extension's state is not readable: {first}", mend=_VERSIONS) from error
    return ServerInfo(
        version=str(body.get("version", "unknown")),
        model=str(body.get("model_path", "")),
        engine=engine,
        arguments={key: value for key, value in body.items() if key != "internal_states"},
    )


_VERSIONS = "use the same angelspec for the server and its client"


def _details(value: Any) -> tuple[tuple[Piece, ...], RequestMetadata | None]:
    if not isinstance(value, Mapping):
        return (), None
    pieces = tuple(Piece(str(piece["text"]), int(piece["position"])) for piece in value.get("pieces") or ())
    return pieces, _metadata(value.get("metadata"))


def _metadata(value: Any) -> RequestMetadata | None:
    if value is None:
        return None
    try:
        return RequestMetadata.model_validate(value)
    except ValidationError as error:
        first = problems(error, RequestMetadata)[0]
        raise ServerUnreachable(f"a request's metadata is not readable: {first}", mend=_VERSIONS) from error


def _usage(value: Any) -> Usage | None:
    if not isinstance(value, Mapping):
        return None
    details = value.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=int(value.get("prompt_tokens") or 0),
        completion_tokens=int(value.get("completion_tokens") or 0),
        cached_tokens=value.get("cached_tokens", details.get("cached_tokens")),
    )
