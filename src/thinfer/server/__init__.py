"""The server: OpenAI's API over HTTP, metrics and a page, on one engine thread."""
