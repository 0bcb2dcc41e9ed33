"""Arguments that several commands share: the deployment file and its overrides."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from afd.config.deployment import Deployment


def add_config(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", nargs="?" if optional else None, help="a YAML file"
    )
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override a key of the file, such as pipeline.depth=2 (repeatable)",
    )


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--active",
        action="store_true",
        help="move bytes: between processes, through GPU memory, in an all-reduce",
    )
    far = parser.add_mutually_exclusive_group()
    far.add_argument("--listen", metavar="HOST:PORT", help="wait for --peer of another host")
    far.add_argument(
        "--peer", metavar="HOST:PORT", help="compare this host with the one that listens there"
    )
    more = parser.add_argument_group("with --active, --listen and --peer (docs/doctor.md)")
    more.add_argument("--device", default="auto", metavar="NAME", help="cpu, cuda or rocm")
    more.add_argument("--model", type=Path, metavar="DIR", help="compare this checkpoint")
    more.add_argument(
        "--whole-files", action="store_true", help="hash every byte of it, not samples"
    )
    more.add_argument(
        "--ports", nargs="+", default=[], metavar="DEVICE:PORT", help="RDMA ports, in rail order"
    )
    more.add_argument(
        "--addresses",
        nargs="+",
        default=[],
        metavar="ADDRESS",
        help="this host's addresses to measure over TCP, in rail order; default: that of the"
        " connection and those of the RDMA ports' interfaces",
    )
    more.add_argument(
        "--verbs-host", default="", metavar="HOST", help="this host's address for RDMA handshakes"
    )
    more.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=("slots", "copy", "all-reduce", "tcp", "rdma"),
        help="what to try; default: all",
    )
    more.add_argument(
        "--seconds", type=float, default=1.0, help="about how long each rate is measured"
    )
    more.add_argument(
        "--expect",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="limits in place of the defaults, such as rdma_gbits=360",
    )
    more.add_argument("--save", type=Path, metavar="FILE", help="write what was measured")
    more.add_argument(
        "--against", type=Path, metavar="FILE", help="compare with what --save wrote on bare metal"
    )


def add_instance_actions(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], drain: argparse.ArgumentParser
) -> None:
    """Adds the actions of `afd ctl` on single instances. drain: the parser of that action."""
    drain.add_argument(
        "member", nargs="?", metavar="MEMBER", help="only this one, such as attention-1"
    )
    add = actions.add_parser("add", help="add an instance, up to max_instances of its role")
    add.add_argument("member", metavar="ROLE", help="attention or ffn; or one, such as ffn-1")
    remove = actions.add_parser("remove", help="end an instance without losing a request")
    remove.add_argument("member", metavar="MEMBER", help="such as attention-1 or ffn-1")
    restart = actions.add_parser("restart", help="restart instances without losing a request")
    which = restart.add_mutually_exclusive_group(required=True)
    which.add_argument("member", nargs="?", metavar="MEMBER", help="such as attention-1 or ffn-0")
    which.add_argument("--rolling", action="store_true", help="every instance, one after the other")
    for name, parser in (("add", add), ("remove", remove), ("restart", restart)):
        parser.set_defaults(action=name)
        parser.add_argument(
            "--wait",
            type=float,
            default=300.0,
            metavar="SECONDS",
            help="until an instance must have done it (default 300)",
        )


def add_ray(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="place the instances on a Ray cluster (default ADDRESS: the one of this node)",
    )
    parser.add_argument(
        "--ray-cpus", type=float, default=1.0, metavar="N", help="CPUs that Ray books per process"
    )


def add_top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--control", metavar="ADDR", required=True, help="tcp://HOST:PORT")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="(default 2)")
    parser.add_argument("--once", action="store_true", help="print one reading and exit")


def add_why_slow(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action="why-slow")
    parser.add_argument(
        "--over", type=float, default=5.0, metavar="SECONDS", help="how long to watch (default 5)"
    )


def load_deployment(args: argparse.Namespace) -> Deployment:
    """Loads the deployment and checks it against its checkpoint. Raises ConfigError."""
    from afd.config.deployment import load_config
    from afd.config.resolve import check_model
    from afd_launch.rank_check import check_ranks

    deployment = load_config(args.config, args.overrides)
    check_model(deployment)
    check_ranks(deployment)
    return deployment
