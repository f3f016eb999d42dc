"""What this machine can run: versions, processor, accelerators, caches, optional parts."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from angelspec import __version__
from angelspec.core.files import file_states
from angelspec.core.installing import install_hint
from angelspec.core.locations import cache_folder
from angelspec.core.recipe_files import list_recipes, load_recipe
from angelspec.pipeline.progress import table_console
from angelspec.pipeline.requirements import missing_requirements

_GIB = 2**30
_CORE_PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "datasets", "pydantic", "accelerate",
    "gguf",
)  # fmt: skip
_OPTIONAL_PACKAGES = {
    "modelscope": ("models from ModelScope", install_hint("modelscope")),
    "tensorboard": ("training curves in TensorBoard", install_hint("tracking")),
    "sglang": ("serving with SGLang", install_hint("serve")),
    "gradio": ("the live demo", install_hint("demo")),
}


def examine() -> dict[str, Any]:
    """Everything ``angelspec doctor`` shows, as plain data."""
    return {
        "angelspec": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _CORE_PACKAGES},
        "optional": {
            name: {"version": _version(name), "for": purpose, "get": how}
            for name, (purpose, how) in _OPTIONAL_PACKAGES.items()
        },
        "machine": _machine(),
        "caches": _caches(),
        "recipes": {
            summary.name: missing_requirements(load_recipe(summary.name), output=Path("runs"))
            for summary in list_recipes()
        },
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    import torch

    flags: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        line = next((l for l in cpuinfo.read_text().splitlines() if l.startswith("flags")), "")
        flags = set(line.split())
    memory = psutil.virtual_memory()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(memory.total / _GIB, 1),
        "memory_free_gib": round(memory.available / _GIB, 1),
        "bfloat16_products": bool({"avx512_bf16", "amx_bf16"} & flags),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else [],
        "disk_free_gib": round(shutil.disk_usage(Path.cwd()).free / _GIB, 1),
    }


def _caches() -> list[dict[str, Any]]:
    hub = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    places = {
        "targets and drafters": cache_folder(),
        "Hugging Face": hub,
        "stages of recipe runs": Path("runs") / "store",
    }
    return [
        {"what": what, "path": str(path), "bytes": sum(state.st_size for state in file_states(path))}
        for what, path in places.items()
    ]


def print_examination(examination: dict[str, Any]) -> None:
    """Print the examination for a person."""
    from rich.markup import escape
    from rich.table import Table

    console = table_console()
    machine = examination["machine"]
    console.print(f"[bold]angelspec {examination['angelspec']}[/bold] on Python {examination['python']}")
    console.print(
        f"{machine['system']}, {machine['cores']} cores ({machine['torch_threads']} torch threads), "
        f"{machine['memory_free_gib']} of {machine['memory_gib']} GiB memory free, "
        f"{machine['disk_free_gib']} GiB disk free"
    )
    console.print(
        "bfloat16 matrix products: "
        + ("yes" if machine["bfloat16_products"] else "no (float32 is used)")
        + "; accelerators: "
        + (", ".join(machine["accelerators"]) or "none")
    )
    table = Table("package", "version", "", box=None, pad_edge=False)
    for name, found in examination["packages"].items():
        table.add_row(name, found or "[red]missing[/red]", "" if found else "reinstall angelspec")
    for name, item in examination["optional"].items():
        table.add_row(name, item["version"] or "[yellow]not installed[/yellow]",
                      item["for"] if item["version"] else escape(f"{item['for']}: {item['get']}"))  # fmt: skip
    console.print(table)
    for cache in examination["caches"]:
        console.print(f"{cache['what']}: {cache['bytes'] / _GIB:.2f} GiB in {cache['path']}", highlight=False)
    runnable = [name for name, missing in examination["recipes"].items() if not missing]
    console.print(f"[bold]recipes that run here[/bold]: {', '.join(runnable) or 'none'}")
    for name, missing in examination["recipes"].items():
        if missing:
            console.print(f"[bold]{name}[/bold] needs " + "; ".join(missing), highlight=False)
