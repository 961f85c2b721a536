"""torchrun's command line for one node of a job, as a list of words: paths may hold spaces."""

import sys
from dataclasses import dataclass
from pathlib import Path

RENDEZVOUS_PORT = 29400
# torchrun gives a failed job's other ranks this long; a stop in order does not go through torchrun (node.py)
SHUTDOWN_SECONDS = 10
UNUSED_SIGNAL = "SIGUSR2"  # torchrun handles this one alone: at the others it would kill ranks that are saving


@dataclass(frozen=True)
class Node:
    """One machine's place in a job.

    Attributes:
        index: from 0; node 0 hosts the rendezvous.
        nodes: of the job.
        gpus: processes of this node, one a GPU.
        rendezvous: host:port of node 0.
        job: a name that no other attempt has: ranks of an attempt that has failed cannot join the next.
        address: by which the others reach this node; None: torchrun's own choice, good on one node only.
    """

    index: int
    nodes: int
    gpus: int
    rendezvous: str
    job: str
    address: str | None = None


def torchrun_command(node: Node, recipe: Path, overrides: list[str], logs: Path) -> list[str]:
    """torchrun with c10d rendezvous, every rank's output in files under `logs`, local rank 0's on the screen too."""
    return [
        sys.executable, "-m", "torch.distributed.run",
        "--nnodes", str(node.nodes),
        "--nproc-per-node", str(node.gpus),
        "--max-restarts", "0",
        "--rdzv-backend", "c10d",
        "--rdzv-id", node.job,
        "--rdzv-endpoint", node.rendezvous,
        "--rdzv-conf", f"is_host={int(node.index == 0)},join_timeout=60,last_call_timeout=3",
        *(["--local-addr", node.address] if node.address else []),
        "--shutdown-timeout", str(SHUTDOWN_SECONDS),
        "--signals-to-handle", UNUSED_SIGNAL,
        "--log-dir", str(logs),
        "--redirects", "3",
        "--tee", "3",
        "--local-ranks-filter", "0",
        "-m", "launch", "train", str(recipe), *overrides,
    ]  # fmt: skip


def torchrun_environment(interface: str | None) -> dict[str, str]:
    """What torchrun and its ranks need beside the caller's environment.

    Args:
        interface: the network interface for gloo and NCCL, where their own choice is wrong.
    """
    # a shared store would hold the keys of earlier groups, on which a new one waits or fails
    chosen = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    if interface:
        chosen |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return chosen
