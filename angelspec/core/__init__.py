"""The vocabulary of angelspec: every fact is written down once, here, and importing it loads no torch."""
