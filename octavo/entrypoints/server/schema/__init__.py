"""What requests and answers look like. Pydantic and plain dicts; nothing of the engine but its parameters."""
