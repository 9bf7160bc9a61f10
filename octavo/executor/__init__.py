"""Executors: how the engine core reaches its workers."""
