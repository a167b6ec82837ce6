"""LoRA adapters: files as PEFT writes them, and their weights beside those of a loaded model."""
