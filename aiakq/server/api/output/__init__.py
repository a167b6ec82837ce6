"""Text of a message that arrives in pieces, and the events that parsers make of it."""
