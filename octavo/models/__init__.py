"""One readable file an architecture; `registry.py` finds the class. Models call layers and nothing below them."""
