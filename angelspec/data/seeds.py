"""The random stream of an answer, named by what it answers and by nothing that may change."""

from __future__ import annotations

import hashlib


def row_key(prompt_id: str, sample: int) -> int:
    """62 bits of a hash of the prompt's id and the sample's number."""
    return int.from_bytes(hashlib.sha256(f"{sample}/{prompt_id}".encode()).digest()[:8], "big") >> 2
