"""Arguments: every option of the engine, the server and the commands, once: name, type, default and help."""
