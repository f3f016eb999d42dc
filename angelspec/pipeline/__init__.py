"""A recipe as a row of stages: fingerprints, reuse, resuming, progress."""
