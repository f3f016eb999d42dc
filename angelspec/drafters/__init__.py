"""Drafters: one readable file per family, their heads, and the translation of every checkpoint dialect."""
