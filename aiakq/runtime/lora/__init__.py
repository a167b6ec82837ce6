"""LoRA adapters: reading what PEFT saves, and loading it for the linear layers of a model."""
