"""Configuration as frozen dataclasses; `resolve()` turns what the user gave into every decision. Never imports torch."""
