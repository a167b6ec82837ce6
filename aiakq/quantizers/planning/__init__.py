"""How each layer will be stored, settled before any weight is touched."""
