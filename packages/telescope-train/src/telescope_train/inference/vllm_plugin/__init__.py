"""What Telescope adds inside a vLLM server's own process. Imported there only: it needs vLLM."""
