"""A frozen target: its tokens, its hidden states and its logits, each defined once for everything that needs them.

Layer id L is the residual stream after decoder layer L, zero-based; the hidden state is the one after the final norm.

Legend: B batch rows, T tokens, F width of the concatenated taps (number of layer ids times D), D hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from angelspec.core.errors import AngelspecError, TargetError
from angelspec.core.files import expanded, read_json
from angelspec.core.geometry import TargetGeometry
from angelspec.core.model_content import content_digest
from angelspec.core.modes import Mode, ModeFamily, mode_family
from angelspec.core.recipe import TargetSection
from angelspec.targets import grouped_attention
from angelspec.targets.cache import SlotCache
from angelspec.targets.sources import TEMPLATE_FOLDER, materialise, quiet_loading, source_revision

FEATURE_VERSION = 1
"""Version of what ``TargetStates`` means; stored beside features on disk."""

_PROBE = ({"role": "user", "content": "What is 2+3? Answer in one word, then say why."},)


@dataclass(frozen=True)
class TargetStates:
    """What one forward gives."""

    taps_BTF: Tensor
    """Outputs of the asked layers, concatenated in the order of their ids; width 0 without ids."""
    hidden_BTD: Tensor
    """Last hidden state after the final norm: the vocabulary head's input."""


class Target:
    """A frozen causal language model of transformers with its tokenizer.

    Attributes:
        name: short name for reports.
        folder: where it was loaded from.
        digest: content hash of configuration, weights, tokenizer and chat template.
        revision: hub commit or wheel checksum; None for a user's own folder.
        model: the transformers model, in evaluation mode, without gradients.
        tokenizer: its tokenizer, with the chat template in force.
        section: what it was loaded by, so that another process can load the same; None: made by hand.
        geometry: its shape.
        mode_family: how its chat template switches thinking.
        embedding_VD: input embedding, the model's own storage.
        head_VD: vocabulary head, the model's own storage; the same tensor as the embedding where tied.
        stop_token_ids: ids that end an answer, ascending.
    """

    def __init__(
        self,
        *,
        name: str,
        folder: Path,
        digest: str,
        model: nn.Module,
        tokenizer: Any,
        geometry: TargetGeometry,
        family: ModeFamily,
        section: TargetSection | None = None,
    ) -> None:
        self.section = section
        self.name = name
        self.folder = folder
        self.digest = digest
        self.revision = source_revision(folder)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.geometry = geometry
        self.mode_family = family
        self.embedding_VD: Tensor = model.get_input_embeddings().weight
        self.head_VD: Tensor = model.get_output_embeddings().weight
        self.stop_token_ids = _stop_token_ids(model, tokenizer, name=name)
        self._decoder = model.get_decoder()
        self._layers = _decoder_layers(self._decoder, geometry.num_layers, name=name)
        self._hooked: set[int] = set()
        self._sink: dict[int, Tensor | None] = {}
        parameters = inspect.signature(self._decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._switch_checked: set[str] = set()

    @property
    def device(self) -> torch.device:
        """Where its weights lie."""
        return self.embedding_VD.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of its weights and of the states it gives."""
        return self.embedding_VD.dtype

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        mode: Mode,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, exactly as a server's ``apply_chat_template`` gives them.

        Args:
            messages: dicts with ``role``, ``content`` and, where they exist, ``reasoning_content`` and ``tool_calls``.
            mode: thinking mode; its template arguments come from the mode family.
            add_generation_prompt: end with the opening of an answer.
            tools: function schemas, if any.

        Raises:
            TargetError: the template has no thinking switch although the mode asks for one, or it refuses the messages.
            RecipeError: the family has no such mode.
        """
        try:
            self._check_switch(mode)
            return self._apply_template(messages, mode=mode, add_generation_prompt=add_generation_prompt, tools=tools)
        except AngelspecError:
            raise
        except Exception as error:  # jinja's own errors and whatever a template raises
            raise TargetError(f"the chat template of {self.name} refuses a conversation: {error}") from error

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: SlotCache | None = None,
        layer_ids: Sequence[int] = (),
    ) -> TargetStates:
        """Run the decoder once, without gradients.

        Args:
            tokens_BT: int64 [B, T].
            positions_BT: positions [B, T] or [1, T]; None: counted from 0, or from each row's length in the cache.
            attention_mask: None (causal), bool [B, T] (False: padding), or bool [B or 1, 1, T, S] with True where a
                query may look.
            cache: its rows selected; ``begin`` is called here, ``commit`` is the caller's.
            layer_ids: ascending layers to tap.

        Returns:
            taps [B, T, F] and hidden [B, T, D] in the target's dtype.

        Raises:
            ValueError: a layer id does not exist.
        """
        self._hook(layer_ids)
        arguments: dict[str, Any] = {}
        if cache is not None:
            cache.begin(tokens_BT.shape[1])
            positions_BT = cache.positions() if positions_BT is None else positions_BT
            mask = cache.mask() if attention_mask is None else attention_mask
            few = tokens_BT.shape[1] <= grouped_attention.FEW_QUERIES
            if few and mask is not None and mask.dtype == torch.bool and mask.dim() == 4:
                group = self.geometry.num_heads // self.geometry.num_kv_heads
                mask = grouped_attention.fold_mask(mask, group=group, dtype=self.dtype)
            attention_mask = mask
            arguments[self._cache_argument] = cache
        sink: dict[int, Tensor | None] = dict.fromkeys(layer_ids)
        self._sink = sink
        try:
            with torch.no_grad():
                output = self._decoder(
                    input_ids=tokens_BT,
                    attention_mask=attention_mask,
                    position_ids=positions_BT,
                    use_cache=cache is not None,
                    **arguments,
                )
        finally:
            self._sink = {}
        hidden_BTD = output.last_hidden_state
        if not layer_ids:
            return TargetStates(hidden_BTD.new_empty((*hidden_BTD.shape[:2], 0)), hidden_BTD)
        taps = [tap_BTD for tap_BTD in sink.values() if tap_BTD is not None]
        assert len(taps) == len(layer_ids), "a tapped layer did not run"
        return TargetStates(torch.cat(taps, dim=-1), hidden_BTD)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [..., V] of normed hidden states [..., D]; the product is in the head's dtype."""
        with torch.no_grad():
            return self.head_logits(hidden).float()

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] in the head's own dtype; their argmax is that of ``logits``."""
        return F.linear(hidden.to(self.head_VD.dtype), self.head_VD)

    def new_cache(self, *, rows: int, capacity: int) -> SlotCache:
        """An empty key/value cache for this target."""
        return SlotCache(self.geometry, rows=rows, capacity=capacity, dtype=self.dtype, device=self.device)

    def _hook(self, layer_ids: Sequence[int]) -> None:
        if list(layer_ids) != sorted(set(layer_ids)):
            raise ValueError(f"layer ids {list(layer_ids)} must be ascending without doubles")
        for layer in layer_ids:
            if layer in self._hooked:
                continue
            if not 0 <= layer < len(self._layers):
                raise ValueError(f"layer id {layer} must lie in 0..{len(self._layers) - 1}")
            self._layers[layer].register_forward_hook(self._recorder(layer))
            self._hooked.add(layer)

    def _recorder(self, layer: int) -> Any:
        def record(module: nn.Module, arguments: Any, output: Any) -> None:
            if layer in self._sink:
                self._sink[layer] = output[0] if isinstance(output, tuple) else output

        return record

    def _apply_template(
        self, messages: Sequence[Mapping[str, Any]], *, mode: Mode, add_generation_prompt: bool, tools: Any = None
    ) -> list[int]:
        encoded = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
            **self.mode_family.arguments(mode),
        )
        return [int(token) for token in encoded]

    def _check_switch(self, mode: Mode) -> None:
        if mode in self._switch_checked:
            return
        self.mode_family.arguments(mode)
        if mode != "no-think" and "no-think" in self.mode_family.modes:
            with_it, without = (
                self._apply_template(_PROBE, mode=item, add_generation_prompt=True) for item in (mode, "no-think")
            )
            if with_it == without:
                raise TargetError(
                    f"the chat template of {self.name} has no thinking switch: "
                    f"{', '.join(self.mode_family.arguments(mode))} changes nothing, mode '{mode}' cannot be rendered",
                    mend="set target.chat_template to a Jinja file with the switch"
                    + (f", such as {TEMPLATE_FOLDER / 'smollm2.jinja'}" if self.mode_family.name == "smollm2" else ""),
                )
        self._switch_checked.add(mode)


def load_target(section: TargetSection, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Target:
    """Load a target as a recipe describes it, fetching it first where needed.

    Args:
        section: resolved target section (source and mode family set).
        dtype: precision of weights and states.
        device: where to put it.

    Raises:
        TargetError: it cannot be found or loaded, is not what the recipe says, or has no chat template.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if section.source is None or section.mode_family is None:
        raise TargetError("target.source and target.mode_family are not set", mend="name a known target in target.name")
    folder = materialise(section.source, trust_remote_code=section.trust_remote_code)
    name = section.name or section.source
    geometry = read_geometry(folder)
    if section.geometry is not None and section.geometry != geometry:
        said, found = section.geometry.model_dump(), geometry.model_dump()
        differing = [f"{key} is {found[key]}, not {said[key]}" for key in said if said[key] != found[key]]
        raise TargetError(
            f"target {name} at {folder} is not what the recipe says: {'; '.join(differing)}",
            mend="correct target.geometry, or leave it out for folder: sources",
        )
    options = {"local_files_only": True, "trust_remote_code": section.trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:  # a broken tokenizer.json raises a bare Exception
        raise TargetError(
            f"the tokenizer of {name} in {folder} can't be loaded: {error}", mend="fetch its files again"
        ) from error
    override = None
    if section.chat_template is not None:
        path = expanded(section.chat_template)
        if not path.is_file():
            raise TargetError(f"chat template {path} does not exist", mend="correct target.chat_template")
        override = path.read_text(encoding="utf-8")
        tokenizer.chat_template = override
    if not tokenizer.chat_template:
        raise TargetError(
            f"the tokenizer of {name} ({folder}) has no chat template", mend="set target.chat_template to a Jinja file"
        )
    try:
        with quiet_loading():
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=grouped_attention.register(), **options
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise TargetError(
            f"target {name} at {folder} cannot be loaded: {error}",
            mend="check its files, and that this version of transformers knows its architecture",
        ) from error
    kinds = sorted(set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"]))
    if kinds != ["full_attention"]:
        raise TargetError(
            f"target {name} uses {', '.join(kinds)}; only full attention in every layer is supported",
            mend="use another target",
        )
    return Target(
        section=section,
        name=name,
        folder=folder,
        digest=content_digest(folder, extra=override),
        model=model.to(device),
        tokenizer=tokenizer,
        geometry=geometry,
        family=mode_family(section.mode_family),
    )


def read_geometry(folder: Path) -> TargetGeometry:
    """The shape that a folder's config.json states.

    Raises:
        TargetError: a key is missing or contradictory.
    """
    try:
        return TargetGeometry.from_config(read_json(folder / "config.json"))
    except ValueError as error:
        raise TargetError(f"{folder / 'config.json'}: {error}") from error


def verify_target(target: Target, *, layer_ids: Sequence[int]) -> None:
    """Compare one row with a plain transformers forward (eager attention, no cache, all hidden states).

    Checks that every tap is the output of its own layer and of no neighbour, that the hidden state is the one after
    the final norm, that the head gives the model's logits, and that the cache in two steps gives the same states.

    Raises:
        TargetError: naming the first thing that differs.
    """
    mode = target.mode_family.modes[0]
    tokens = target.render(_PROBE, mode=mode, add_generation_prompt=True)[:128]
    tokens_BT = torch.tensor([tokens], device=target.device)
    limit = 1e-3 if target.dtype == torch.float32 else 0.05
    last = target.geometry.num_layers - 1

    attention = target.model.config._attn_implementation
    target.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            plain = target.model(input_ids=tokens_BT, output_hidden_states=True, use_cache=False)
    finally:
        target.model.set_attn_implementation(attention)
    if len(plain.hidden_states) != last + 2:
        raise TargetError(f"target {target.name} gives {len(plain.hidden_states)} hidden states, not {last + 2}")

    cache = target.new_cache(rows=1, capacity=len(tokens))
    half = len(tokens) // 2
    pieces = []
    for piece_BT in (tokens_BT[:, :half], tokens_BT[:, half:]):
        pieces.append(target.forward(piece_BT, cache=cache, layer_ids=layer_ids))
        cache.commit(piece_BT.shape[1])
    whole = target.forward(tokens_BT, layer_ids=layer_ids)
    cached = TargetStates(
        *(torch.cat([getattr(piece, key) for piece in pieces], 1) for key in ("taps_BTF", "hidden_BTD"))
    )

    width = len(layer_ids) * target.geometry.hidden_size
    for way, states in (("without a cache", whole), ("through the cache", cached)):
        if states.taps_BTF.shape[-1] != width:
            raise TargetError(f"target {target.name}: taps are {states.taps_BTF.shape[-1]} wide, not {width}")
        error = _distance(states.hidden_BTD, plain.hidden_states[-1])
        if not error < limit:
            raise TargetError(
                f"target {target.name}: the last hidden state {way} is not the normed one (off by {error:.2g})"
            )
        taps = states.taps_BTF.split(target.geometry.hidden_size, -1) if layer_ids else ()  # a split of nothing is one
        for layer, tap_BTD in zip(layer_ids, taps, strict=True):
            if layer == last:  # transformers puts the normed state here
                error = _distance(_final_norm(target)(tap_BTD), plain.hidden_states[-1])
                if not error < limit:
                    raise TargetError(
                        f"target {target.name}: layer id {layer} {way} is not the state before the final norm"
                    )
                continue
            around = range(max(0, layer - 1), min(last, layer + 1) + 1)
            distances = {other: _distance(tap_BTD, plain.hidden_states[other + 1]) for other in around if other != last}
            nearest = min(distances, key=distances.__getitem__)
            if nearest != layer or not distances[layer] < limit:
                raise TargetError(
                    f"target {target.name}: layer id {layer} {way} is not the output of layer {layer} "
                    f"(off by {distances[layer]:.2g}; nearest is the output of layer {nearest})"
                )
    error = _distance(target.logits(whole.hidden_BTD), plain.logits.float())
    if not error < limit:
        raise TargetError(
            f"target {target.name}: head times last hidden state is not the model's logits (off by {error:.2g}); "
            "targets that scale, cap or shift their logits are not supported"
        )


def _distance(ours_BTD: Tensor, theirs_BTD: Tensor) -> float:
    """Mean over tokens of |difference| / |reference|: per token, because the first can be a thousand times larger."""
    ours_BTD, theirs_BTD = ours_BTD.float(), theirs_BTD.float()
    return float(((ours_BTD - theirs_BTD).norm(dim=-1) / theirs_BTD.norm(dim=-1).clamp_min(1e-12)).mean())


def _final_norm(target: Target) -> nn.Module:
    for name in ("norm", "final_layernorm", "ln_f", "final_norm"):
        module = getattr(target._decoder, name, None)
        if isinstance(module, nn.Module):
            return module
    raise TargetError(f"target {target.name}: its final norm cannot be found, so its last layer cannot be tapped")


def _decoder_layers(decoder: nn.Module, count: int, *, name: str) -> nn.ModuleList:
    lists = [module for module in decoder.children() if isinstance(module, nn.ModuleList) and len(module) == count]
    if len(lists) != 1:
        raise TargetError(f"target {name}: its {count} decoder layers cannot be told from its other modules")
    return lists[0]


def _stop_token_ids(model: nn.Module, tokenizer: Any, *, name: str) -> tuple[int, ...]:
    """The ids at which a server stops: those of generation config, config and tokenizer together."""
    ids: set[int] = set()
    for value in (
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        ids.update([value] if isinstance(value, int) else value or [])
    if not ids:
        raise TargetError(
            f"target {name} names no end-of-text token", mend="set eos_token_id in its generation_config.json"
        )
    return tuple(sorted(ids))
