"""OpenAI's API over an `AsyncLLM`, on FastAPI and uvicorn. Imports no torch."""
