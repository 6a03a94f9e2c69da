"""What Telescope adds inside a vLLM server's process. Imported only there, because it needs vLLM."""
