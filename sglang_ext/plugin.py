"""Entry point of the plugin: SGLang calls ``register`` in every one of its processes.

SGLang only logs a plugin that raises and goes on without it, which would serve plain decoding under our name. So what
goes wrong here ends the process, with its cause.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from angelspec.core.engine import ALGORITHM, BUNDLE_VARIABLE, CPU_PLATFORM, PLATFORM_VARIABLE

_registered = False


def register() -> None:
    """Register the algorithm, the draft model and the hooks; does nothing where the algorithm was not asked for."""
    global _registered
    if _registered:
        return
    _registered = True
    wanted = _is_wanted(sys.argv, os.environ)
    on_cpu = os.environ.get(PLATFORM_VARIABLE) == CPU_PLATFORM
    if not wanted and not on_cpu:
        return
    try:
        _register(wanted=wanted, on_cpu=on_cpu)
    except Exception as error:
        sys.exit(f"angelspec's plugin could not be loaded: {type(error).__name__}: {error}")


def _is_wanted(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a process is of an engine with our algorithm: its command line says so; or the bundle's variable is set
    and the command line can't say (an engine made in Python, a configuration file)."""
    if any(word.rpartition("=")[2].upper() == ALGORITHM for word in words):
        return True
    flags = {word.partition("=")[0] for word in words}
    return BUNDLE_VARIABLE in environment and (not flags & {"--model-path", "--model"} or "--config" in flags)


def _register(*, wanted: bool, on_cpu: bool) -> None:
    from sglang_ext import compat

    compat.check_version()
    if on_cpu:
        from sglang_ext.cpu import hooks as cpu_hooks

        cpu_hooks.register()
    if not wanted:
        return
    # rows of different widths in one verification; argmax drafts, which any cut leaves lossless
    os.environ["SGLANG_RAGGED_VERIFY_MODE"] = "compact"
    os.environ["SGLANG_DSPARK_USE_GREEDY_DRAFT"] = "1"
    os.environ["SGLANG_DSPARK_FOLDED_PROPOSAL"] = "0"
    compat.check_contract()
    from sglang_ext import algorithm, engine_hooks

    algorithm.register()
    compat.ModelRegistry.register("sglang_ext.models")
    compat.ModelRegistry.register("sglang_ext.target_models", overwrite=True)
    engine_hooks.register()
