"""The `octavo` command: main.py chooses the command, every command is a module of its own."""
