"""An HTTP server that speaks as OpenAI's does; `jetdraft serve` runs it."""
