"""The OpenAI-compatible HTTP server. `launcher.serve` is the entry; `app.build_app` the routes alone, for embedding."""
