"""The HTTP server: OpenAI's endpoints over an AsyncLLM. Needs the extra `serve` (FastAPI, uvicorn)."""
