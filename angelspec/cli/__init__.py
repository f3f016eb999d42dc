"""The command line: parse, call one function, print. Heavy imports happen inside commands."""
