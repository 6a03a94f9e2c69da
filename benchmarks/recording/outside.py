"""What is around a run, as a process of its own: a collector, a server's metrics, and Prometheus.

The server's page is as long as vLLM's. Prints its port; each line on stdin is an address to scrape.
"""

import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "iteration_tokens_total"),
    *("e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens"),
)
_COUNTERS = ("prompt_tokens_total", "generation_tokens_total", "num_preemptions_total")


class Page:
    """A page as long as that of a vLLM server, whose counters grow."""

    def __init__(self) -> None:
        self.num_read = 0

    def text(self) -> str:
        """Return the page."""
        self.num_read += 1
        count = self.num_read
        labels = 'engine="0",model_name="policy"'
        lines = [f"vllm:num_requests_running{{{labels}}} 64.0"]
        lines.append(f"vllm:kv_cache_usage_perc{{{labels}}} 0.5")
        lines += [f"vllm:{name}{{{labels}}} {1000.0 * count}" for name in _COUNTERS]
        for name in _HISTOGRAMS:
            lines += [
                f'vllm:{name}_bucket{{{labels},le="{edge / 8}"}} {count * edge}.0'
                for edge in range(80)
            ]
            lines.append(f"vllm:{name}_count{{{labels}}} {count * 64}.0")
            lines.append(f"vllm:{name}_sum{{{labels}}} {count * 32}.0")
        return "\n".join(lines) + "\n"


def main() -> None:
    """Serve until stdin ends."""
    page = Page()

    class Handler(BaseHTTPRequestHandler):
        """Takes spans and shows metrics."""

        def do_GET(self) -> None:
            """Show the page."""
            content = page.text().encode()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            """Take spans."""
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    for line in sys.stdin:
        with urllib.request.urlopen(line.strip(), timeout=10) as answer:
            answer.read()


if __name__ == "__main__":
    main()
