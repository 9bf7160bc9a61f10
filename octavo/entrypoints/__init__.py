"""The ways into the engine: the `LLM` class and the command line."""
