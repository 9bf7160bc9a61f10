"""The routes, one file a topic. Each file has a `router`."""
