"""The benchmark against peers: what is started, what passes the check, what is kept, what the page says; no peer is launched."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
import torch

from benchmarks.peers import __main__ as command
from benchmarks.peers import environments, launchers, launches, page, places, summary
from benchmarks.peers.catalogue import MODELS, PEERS, PERIOD, SETTINGS, Cell, Peer, guess, timed_steps
from benchmarks.peers.checks import complaint, telling
from benchmarks.peers.measuring import Measurement
from benchmarks.peers.records import Records

CELL = Cell(SETTINGS["one-host"], MODELS["gpt-0.9m"], 4)


class Nowhere:
    """A place where nothing can be started."""

    def __init__(self, folder: Path, hosts: int, workers: int) -> None:
        interface = "eth0" if hosts > 1 else None
        self.hosts = tuple(places.Host(number, f"10.77.0.{number + 1}", interface, workers) for number in range(hosts))
        self.folder = folder
        self._ports = iter(range(29500, 29600))

    def spawn(self, host: int, command: Sequence[str], environ: Mapping[str, str], log: IO[bytes]) -> places.Process:
        raise AssertionError("nothing is started here")

    def port(self) -> int:
        return next(self._ports)

    def sweep(self) -> None:
        return None


def answers(size: int = 2, **changes: Any) -> list[dict[str, Any]]:
    """What workers that did everything right wrote."""
    sent = {"links": 8000, "loopback": 400}
    kept = {"size": size, "host": "net:1", "seconds": [0.1] * 4, "losses": [2.0] * 7, "sent": sent, "sha256": "a"}
    kept |= {"away": 1e-8, "away_warmed": 1e-8}
    return [{"rank": rank, **kept, "versions": {"torch": "2"}, **changes} for rank in range(size)]


def judged(found: Sequence[Mapping[str, Any]], check: str = "exact") -> str | None:
    return complaint(check, found, workers=2, steps=4, alone=1e-2)


# ---- the check


@pytest.mark.parametrize("check", ["exact", "half", "near"])
def test_right_answers_pass(check: str) -> None:
    assert judged(answers(), check) is None


def test_a_peer_that_runs_alone_is_found() -> None:
    assert "1 of 2 workers answered (ranks: 0): it ran alone" in str(judged(answers(1)))
    assert "0 of 2 workers answered" in str(judged([]))
    assert "has 1 of 2 workers" in str(judged(answers(size=1) * 2))


def test_wrong_weights_are_found() -> None:
    assert "2.0e-05 away" in str(judged(answers(away_warmed=2e-5)))
    assert judged(answers(away_warmed=2e-5), "half") is None
    assert "2.0e-03 away" in str(judged(answers(away_warmed=2e-3), "half"))
    one_wrong = [*answers()[:1], {**answers()[1], "away": 1.0}]
    assert "1.0e+00 away" in str(judged(one_wrong))


def test_rounding_may_grow_to_a_tenth_of_what_a_lone_worker_is_off() -> None:
    for check in ("exact", "half"):
        assert judged(answers(away=9e-4), check) is None
        assert "1.1e-03 away from one process's, a lone worker's are 1.0e-02" in str(judged(answers(away=1.1e-3), check))


def test_inexact_peers_have_to_agree_and_be_nearer_than_a_lone_worker() -> None:
    assert judged(answers(away=5e-3), "near") is None
    assert "a lone worker's are 1.0e-02" in str(judged(answers(away=1.1e-2), "near"))
    apart = [*answers(away=5e-3)[:1], {**answers(away=5e-3)[1], "sha256": "b"}]
    assert judged(apart, "near") == "the workers' weights differ"


def test_not_a_number_is_no_right_answer() -> None:
    for check in ("exact", "half", "near"):
        assert judged(answers(away=float("nan")), check) is not None
        assert judged(answers(away_warmed=float("nan")), check) is not None or check == "near"


def test_steps_that_are_missing_are_found() -> None:
    assert judged(answers(seconds=[0.1] * 3)) == "3 of 4 steps were trained"


def test_a_reference_that_tells_nothing_ends_the_benchmark() -> None:
    telling({"alone": 1e-2, "alone_warmed": 2e-3}, "here")
    for found in ({"alone": 1e-6, "alone_warmed": 2e-3}, {"alone": 1e-2, "alone_warmed": 1e-6}):
        with pytest.raises(RuntimeError, match=r"here: a lone worker is only 1\.0e-06"):
            telling(found, "here")


# ---- what is started


@pytest.mark.parametrize("peer", PEERS.values(), ids=str)
def test_every_peer_has_a_program_a_launcher_and_requirements(peer: Peer) -> None:
    assert (environments.HERE / "programs" / peer.program).exists()
    assert peer.launcher in launchers.LAUNCHERS and peer.check in summary.WORDS
    if peer.environment is not None:
        lines = (environments.HERE / "requirements" / f"{peer.environment}.txt").read_text()
        assert peer.package is not None
        assert f"{peer.package}==" in lines or environments.SOURCES[peer.environment].requirement.startswith(f"{peer.package}==")


def started(name: str, folder: Path, hosts: int = 2) -> list[launchers.Start]:
    return launchers.starts(PEERS[name], Nowhere(folder, hosts, 2), ("--model", "m"), 10.0)


def test_torchrun_starts_on_every_host(tmp_path: Path) -> None:
    first, second = started("ddp-best", tmp_path)
    assert (first.host, second.host) == (0, 1)
    assert first.command[0] == sys.executable and "--nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr 10.77.0.1" in " ".join(
        second.command
    )
    assert first.command[-2:] == ("--bucket-mb", "10")
    assert first.environ == {"GLOO_SOCKET_IFNAME": "eth0"} and started("ddp", tmp_path, 1)[0].environ == {}


def test_paceline_gets_the_same_line_on_every_host(tmp_path: Path) -> None:
    first, second = (" ".join(start.command) for start in started("paceline", tmp_path))
    assert first.replace("--host-rank 0", "--host-rank 1") == second
    assert f"run --workers 2 --hosts 2 --join 10.77.0.1:29500 --secret-file {tmp_path}/secret --host-rank 0" in first
    assert "--hosts" not in started("paceline", tmp_path, 1)[0].command


def test_mpirun_and_horovodrun_start_on_the_first_host(tmp_path: Path) -> None:
    for name in ("mpi", "horovod"):
        (start,) = started(name, tmp_path)
        assert start.host == 0 and "10.77.0.1:2,10.77.0.2:2" in start.command and "eth0" in start.command
        assert start.command[0].startswith(str(environments.BENCH / str(PEERS[name].environment)))


def test_mpi_yields_where_workers_outnumber_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, yields in ((2, True), (4, False)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert ("mpi_yield_when_idle" in started("mpi", tmp_path)[0].command) == yields


def test_torchft_has_a_lighthouse_and_a_group_for_each_worker(tmp_path: Path) -> None:
    light, *groups = started("torchft", tmp_path)
    assert light.helper and not any(group.helper for group in groups)
    assert [group.command[group.command.index("--replica") + 1] for group in groups] == ["0", "1", "2", "3"]
    assert [group.command[group.command.index("--address") + 1] for group in groups] == ["10.77.0.1"] * 2 + ["10.77.0.2"] * 2
    assert {group.environ["TORCHFT_LIGHTHOUSE"] for group in groups} == {"http://10.77.0.1:29500"}


def test_no_launchers_variables_get_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "OMPI_COMM_WORLD_SIZE", "PACELINE_SYNC"):
        monkeypatch.setenv(name, "7")
    environ = places.surroundings(Nowhere(tmp_path, 1, 2))
    assert "7" not in environ.values() and environ["OMP_NUM_THREADS"] == "1" and environ["PEERS_FOLDER"] == str(tmp_path)


# ---- plans


def test_steps_fill_the_time_in_whole_periods() -> None:
    assert timed_steps(0.1, 4.0) == 40 and timed_steps(12.0, 4.0) == PERIOD and timed_steps(1e-4, 4.0) == 100
    assert all(timed_steps(seconds / 7, 4.0) % PERIOD == 0 for seconds in range(1, 40))


def test_slower_links_take_longer() -> None:
    slow, fast, here = (guess(SETTINGS[name], MODELS["gpt-19m"], 2) for name in ("two-hosts-100m", "two-hosts-1g", "one-host"))
    assert slow > 5 * fast > 10 * here


def test_time_is_planned_for_bucket_sizes_too(tmp_path: Path) -> None:
    records = Records(tmp_path / "records.jsonl")
    plain, tried = (command.estimate(Measurement([CELL], [PEERS[name]], 1, 0, 2, records)) for name in ("ddp", "ddp-best"))
    assert plain < tried and command.estimate(Measurement([CELL], [PEERS["ddp"]], 3, 0, 2, records)) == pytest.approx(3 * plain)


def test_models_of_the_driver_are_those_of_the_programs() -> None:
    from benchmarks.peers.programs import workload

    assert set(workload.WORKS) == set(MODELS)
    for name, model in MODELS.items():
        found = workload.flat(workload.build(name, 0)).numel() * 4 / 1e6
        assert model.megabytes == pytest.approx(found, rel=0.1)
        assert workload.WORKS[name].batch == model.batch


# ---- a launch


def test_bytes_are_counted_once_for_each_host() -> None:
    found = [{**answer, "host": host} for host in ("net:1", "net:2") for answer in answers()]
    assert launches.sent(found, "links") == 2 * 8000 / 4 and launches.sent(found, "loopback") == 2 * 400 / 4


def test_reasons_are_short_and_tell_the_signal() -> None:
    aborted = "terminate called after\n  what():  Resource deadlock avoided\nChildFailedError:\n  exitcode : -6 (SIGABRT)\n"
    assert launches.why(1, aborted) == "a worker ended by SIGABRT: what():  Resource deadlock avoided"
    assert launches.why(-signal.SIGSEGV, "") == "a worker ended by SIGSEGV"
    assert launches.why(3, "a line\nRuntimeError: no ssh\nat the end") == "exit code 3: RuntimeError: no ssh"
    assert launches.why(3, "") == "exit code 3: no output" and len(environments.last_words("x" * 999)) == 160


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[places.Place, Any]]:
    """This machine, and a way to say what the launcher of `none` is."""
    with places.place(SETTINGS["one-host"]) as here:

        def say(text: str) -> Peer:
            monkeypatch.setitem(
                launchers.LAUNCHERS, "alone", lambda call: [launchers.Start(0, (sys.executable, "-c", text, *call.arguments))]
            )
            return PEERS["none"]

        yield here, say


@pytest.mark.jobs
def test_a_launch_gives_what_its_workers_wrote(scripted: tuple[places.Place, Any]) -> None:
    here, say = scripted
    peer = say("import sys; [open(f'{sys.argv[2]}/rank-{r}.json', 'w').write('{\"rank\": %d}' % r) for r in (1, 0)]")
    assert launches.launch(peer, here, (), deadline=120) == [{"rank": 0}, {"rank": 1}]
    assert {path.name for path in here.folder.iterdir()} == {"secret", "driver"}


@pytest.mark.jobs
def test_a_launch_that_fails_says_why(scripted: tuple[places.Place, Any]) -> None:
    here, say = scripted
    with pytest.raises(launches.LaunchError, match="exit code 1: RuntimeError: no"):
        launches.launch(say("raise RuntimeError('no')"), here, (), deadline=120)


@pytest.mark.jobs
def test_a_launch_ends_at_its_deadline_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"setsid sleep 600 & echo $! > {tmp_path / 'child'}; sleep 600"
    monkeypatch.setitem(launchers.LAUNCHERS, "alone", lambda call: [launchers.Start(0, ("sh", "-c", line))])
    for deadline in (1, 20, 60):  # on a busy machine it may be long until the child is there
        with places.place(SETTINGS["one-host"]) as here, pytest.raises(launches.LaunchError, match=f"not done after {deadline} s"):
            launches.launch(PEERS["none"], here, (), deadline=deadline)
        if (tmp_path / "child").exists():
            break
    pid = int((tmp_path / "child").read_text())
    end = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end, "what the launch started is still there"
        time.sleep(0.05)


@pytest.mark.jobs
def test_what_a_killed_driver_left_goes_at_the_next_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    line = "import sys, tempfile; from benchmarks.peers import places; from benchmarks.peers.catalogue import SETTINGS\n"
    line += "tempfile.tempdir = sys.argv[1]\nwith places.place(SETTINGS['one-host']) as here:\n"
    line += "    with open('/dev/null', 'wb') as log: here.spawn(0, ['sleep', '600'], places.surroundings(here), log)\n"
    line += "    print('ready', flush=True); input()"
    driver = subprocess.Popen(
        [sys.executable, "-c", line, str(tmp_path)], cwd=environments.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None and driver.stdout.readline() == "ready\n"
    (folder,) = tmp_path.iterdir()
    places.tidy()
    assert folder.exists(), "the driver is alive"
    driver.kill()
    driver.communicate()
    assert marked(folder)
    places.tidy()
    assert not folder.exists()
    end = time.monotonic() + 60
    while marked(folder):
        assert time.monotonic() < end, "what the driver started is still there"
        time.sleep(0.05)


def marked(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("PEERS_FOLDER") == str(folder):
                found.append(process.pid)
    return found


# ---- records, and what is still missing


def round_of(peer: str, number: int, step: float = 0.1, why: str | None = None) -> dict[str, Any]:
    record = {"kind": "round", "cell": CELL.name, "peer": peer, "round": number, "steps": 4, "seed": 0, "when": f"2026-01-0{number + 1}"}
    more = {"step": step, "sent": 4e6, "away": 1e-8, "losses": [2.0], "bucket": None, "versions": {"torch": "2.13.0"}}
    return record | {"why": why} | ({} if why else more)


def test_records_survive_and_later_ones_count(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "records.jsonl"
    records = Records(path)
    records.add(round_of("ddp", 0, why="lost"))
    with path.open("a") as file:
        file.write('{"kind": "rou')  # killed while writing
    Records(path).add(round_of("ddp", 0))
    found = Records(path)
    assert [record["why"] for record in found.each("round")] == [None]
    assert found.find("round", cell=CELL.name, peer="ddp", round=0, steps=4, seed=0) == round_of("ddp", 0)
    assert found.find("round", cell=CELL.name, peer="ddp", round=0, steps=8, seed=0) is None


def todo(records: Records, rounds: int = 2, *, retry: bool = False) -> list[tuple[int, str]]:
    peers = [PEERS["none"], PEERS["paceline"], PEERS["ddp"]]
    measurement = Measurement([CELL], peers, rounds, 0, 2, records, retry)
    return [(number, peer.name) for number, peer in measurement.missing(CELL)]


def test_rounds_alternate_and_what_is_there_is_not_measured_again(tmp_path: Path) -> None:
    records = Records(tmp_path / "records.jsonl")
    assert todo(records) == [(0, "none"), (0, "paceline"), (0, "ddp"), (1, "paceline"), (1, "ddp"), (1, "none")]
    records.add(round_of("paceline", 0))
    assert todo(records) == [(0, "none"), (0, "ddp"), (1, "paceline"), (1, "ddp"), (1, "none")]


def test_what_failed_is_launched_again_only_when_asked(tmp_path: Path) -> None:
    records = Records(tmp_path / "records.jsonl")
    records.add(round_of("ddp", 0, why="lost"))
    assert todo(records) == [(0, "none"), (0, "paceline"), (1, "paceline"), (1, "none")]
    assert (0, "ddp") in todo(records, retry=True) and (1, "ddp") in todo(records, retry=True)


def test_a_peer_of_one_setting_runs_only_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "made", lambda name: True)
    cells = [Cell(SETTINGS[name], MODELS["gpt-0.9m"], 4) for name in ("one-host", "two-hosts-1g")]
    measurement = Measurement(cells, [PEERS["accelerate-launch"]], 1, 0, 2, Records(tmp_path / "records.jsonl"))
    assert [len(measurement.here(cell)) for cell in cells] == [1, 0] and measurement.missing(cells[1]) == []


# ---- the summary and the page


@pytest.fixture
def found(tmp_path: Path) -> dict[str, Any]:
    records = Records(tmp_path / "records.jsonl")
    machine = {"processor": "a chip", "cores": 2, "memory_gib": 4, "system": "Linux"}
    records.add(
        {"kind": "header", "when": "2026", "command": "the command", "machine": machine, "versions": {"torch": "2.13.0", "numpy": None}}
    )
    for number, slower in enumerate((1.0, 1.1, 1.2)):
        records.add(round_of("paceline", number, 0.1 * slower))
        records.add(round_of("ddp", number, 0.2 * slower))
        records.add(round_of("mpi", number, 0.05 * slower))
        records.add(round_of("fabric", number, 0.101 * slower))
    records.add(round_of("horovod", 0))
    records.add(round_of("horovod", 1, why="exit code 1: no | <ssh>"))
    records.add({"kind": "environment", "environment": "deepspeed", "why": "no compiler"})
    records.add({"kind": "buckets", "cell": CELL.name, "steps": 4, "seed": 0, "tried": {"1": 0.3, "25": 0.2}, "best": 25.0})
    return summary.summarise(records, list(PEERS))


def rows(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["peer"]: row for row in found["cells"][0]["rows"]}


def test_rows_have_medians_spread_and_ratios_by_rounds(found: dict[str, Any]) -> None:
    ddp = rows(found)["ddp"]
    assert (ddp["median"], ddp["low"], ddp["high"]) == pytest.approx((0.22, 0.21, 0.23))
    assert (
        ddp["ratio"]["value"] == pytest.approx(2) and ddp["ratio"]["low"] == pytest.approx(2) and rows(found)["paceline"]["ratio"] is None
    )


def test_what_failed_or_is_not_installed_has_a_reason_and_no_time(found: dict[str, Any]) -> None:
    assert rows(found)["horovod"]["median"] is None and "ssh" in rows(found)["horovod"]["why"]
    assert rows(found)["deepspeed"]["why"] == "not installed: no compiler"
    assert "torchft" in found["cells"][0]["unmeasured"] and "torchft" not in rows(found)


def test_the_page_says_wins_draws_losses_and_failures(found: dict[str, Any]) -> None:
    text = page.text(found)
    assert (
        "| one host, 2 workers; GPT, 0.9 M parameters | DDP, 25 MB buckets (2.00x) | Lightning Fabric (1.01x) | MPI by hand (0.50x) | - |"
        in text
    )
    assert "| Horovod | no time: exit code 1: no \\| &lt;ssh> |" in text
    assert "| DDP, 25 MB buckets | 220.00 ms | 210.00 ms to 230.00 ms | 2.00 [2.00, 2.00] | 4.00 MB | 1.0e-08 |" in text
    assert "the command" in text and "a chip" in text and "numpy" not in text
    order = [line.split("|")[1].strip() for line in page.table(found["cells"][0]).splitlines()[2:]]
    assert order[:4] == ["MPI by hand", "**paceline**", "Lightning Fabric", "DDP, 25 MB buckets"]


@pytest.mark.parametrize(
    ("step", "words"),
    [(0.2, "2.00x (200.00 ms)"), (0.099, "0.99x (99.00 ms)"), (0.08, "0.80x (80.00 ms): **quicker than all workers together**")],
)
def test_one_process_alone_stands_beside_the_peers(tmp_path: Path, found: dict[str, Any], step: float, words: str) -> None:
    records = Records(tmp_path / "records.jsonl")  # what `found` was made of
    for number in range(3):
        records.add(round_of("paceline", number, 0.1))
        records.add(round_of("none", number, step))
    text = page.text(summary.summarise(records, list(PEERS)))
    assert next(line for line in text.splitlines() if line.startswith("| one host, 2 workers; GPT")).endswith(f" | {words} |")
    assert any(line.startswith("| one process, whole batch |") for line in text.splitlines())


def test_the_page_is_what_is_made_of_its_data() -> None:
    docs = environments.ROOT / "docs"
    assert page.text(summary.read(docs / "pictures" / "benchmarks.json")) == (docs / "benchmarks.md").read_text()


def test_a_summary_reads_the_same_from_records_and_from_its_file(found: dict[str, Any], tmp_path: Path) -> None:
    summary.write(tmp_path / "out" / "peers.json", found)
    assert (
        summary.read(tmp_path / "out" / "peers.json")
        == json.loads(json.dumps(found))
        == json.loads(json.dumps(summary.read(tmp_path / "records.jsonl")))
    )
    with pytest.raises(SystemExit, match="measure first"):
        summary.read(tmp_path / "nothing.json")


# ---- the command line


def test_options_choose_cells_peers_and_rounds(tmp_path: Path) -> None:
    def plan(*words: str) -> Measurement:
        return command.plan(command.arguments().parse_args(words), Records(tmp_path / "records.jsonl"))

    usual = plan()
    assert {cell.setting.name for cell in usual.cells} == set(SETTINGS) and {cell.model.name for cell in usual.cells} == set(MODELS)
    whole = plan("--all")
    assert len(usual.cells) < len(whole.cells) == len(SETTINGS) * len(MODELS) and len(whole.peers) == len(PEERS)
    chosen = plan(
        "--settings", "ethernet-1g", "--models", "mlp-25m", "gpt-19m", "--peers", "ddp", "--rounds", "7", "--seed", "3", "--retry"
    )
    assert [cell.name for cell in chosen.cells] == ["ethernet-1g/mlp-25m", "ethernet-1g/gpt-19m"]
    assert ([peer.name for peer in chosen.peers], chosen.rounds, chosen.seed, chosen.retry) == (["ddp"], 7, 3, True)
    assert len(plan("--models", "gpt-19m").cells) == len(SETTINGS) and len(plan("--settings", "one-host").cells) == len(MODELS)
    assert plan("--seconds", "1").cells[0].steps < whole.cells[0].steps
    quick = plan("--quick")
    assert quick.rounds == 1 and {cell.setting.name for cell in quick.cells} == {"one-host"} and len(quick.cells) == 2


@pytest.mark.jobs
def test_estimate_measures_nothing_and_fresh_keeps_the_old(tmp_path: Path) -> None:
    results = tmp_path / "peers.jsonl"
    Records(results).add(round_of("ddp", 0))
    line = [sys.executable, "-m", "benchmarks.peers", "--estimate", "--fresh", "--peers", "ddp", "--results", str(results)]
    done = subprocess.run(line, cwd=environments.ROOT, capture_output=True, text=True, timeout=60, check=True, env={**os.environ})
    assert "minutes" in done.stdout and not results.exists() and (tmp_path / "peers.jsonl.old").exists()


# ---- what programs share


@pytest.fixture
def job(tmp_path: Path) -> Any:
    from benchmarks.peers.programs import workload

    words = ("--model", "gpt-0.9m", "--workers", "2", "--steps", "4", "--warm", "1", "--out", str(tmp_path))
    return workload.Job(workload.parser(None).parse_args(words))


def test_turns_are_as_many_as_asked_for_over_epochs(job: Any, tmp_path: Path) -> None:
    few = [(torch.zeros(1), torch.zeros(1))] * 2
    seen = [job.note(torch.tensor(1.0)) for _ in job.turns(few)]
    job.finish(1, 2, "pytest")
    written = json.loads((tmp_path / "rank-1.json").read_text())
    assert len(seen) == 5 and len(written["seconds"]) == 4 and len(written["losses"]) == 5
    assert written["size"] == 2 and written["away"] is None and written["versions"]["pytest"] == pytest.__version__


def test_shares_of_all_workers_are_the_global_batch(job: Any) -> None:
    whole = next(iter(job.loader(job.batch)))[0]
    shares = torch.cat([next(iter(job.dealt(rank, 2)))[0] for rank in range(2)])
    assert sorted(map(tuple, whole.tolist())) == sorted(map(tuple, shares.tolist()))
    assert len(job.data) % job.batch == 0


def test_distance_is_relative() -> None:
    from benchmarks.peers.programs import workload

    assert workload.distance(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
