"""Configuration: ModelConfig from config.json, EngineConfig from arguments."""
