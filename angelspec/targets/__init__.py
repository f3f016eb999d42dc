"""Targets: where the frozen model comes from, and which hidden states it gives."""
