"""angelspec: train, measure, serve and publish speculative-decoding drafters."""

__version__ = "0.1.0"
