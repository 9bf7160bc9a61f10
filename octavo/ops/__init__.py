"""The operator interface and its platforms. `interface.py` is the contract; `registry.py` finds a platform by name."""
