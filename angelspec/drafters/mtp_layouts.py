"""How public files name an MTP layer's tensors: AngelSpec's own names, Hy3's and Qwen3's among their target's.

* angelspec: our names (``enorm.weight``, ``midlayer.*``), also with vLLM's ``layers.0.*`` for ``midlayer.*``.
* hy3: ``model.layers.<N>.*``, N being the number of the target's layers, every expert's matrices apart and stored as
  [out, in].
* qwen3: ``mtp.*``, beside all tensors of the target.

Shapes: E experts, D hidden, I width of one expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from angelspec.core.drafter_config import MtpDrafterConfig
from angelspec.drafters.problem import Findings

MtpDialect = Literal["angelspec", "hy3", "qwen3"]

_HY3_LAYER = re.compile(r"^model\.layers\.(\d+)\.(?:enorm|hnorm|eh_proj)\.weight$")
_QWEN3_PREFIX = "mtp."
_QWEN3_NAMES = {
    "fc.weight": "eh_proj.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "norm.weight": "final_layernorm.weight",
}
_QWEN3_PUBLIC = {native: public for public, native in _QWEN3_NAMES.items()}
_HY3_OUTSIDE = ("enorm.", "hnorm.", "eh_proj.", "final_layernorm.")
"""Parts of the layer that are not inside the decoder layer, ``midlayer`` to us."""
_HY3_SPELLINGS = {
    "mlp.gate.weight": "mlp.router.gate.weight",
    "mlp.e_score_correction_bias": "mlp.expert_bias",
    "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
}
"""transformers' names of the same tensors."""
_BORROWED = {"embed_tokens.weight": "embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
"""Copies of the target's own tensors."""
_EXPERT = re.compile(r"^midlayer\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight$")
_FUSED = "midlayer.mlp.experts_{}_proj"


@dataclass(frozen=True)
class MtpLayout:
    """Where the layer lies in a file."""

    dialect: MtpDialect
    prefix: str = ""
    """Names of the drafter begin with it; all others are the target's."""
    layer: int | None = None
    """Hy3: the layer's number."""

    def holds(self, name: str) -> bool:
        """Whether a tensor is the drafter's."""
        return name.startswith(self.prefix)

    def native_key(self, name: str) -> str:
        """Our name of one of the drafter's tensors; experts are still apart (see :func:`fuse_experts`)."""
        name = name.removeprefix(self.prefix)
        if name in _BORROWED:
            return _BORROWED[name]
        if self.dialect == "hy3":
            name = _HY3_SPELLINGS.get(name, name).replace("mlp.shared_experts.", "mlp.shared_mlp.")
            return name if name.startswith(_HY3_OUTSIDE) else f"midlayer.{name}"
        if self.dialect == "qwen3":
            name = _QWEN3_NAMES.get(name, name)
        return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def find_layout(names: Iterable[str], findings: Findings) -> MtpLayout | None:
    """Which layout a file's tensor names have; None: no MTP layer is among them.

    A file with several layers of its own per target is a problem: angelspec's drafters reuse one.
    """
    names = list(names)
    if any(name.startswith(_QWEN3_PREFIX) for name in names):
        return MtpLayout("qwen3", _QWEN3_PREFIX)
    layers = sorted({int(match[1]) for match in map(_HY3_LAYER.match, names) if match})
    if len(layers) > 1:
        findings.add(
            "unsupported", "num_nextn_predict_layers",
            f"model.layers has MTP layers {', '.join(map(str, layers))}; angelspec's drafters reuse one",
        )  # fmt: skip
    if layers:
        return MtpLayout("hy3", f"model.layers.{layers[0]}.", layers[0])
    return MtpLayout("angelspec") if any(name.endswith("eh_proj.weight") for name in names) else None


def fuse_experts(tensors: dict[str, Tensor], public: Mapping[str, str], findings: Findings) -> set[str]:
    """Join the experts' matrices, [out, in] each, into ours, [E, in, out]; in place.

    Args:
        tensors: by our names.
        public: the name in the file of each of them.
        findings: receives what is wrong with a single expert, by its name in the file.

    Returns:
        our names of those that can't be joined, all that is wrong with them being said.
    """
    parts: dict[str, dict[int, Tensor]] = {}
    sample = ""
    for key in list(tensors):
        match = _EXPERT.match(key)
        if match:
            parts.setdefault(match[2], {})[int(match[1])] = tensors.pop(key)
            sample = public[key]
    if not parts:
        return set()
    count = max(max(matrices) for matrices in parts.values()) + 1
    refused: set[str] = set()
    for kind in ("gate", "up", "down"):
        matrices, key = parts.get(kind, {}), _FUSED.format(kind)
        before = len(findings.problems)
        shapes = [matrix.shape for matrix in matrices.values()]
        usual = max(shapes, key=shapes.count, default=None)
        for expert in range(count):
            name = re.sub(r"experts\.\d+\.(?:gate|up|down)_", f"experts.{expert}.{kind}_", sample)
            if expert not in matrices:
                findings.add("missing-tensor", name, f"{name} is missing")
            elif matrices[expert].shape != usual:
                findings.add(
                    "misshapen-tensor", name,
                    f"{name} is {list(matrices[expert].shape)}, its neighbours are {list(usual)}",
                )  # fmt: skip
            elif not torch.isfinite(matrices[expert]).all():
                bad = int((~torch.isfinite(matrices[expert])).sum())
                findings.add(
                    "non-finite", name, f"{name} holds {bad} of {matrices[expert].numel()} values that are not finite"
                )
        if len(findings.problems) > before:
            refused.add(key)
        else:
            tensors[key] = torch.stack([matrices[expert].mT for expert in range(count)])
    return refused


def public_tensors(tensors: Mapping[str, Tensor], config: MtpDrafterConfig, dialect: MtpDialect) -> dict[str, Tensor]:
    """The same tensors under the names and in the shapes of a dialect."""
    if dialect == "angelspec":
        return dict(tensors)
    written: dict[str, Tensor] = {}
    for key, value in tensors.items():
        inside = key.removeprefix("midlayer.")
        if dialect == "qwen3":
            written[_QWEN3_PREFIX + (_QWEN3_PUBLIC.get(key, key) if inside == key else f"layers.0.{inside}")] = value
            continue
        prefix = f"model.layers.{config.target_num_layers}."
        kind = re.fullmatch(r"mlp\.experts_(gate|up|down)_proj", inside)
        if kind is None:
            written[prefix + inside] = value
        else:
            for expert, matrix in enumerate(value):
                written[f"{prefix}mlp.experts.{expert}.{kind[1]}_proj.weight"] = matrix.mT
    return written
