"""`longpitch launch` on two machines: faults of ranks, machines and cables end in progress, or soon in a sentence."""

import signal
import time

import pytest

from tests.launch.two_nodes import CABLE, Launched, Network, possible

# beside the trained time, on a machine that is busy with other tests: starting again takes 15 s of imports
IN_TIME = 100
SETTINGS = ["parallel.context=1", "checkpoint.interval=3", "train.steps=12", "model.attention.kind=swa",
            "train.eval_sequences=0", "parallel.timeout_seconds=15"]  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not possible(), reason="needs root and iproute2: ip netns add")]


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    network = Network(tmp_path_factory.mktemp("network"))
    yield network
    network.close()


@pytest.fixture
def start(network, shards, tmp_path):
    """Starts a job on the two machines, and leaves them whole afterwards."""
    started = []

    def start(nodes: str, *settings: str) -> Launched:
        options = ["--nodes", nodes, "--gpus", "1", "--hosts", str(network.hosts), "--remote-shell",
                   str(network.shell), "--interface", CABLE]  # fmt: skip
        started.append(
            Launched(tmp_path / f"run{len(started)}", options, [f"data.shards={shards}", *SETTINGS, *settings])
        )
        return started[-1]

    yield start
    for job in started:
        job.process.kill()
    network.mend()


@pytest.fixture(scope="module")
def undisturbed(network, shards, tmp_path_factory):
    """The losses of a run without any fault, and how long it took."""
    options = ["--nodes", "2", "--gpus", "1", "--hosts", str(network.hosts), "--remote-shell", str(network.shell),
               "--interface", CABLE]  # fmt: skip
    job = Launched(tmp_path_factory.mktemp("undisturbed") / "run", options, [f"data.shards={shards}", *SETTINGS])
    assert job.end() == 0, job.said()
    return job.losses()


def test_killed_rank(start, undisturbed):
    job = start("2")
    job.wait_for_step(5)
    job.ranks()[1].kill()
    assert job.end() == 0, job.said()
    assert job.losses() == undisturbed
    assert "rank 1 ended, or lost its connection" in job.said() and "started again from step" in job.said()


def test_killed_machine_ends_a_job_that_needs_two(start, network):
    job = start("2")
    job.wait_for_step(5)
    network.kill_machine(1)
    began = time.monotonic()
    assert job.end() == 1
    assert time.monotonic() - began < IN_TIME
    assert "1 of 2 machines can be used and --nodes asks for 2" in job.said() and network.names[1] in job.said()


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_machine_leaves_a_job_that_can_do_with_one(start, network, undisturbed, killed):
    job = start("1:2")
    job.wait_for_step(5)
    network.kill_machine(killed)
    assert job.end() == 0, job.said()
    assert job.losses() == pytest.approx(undisturbed, rel=1e-5)  # sums of one rank are rounded otherwise
    assert f"{network.names[killed]} is left out" in job.said() and "on 1 machine\n" in job.said()


def test_cable_cut_for_five_seconds(start, network, undisturbed):
    job = start("2")
    job.wait_for_step(5)
    network.cut()
    time.sleep(5)
    network.mend()
    assert job.end() == 0, job.said()
    assert job.losses() == undisturbed and "started again" not in job.said()


def test_cable_cut_for_good(start, network, undisturbed):
    job = start("1:2")
    job.wait_for_step(5)
    network.cut()
    assert job.end(200) == 0, job.said()
    assert job.losses() == pytest.approx(undisturbed, rel=1e-5)
    assert "did not come within 15 s" in job.said() and f"{network.names[1]} is left out" in job.said()


def test_stopped_rank(start, undisturbed):
    job = start("2")
    job.wait_for_step(5)
    job.ranks()[1].send_signal(signal.SIGSTOP)
    assert job.end(200) == 0, job.said()
    assert job.losses() == undisturbed
    assert "rank 1 did not come within 15 s" in job.said()
