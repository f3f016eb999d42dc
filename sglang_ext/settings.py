"""What the engine is to serve: the bundle named in the environment, and the place of each drafter in the engine.

All drafters live in one draft model and share one pool of keys and values, their layers numbered one after another; so
SGLang accounts for all of their memory as it does for one drafter's. That model is described by a folder with a
``config.json`` which is written from the bundle before the engine starts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from safetensors.torch import save_file

from angelspec.core.bundle import Bundle, BundleDrafter, load_bundle
from angelspec.core.drafter_config import BlockDrafterConfig, MtpDrafterConfig
from angelspec.core.engine import ALGORITHM, BUNDLE_VARIABLE
from angelspec.core.errors import BundleError
from angelspec.core.files import write_json_atomic
from angelspec.core.fingerprint import fingerprint
from angelspec.core.geometry import TargetGeometry
from angelspec.core.locations import cache_folder
from angelspec.core.model_content import content_digest
from angelspec.drafters.config_dialects import read_config
from angelspec.drafters.problem import Findings

ARCHITECTURE = "AngelSpecDrafters"
"""The draft model that holds every drafter."""
MARKER = "angelspec.plan"
"""The one tensor of the draft model's folder: the plan's fingerprint, so that no other model is loaded by mistake."""


@dataclass(frozen=True)
class DrafterPlace:
    """One drafter in the engine."""

    drafter: BundleDrafter
    folder: Path
    config: BlockDrafterConfig | MtpDrafterConfig
    first_layer: int
    """Of its layers in the draft pool."""

    @property
    def num_layers(self) -> int:
        """Layers in the draft pool."""
        return self.config.cached_layers


@dataclass(frozen=True)
class EnginePlan:
    """A bundle, placed."""

    bundle: Bundle
    places: tuple[DrafterPlace, ...]

    @property
    def num_layers(self) -> int:
        """Of the draft pool."""
        return sum(place.num_layers for place in self.places)

    @property
    def depth(self) -> int:
        """The most proposals of any drafter."""
        return max(place.drafter.depth for place in self.places)

    @property
    def draft_numbers_per_token(self) -> int:
        """Numbers that the draft pool holds per token."""
        return sum(place.config.cached_numbers_per_token for place in self.places)

    @cached_property
    def layer_ids(self) -> tuple[int, ...]:
        """Target layers whose outputs some drafter reads, ascending; the first, where none reads any: SGLang's models
        keep the last hidden states beside captured layers alone, and never hand out the last layer."""
        ids = {
            layer
            for place in self.places
            if isinstance(place.config, BlockDrafterConfig)
            for layer in place.config.target_layer_ids
        }
        return tuple(sorted(ids)) or (0,)

    def tap_columns(self, place: DrafterPlace) -> torch.Tensor | None:
        """Columns of the captured features that are this drafter's; None: all of them, in order."""
        if not isinstance(place.config, BlockDrafterConfig) or place.config.target_layer_ids == self.layer_ids:
            return None
        size = place.config.target_hidden_size
        starts = [self.layer_ids.index(layer) * size for layer in place.config.target_layer_ids]
        return torch.cat([torch.arange(start, start + size) for start in starts])

    @property
    def digest(self) -> str:
        """Names the plan: it changes with the bundle and with any drafter's configuration."""
        return fingerprint(
            {
                "bundle": self.bundle.model_dump(mode="json", exclude={"costs", "acceptance", "calibrations"}),
                "configs": [place.config.model_dump(mode="json") for place in self.places],
            }
        )


def place_drafters(bundle: Bundle) -> EnginePlan:
    """Read every drafter's configuration and number its layers.

    Raises:
        BundleError: no drafters, a folder that is no drafter, depths that disagree, or attention shapes that can't
            share a pool.
    """
    if not bundle.drafters:
        raise BundleError("the bundle has no drafters", mend="serve the target with plain SGLang, or add a drafter")
    places: list[DrafterPlace] = []
    first = 0
    for drafter in bundle.drafters:
        place = DrafterPlace(drafter, Path(drafter.source), _read(drafter), first)
        places.append(place)
        first += place.num_layers
    _check_shapes(places)
    return EnginePlan(bundle, tuple(places))


def check_target(plan: EnginePlan, geometry: TargetGeometry) -> None:
    """Raises BundleError, naming every drafter that was made for another target than the one that is loaded."""
    wrong = [
        f"drafter '{place.drafter.name}': {conflict}"
        for place in plan.places
        for conflict in place.config.conflicts_with(geometry)
    ]
    if wrong:
        raise BundleError("\n".join(wrong), mend="serve each drafter with the target that it was trained for")


def check_contents(plan: EnginePlan, target: Path) -> None:
    """Raises BundleError, naming every folder whose content is not what the bundle was made for, where it says so.

    Args:
        plan: what is served.
        target: its folder; one that is not there (a hub's name) is not checked.
    """
    models = [("the target", plan.bundle.target.digest, target)]
    models += [(f"drafter '{place.drafter.name}'", place.drafter.digest, place.folder) for place in plan.places]
    wrong = [
        f"{name}: the content of {folder} is {found[:16]}, the bundle was made for {digest[:16]}"
        for name, digest, folder in models
        if digest is not None and folder.is_dir() and (found := content_digest(folder)) != digest
    ]
    if wrong:
        raise BundleError("\n".join(wrong), mend="create the bundle again: angelspec bundle create")


def _read(drafter: BundleDrafter) -> BlockDrafterConfig | MtpDrafterConfig:
    path = Path(drafter.source) / "config.json"
    if not path.is_file():
        raise BundleError(
            f"drafter '{drafter.name}': {path} does not exist",
            mend="name an exported drafter by its folder, a hub's or a registered name",
        )
    findings = Findings()
    config = read_config(json.loads(path.read_text(encoding="utf-8")), findings)
    if config is None:
        lines = "\n".join(f"  {problem}" for problem in findings.problems)
        raise BundleError(f"drafter '{drafter.name}': {path} can't be read\n{lines}")
    depth = config.num_proposals
    fits = drafter.depth == depth or (config.family == "mtp" and drafter.depth < depth)  # MTP may stop earlier
    if config.family != drafter.family or not fits:
        raise BundleError(
            f"drafter '{drafter.name}' is {drafter.family} of depth {drafter.depth} in the bundle, "
            f"but its checkpoint is {config.family} of depth {depth}",
            mend="create the bundle again: angelspec bundle create",
        )
    return config


def _check_shapes(places: Sequence[DrafterPlace]) -> None:
    """One pool, one target."""
    shared = ("num_kv_heads", "head_dim", "hidden_size", "target_hidden_size", "target_num_layers", "vocab_size")
    one = places[0]
    for place in places:
        last = place.config.target_num_layers - 1
        if last in place.config.target_layer_ids:
            raise BundleError(
                f"drafter '{place.drafter.name}' reads the output of the target's last layer ({last}), which SGLang's "
                "models do not hand out",
                mend="serve a drafter that taps earlier layers",
            )
    for other in places[1:]:
        for key in shared:
            ours, theirs = getattr(one.config, key), getattr(other.config, key)
            if ours != theirs:
                raise BundleError(
                    f"drafters '{one.drafter.name}' and '{other.drafter.name}' can't be served together: "
                    f"{key} is {ours} and {theirs}",
                    mend="serve them by two engines",
                )


@cache
def current_plan() -> EnginePlan:
    """The plan of the bundle that the environment names.

    Raises:
        BundleError: the variable is not set, or the bundle or a drafter is wrong.
    """
    name = os.environ.get(BUNDLE_VARIABLE)
    if not name:
        raise BundleError(
            f"--speculative-algorithm {ALGORITHM} needs a bundle, but {BUNDLE_VARIABLE} is not set",
            mend=f"start with `angelspec serve`, or set {BUNDLE_VARIABLE} to the file of `angelspec bundle create`",
        )
    return place_drafters(load_bundle(Path(name)))


def draft_folder(plan: EnginePlan, *, ranks: int = 1, dtype: str | None = None) -> Path:
    """The folder that describes the draft model to SGLang, in the user's cache; written where it is not there yet.

    SGLang divides a model's heads by the number of tensor-parallel ranks. Every rank holds the drafters whole, so the
    folder says that there are as many times more.

    Args:
        plan: what is served.
        ranks: of tensor parallelism.
        dtype: the target's, which the drafters are loaded in; None: not known.
    """
    config = plan.places[0].config
    document = {
        # a type that transformers knows and whose unknown keys it keeps
        "model_type": "llama",
        "architectures": [ARCHITECTURE],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": plan.num_layers,
        "num_attention_heads": config.num_heads * ranks,
        "num_key_value_heads": config.num_kv_heads * ranks,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": False,
        "num_target_layers": config.target_num_layers,
        "block_size": plan.depth,
        "sample_from_anchor": False,
        "mask_token_id": 0,
        "target_layer_ids": list(plan.layer_ids),
        "markov_rank": 1,  # SGLang's DSPARK insists on one; nothing of it is built
        "markov_head_type": "vanilla",
        "angelspec_plan": plan.digest,
        **({} if dtype is None else {"dtype": dtype}),
    }
    folder = cache_folder() / "engines" / f"{plan.digest}-{fingerprint(document)}"
    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        marker = torch.tensor(list(plan.digest.encode()), dtype=torch.uint8)
        save_file({MARKER: marker}, folder / "model.safetensors", metadata={"format": "pt"})
        write_json_atomic(folder / "config.json", document)
    return folder
