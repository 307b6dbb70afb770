"""Bodies of the API, as OpenAI's clients send and read them. Types are strict: a number in quotes is refused."""
