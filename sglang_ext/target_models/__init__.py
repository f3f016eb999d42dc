"""Targets of SGLang that lack something the drafters need, completed; they take the place of SGLang's own."""
