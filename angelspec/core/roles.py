"""Who speaks in a conversation."""

from __future__ import annotations

from typing import Literal, get_args

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role)
