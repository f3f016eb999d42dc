"""The three kinds of work a drafter is trained for, measured on and routed by."""

from __future__ import annotations

from typing import Literal, get_args

Workload = Literal["chat", "code", "math"]
WORKLOADS: tuple[Workload, ...] = get_args(Workload)
