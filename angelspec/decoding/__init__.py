"""The slow, obvious draft-verify loop: the truth that every fast path is compared with."""
