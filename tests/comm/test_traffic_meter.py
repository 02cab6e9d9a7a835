from __future__ import annotations

from paceline.comm.traffic_meter import TrafficMeter


def test_bytes_are_told_apart_by_host() -> None:
    meter = TrafficMeter(1, 4, [0, 0, 1, 1])
    meter.count_sent(0, 10)
    meter.count_sent(1, 1000)  # to itself
    meter.count_sent(3, 5)
    assert (meter.traffic.within, meter.traffic.between) == (10, 5)
    meter.count_to_all(1)
    assert (meter.traffic.within, meter.traffic.between) == (11, 7)
    meter.count_ring(400)  # to rank 2, on the other host: 2 * 3/4 of it
    assert (meter.traffic.within, meter.traffic.between) == (11, 607)
    meter.count_ring(400, laps=1)
    assert meter.traffic.between == 907
    assert meter.select_hosts([3, 0]) == [1, 0]


def test_one_host_and_one_rank() -> None:
    meter = TrafficMeter(0, 1)
    meter.count_ring(100)
    meter.count_to_all(100)
    assert (meter.traffic.within, meter.traffic.between) == (0, 0)
