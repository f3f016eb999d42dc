"""Acceptance by real decoding, reports and plots."""
