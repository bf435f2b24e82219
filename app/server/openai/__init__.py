"""The OpenAI wire format: request schemas, response shapes, and the handlers of the generating routes."""
