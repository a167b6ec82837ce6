"""Transcription of audio by models whose decoder reads the states of an encoder (Whisper)."""
