"""Runs in the guest: `afd doctor --listen` and `--peer` over soft-RoCE, with all ports and with one
down. Both ends are here."""

from __future__ import annotations

import subprocess
import sys
import threading

from afd_launch import two_hosts
from afd_launch.rails import Rails

ADDRESS = "127.0.0.1:9000"
LIMITS = {"rdma_gbits": 1e-4, "rdma_us": 1e6, "tcp_gbits": 1e-4, "tcp_us": 1e6}


def compared(what: str, only: set[str]) -> None:
    far = two_hosts.Host("cpu", Rails(("rxf0:1", "rxf1:1")), seconds=0.5)
    thread = threading.Thread(target=two_hosts.listen, args=(ADDRESS, far), daemon=True)
    thread.start()
    near = two_hosts.Host("cpu", Rails(("rxa0:1", "rxa1:1")), seconds=0.5)
    while True:
        try:
            found = two_hosts.compare_with(ADDRESS, near, LIMITS, only)
            break
        except ConnectionRefusedError:
            thread.join(0.1)
    two_hosts.say_end(ADDRESS, 0)
    thread.join()
    print(what, *found.rows, sep="\n", flush=True)


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    compared("both ports:", {"tcp", "rdma"})
    subprocess.run(["ip", "link", "set", "a1", "down"], check=True)
    compared("one port:", {"rdma"})
    sys.stdout.flush()


if __name__ == "__main__":
    main()
