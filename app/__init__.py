"""People and programs to the runtime: command line, OpenAI-compatible server, chat."""
