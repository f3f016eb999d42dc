"""Shared by all tests. Lying here, it also lets them import the builders beside it (``drafter_builders``)."""

from __future__ import annotations

import os

# before torch starts its threads: tiny tensors gain nothing from several, and lose thirtyfold on a busy machine
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402

torch.set_num_threads(1)
