"""Text: tokenizer, detokenizer and request outputs."""
