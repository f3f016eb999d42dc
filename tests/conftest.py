"""Shared by all tests. Lying here, it also lets them import the builders beside it (``drafter_builders``)."""

from __future__ import annotations

import torch

torch.set_num_threads(min(2, torch.get_num_threads()))
