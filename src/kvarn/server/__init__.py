"""The OpenAI-compatible server: an asyncio front (FastAPI, uvicorn) and the engine on a thread of its own."""
