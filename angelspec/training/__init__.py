"""One loop that knows no algorithm, one step per drafter family, and what they stand on."""
