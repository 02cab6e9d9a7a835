"""Prometheus: an HTTP endpoint of the run, on the host of the first worker, with names that stay
what they are (docs/trackers.md).

paceline run --report-to prometheus             http://127.0.0.1:9464/metrics
paceline run --report-to prometheus:9500        another port; 0: any that is free
paceline run --report-to prometheus:0.0.0.0:9500    for other hosts, too
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from paceline.cluster import network
from paceline.comm.p2p.connection import CallerCrowd
from paceline.errors import UsageError
from paceline.formatting import printable
from paceline.record.logged.media import MediaItem
from paceline.record.trackers.tracker import TrackedEnd, TrackedEvent, TrackedRun, TrackedStep

PORT: Final = 9464  # that of exporters which a program brings along
LOOPBACK: Final = "127.0.0.1"
CALLERS: Final = 16  # at once
SILENT: Final = 5.0  # seconds in which a caller has to say something


class MetricsServer(ThreadingMixIn, WSGIServer):
    """An HTTP server in a process that trains: strangers cost it no more than `CALLERS` threads
    and descriptors, and no line of output.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = network.family(address[0])
        self._crowd = CallerCrowd(CALLERS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._crowd.enter(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._crowd.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None: ...


class MetricsRequest(WSGIRequestHandler):
    """Reads one request, and says nothing of it."""

    timeout = SILENT

    def log_message(self, format: str, *args: Any) -> None: ...


class PrometheusTracker:
    """Answers whoever asks how far the run is. `detail`: PORT or HOST:PORT."""

    name = "prometheus"

    def __init__(self, detail: str) -> None:
        self._host, self._port = _address(detail)
        self._server: tuple[Any, threading.Thread] | None = None
        self._lock = threading.Lock()
        self._run: TrackedRun | None = None
        self._counts = dict.fromkeys(("steps", "samples", "events"), 0)
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by part
        # seconds by worker and cause
        self._late: defaultdict[tuple[int, str], float] = defaultdict(float)
        self._logged: dict[str, float] = {}
        self._last = 0  # number of the last step
        self._rate: float | None = None  # samples per second in the steps that were given last

    def begin(self, run: TrackedRun) -> str:
        """Listen.

        Raises `UsageError` where that can't be, and `ImportError` from prometheus_client.
        """
        from prometheus_client import CollectorRegistry, make_wsgi_app

        self._run = run
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            server = make_server(
                self._host, self._port, make_wsgi_app(registry), MetricsServer, MetricsRequest
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

    def steps(self, steps: Sequence[TrackedStep]) -> None:
        """Count steps."""
        whole = [each for each in steps if each.samples is not None and each.seconds is not None]
        samples, seconds = (
            sum(each.samples or 0 for each in whole),
            sum(sum((each.seconds or {}).values()) for each in whole),
        )
        with self._lock:
            for each in steps:
                self._logged |= each.values
            for each in whole:
                self._last = each.step
                self._counts["steps"] += 1
                self._counts["samples"] += each.samples or 0
                for part, spent in (each.seconds or {}).items():
                    self._seconds[part] += spent
                for late in each.late:
                    for cause, spent in late.by_cause.items():
                        self._late[late.rank, cause] += spent
            if seconds > 0:
                self._rate = samples / seconds

    def media(self, items: Sequence[MediaItem]) -> None:
        """Leave histograms and images out: there is no place for them."""

    def event(self, event: TrackedEvent) -> None:
        """Count an event."""
        with self._lock:
            self._counts["events"] += 1

    def rewind(self, step: int) -> None:
        """Leave counters as they are: they never go back."""

    def conclude(self, end: TrackedEnd) -> None:
        """Leave the summary out: the endpoint ends with the run."""

    def close(self, *, failed: bool) -> None:
        """Free the port. Calling it twice is harmless."""
        server, self._server = self._server, None
        if server is not None:
            httpd, thread = server
            httpd.shutdown()
            thread.join()
            httpd.server_close()

    def collect(self) -> Iterator[Any]:
        """Yield what prometheus_client writes when somebody asks."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        assert self._run is not None
        run = printable(self._run.name)

        def counter(name: str, text: str, values: Mapping[Any, float], *labels: str) -> Any:
            family = CounterMetricFamily(name, text, labels=["run", *labels])
            for key, value in values.items():
                family.add_metric([run, *key], value)
            return family

        def gauge(name: str, text: str, values: Mapping[Any, float], *labels: str) -> Any:
            family = GaugeMetricFamily(name, text, labels=["run", *labels])
            for key, value in values.items():
                family.add_metric([run, *key], value)
            return family

        with self._lock:
            counts, last, rate = dict(self._counts), self._last, self._rate
            seconds = {(part,): value for part, value in self._seconds.items()}
            late = {(str(worker), cause): value for (worker, cause), value in self._late.items()}
            logged = {(name,): value for name, value in self._logged.items()}
        settings = {name: printable(str(value)) for name, value in self._run.settings.items()}
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
            late,
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


def _address(detail: str) -> tuple[str, int]:
    """Read PORT or HOST:PORT; an IPv6 address is in brackets."""
    host, _, port = detail.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOOPBACK
    number = network.port(port) if detail else PORT
    if number is None:
        raise UsageError(
            f"report_to='prometheus:{detail}' has no port; write prometheus:PORT or "
            "prometheus:HOST:PORT, such as 9464"
        )
    return host, number
