"""Arguments: the single definition of every option: name, type, default and help."""
