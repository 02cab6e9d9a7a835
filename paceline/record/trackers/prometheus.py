"""The Prometheus tracker: an HTTP endpoint on the host of the first worker.

paceline run --report-to prometheus                 http://127.0.0.1:9464/metrics
paceline run --report-to prometheus:9500            another port; 0 is any free port
paceline run --report-to prometheus:0.0.0.0:9500    for other hosts, too

Names of metrics are stable, see docs/looking.md.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from paceline.cluster import network
from paceline.comm.p2p.connection import UnprovedCallers
from paceline.errors import UsageError
from paceline.formatting import escape_unprintable
from paceline.record.logged.media import MediaItem
from paceline.record.trackers.tracker import TrackedEvent, TrackedRun, TrackedStep, TrackedSummary

# The usual port of exporters inside a program.
DEFAULT_PORT: Final = 9464
LOOPBACK: Final = "127.0.0.1"
MAX_CALLERS: Final = 16  # connections at once
# Seconds in which a caller has to send something.
CALLER_TIMEOUT: Final = 5.0


class MetricsServer(ThreadingMixIn, WSGIServer):
    """An HTTP server in a training process.

    Callers cost the process no more than `MAX_CALLERS` threads and descriptors, and no line of
    output.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = network.address_family(address[0])
        self._crowd = UnprovedCallers(MAX_CALLERS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Admit a caller once there is room.

        If no caller leaves for a moment, all the others are disconnected.
        """
        self._crowd.enter(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a caller whose request has ended."""
        self._crowd.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None: ...


class MetricsRequestHandler(WSGIRequestHandler):
    """Reads one request, and logs nothing."""

    timeout = CALLER_TIMEOUT

    def log_message(self, format: str, *args: Any) -> None: ...


class PrometheusTracker:
    """Serves the state of the run to Prometheus. `detail` is PORT or HOST:PORT.

    The thread of the delivery updates the counters, and threads of the server read them in
    `collect`. `_lock` protects them.
    """

    name = "prometheus"

    def __init__(self, detail: str) -> None:
        self._host, self._port = _parse_address(detail)
        self._server: tuple[Any, threading.Thread] | None = None
        self._lock = threading.Lock()
        self._run: TrackedRun | None = None
        self._counts = dict.fromkeys(("steps", "samples", "events"), 0)
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by part
        # Seconds by worker and cause.
        self._late_seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._last_values: dict[str, float] = {}
        # Number of the last step.
        self._last_step = 0
        # Samples per second in the last delivered steps.
        self._rate: float | None = None

    def begin_run(self, run: TrackedRun) -> str:
        """Listen.

        Raises:
            UsageError: The address can't be listened on.
            ImportError: prometheus_client isn't installed.
        """
        from prometheus_client import CollectorRegistry, make_wsgi_app

        self._run = run
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            server = make_server(
                self._host,
                self._port,
                make_wsgi_app(registry),
                MetricsServer,
                MetricsRequestHandler,
            )
        except OSError as error:
            raise UsageError(
                f"report_to='prometheus:{self._host}:{self._port}' can't listen there "
                f"({error.strerror}); give another port, such as "
                f"prometheus:{self._port + 1}, or prometheus:0 for any that is free"
            ) from error
        self._server = (
            server,
            threading.Thread(target=server.serve_forever, name="paceline prometheus", daemon=True),
        )
        self._server[1].start()
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{server.server_port}/metrics"

    def log_steps(self, steps: Sequence[TrackedStep]) -> None:
        """Count steps."""
        # Values that were logged after their step had ended have no samples and seconds.
        finished = [step for step in steps if step.samples is not None and step.seconds is not None]
        samples, seconds = (
            sum(step.samples or 0 for step in finished),
            sum(sum((step.seconds or {}).values()) for step in finished),
        )
        with self._lock:
            for step in steps:
                self._last_values |= step.values
            for step in finished:
                self._last_step = step.step
                self._counts["steps"] += 1
                self._counts["samples"] += step.samples or 0
                for part, part_seconds in (step.seconds or {}).items():
                    self._seconds[part] += part_seconds
                for lateness in step.late:
                    for cause, part_seconds in lateness.by_cause.items():
                        self._late_seconds[str(lateness.rank), cause] += part_seconds
            # The rate is that of the delivered steps, about those of the last second.
            if seconds > 0:
                self._rate = samples / seconds

    def log_media(self, items: Sequence[MediaItem]) -> None:
        """Do nothing, because Prometheus has no histograms of tensors, and no images."""

    def log_event(self, event: TrackedEvent) -> None:
        """Count an event."""
        with self._lock:
            self._counts["events"] += 1

    def rewind_to_step(self, step: int) -> None:
        """Do nothing, because counters of Prometheus never go back."""

    def log_summary(self, end: TrackedSummary) -> None:
        """Do nothing, because the endpoint ends with the run."""

    def close(self, *, failed: bool) -> None:
        """Free the port. Calling it twice is harmless."""
        server, self._server = self._server, None
        if server is not None:
            httpd, thread = server
            httpd.shutdown()
            thread.join()
            httpd.server_close()

    def collect(self) -> Iterator[Any]:
        """Yield the metrics. prometheus_client calls this for each request."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        assert self._run is not None
        run = escape_unprintable(self._run.name)
        counter = partial(_make_family, CounterMetricFamily, run)
        gauge = partial(_make_family, GaugeMetricFamily, run)
        # Copy under the lock, and build the answer without it.
        with self._lock:
            counts, last, rate = dict(self._counts), self._last_step, self._rate
            seconds = {(part,): value for part, value in self._seconds.items()}
            late_seconds = dict(self._late_seconds)
            logged = {(name,): value for name, value in self._last_values.items()}
        settings = {
            name: escape_unprintable(str(value)) for name, value in self._run.settings.items()
        }
        yield gauge(
            "paceline_run_info",
            "What runs here: always 1.",
            {tuple(settings.values()): 1.0},
            *settings,
        )
        for name, text in (
            ("steps", "Steps taken."),
            ("samples", "Samples trained on."),
            ("events", "Events of the run."),
        ):
            yield counter(f"paceline_{name}", text, {(): float(counts[name])})
        yield counter(
            "paceline_step_seconds",
            "Seconds of steps by part, the mean over workers.",
            seconds,
            "part",
        )
        yield counter(
            "paceline_late_seconds",
            "Seconds by which a worker was later than usual, by cause.",
            late_seconds,
            "worker",
            "cause",
        )
        yield gauge("paceline_step", "Number of the last step.", {(): float(last)})
        if rate is not None:
            yield gauge(
                "paceline_samples_per_second",
                "Samples per second in the last steps, those of about a second.",
                {(): rate},
            )
        yield gauge(
            "paceline_logged", "The last value of what the script has logged.", logged, "name"
        )


def _make_family(
    kind: Callable[..., Any],
    run: str,
    name: str,
    text: str,
    values: Mapping[Any, float],
    *labels: str,
) -> Any:
    """Make a counter or a gauge with its values by labels. The first label is the run."""
    family = kind(name, text, labels=["run", *labels])
    for key, value in values.items():
        family.add_metric([run, *key], value)
    return family


def _parse_address(detail: str) -> tuple[str, int]:
    """Parse PORT or HOST:PORT. An IPv6 address is in brackets."""
    host, _, port = detail.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOOPBACK
    port_number = network.parse_port(port) if detail else DEFAULT_PORT
    if port_number is None:
        raise UsageError(
            f"report_to='prometheus:{detail}' has no port; write prometheus:PORT or "
            "prometheus:HOST:PORT, such as 9464"
        )
    return host, port_number
