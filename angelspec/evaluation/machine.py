"""Where and with what the figures were measured."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
from pydantic import BaseModel, ConfigDict

_PACKAGES = ("angelspec", "torch", "transformers", "tokenizers", "safetensors", "numpy")


class Machine(BaseModel):
    """Where the seconds were measured."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    description: str
    """Hardware in words."""
    threads: int
    """torch's threads."""

    @property
    def threads_in_words(self) -> str:
        """``1 thread``, ``2 threads``."""
        return f"{self.threads} thread{'' if self.threads == 1 else 's'}"

    @classmethod
    def here(cls, device: torch.device | str = "cpu") -> Machine:
        """Describe this machine."""
        memory = psutil.virtual_memory().total / 2**30
        words = f"{psutil.cpu_count() or 0} logical cores of {_processor()}, {memory:.0f} GiB memory"
        if torch.device(device).type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            words = f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB), {words}"
        return cls(description=words, threads=torch.get_num_threads())


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the figures."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed as a package"
    return versions


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
