"""Configuration as frozen dataclasses; `resolve()` turns what the user gave into decisions. Never imports torch."""
