"""Tensor functions: attention, rope, masks, anchors, packing, verification. No modules, no files."""
