"""The SGLang plugin: the ANGELSPEC algorithm, its models, and a CPU platform on plain torch."""
