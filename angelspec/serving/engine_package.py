"""The SGLang that will run the server: installed, of the right version, and able to find our extension.

Asked of the interpreter that starts the server, through package metadata: importing SGLang takes seconds and memory.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, entry_points, version

from angelspec.core.engine import SGLANG_VERSION
from angelspec.core.errors import MissingRequirement
from angelspec.core.installing import install_hint

_PLUGINS, _PLUGIN = "sglang.srt.plugins", "angelspec"


def check_engine() -> str:
    """The version of the installed SGLang.

    Raises:
        MissingRequirement: SGLang is missing or of another version, or would not find the extension.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise MissingRequirement(
            "serving needs SGLang, which is not installed here", mend=install_hint("serve")
        ) from None
    if found != SGLANG_VERSION:
        raise MissingRequirement(
            f"SGLang {found} is installed; the extension works inside {SGLANG_VERSION} only", mend=install_hint("serve")
        )
    if _PLUGIN not in [point.name for point in entry_points(group=_PLUGINS)]:
        raise MissingRequirement(
            "SGLang would not find angelspec's extension: its entry point is not installed",
            mend="install angelspec as a package: in the clone, pip install -e .",
        )
    return found
