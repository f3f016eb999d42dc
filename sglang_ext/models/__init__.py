"""Models that SGLang loads by name (``ModelRegistry``), and the serving halves of the drafters."""
