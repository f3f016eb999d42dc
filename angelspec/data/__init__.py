"""Conversations in, packed training rows out; whatever is refused is counted, named and kept aside."""
