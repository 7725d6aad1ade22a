"""An HTTP server with OpenAI's API; `jetdraft serve` runs it."""
