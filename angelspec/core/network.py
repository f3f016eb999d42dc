"""What the hubs' clients raise when the network fails."""

from __future__ import annotations

from importlib import import_module


def transport_errors() -> tuple[type[Exception], ...]:
    """Errors of a transfer that broke or never began, to be caught: ``OSError`` and those of the HTTP libraries.

    huggingface_hub 1.x transfers through httpx, 2.x through httpx2, whose errors are no httpx errors.
    """
    errors: list[type[Exception]] = [OSError]
    for name in ("httpx", "httpx2"):
        try:
            errors.append(import_module(name).HTTPError)
        except ImportError:
            continue
    return tuple(errors)
