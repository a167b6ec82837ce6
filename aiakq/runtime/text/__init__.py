"""Text: tokenizer, detokenizer, and the outputs that users get."""
