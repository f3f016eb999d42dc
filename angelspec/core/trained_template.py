"""Where the chat template lies that a drafter was trained with, if it was not its target's own."""

from __future__ import annotations

from pathlib import Path

from angelspec.core.files import expanded
from angelspec.core.manifest import DrafterManifest

TEMPLATE_FILE = "chat_template.jinja"
"""The template's name beside an exported drafter's weights: where it was trained, it may lie elsewhere."""


def trained_template(folder: Path, manifest: DrafterManifest) -> Path | None:
    """The file of the chat template that a drafter was trained with.

    Args:
        folder: of the drafter.
        manifest: that lies in it.

    Returns:
        the copy beside the weights, or, in exports without one, the file that the recipe names, which may be gone;
        None: it was trained with the target's own template.
    """
    said = manifest.recipe.target.chat_template
    if said is None:
        return None
    beside = folder / TEMPLATE_FILE
    return beside.resolve() if beside.is_file() else expanded(said)
