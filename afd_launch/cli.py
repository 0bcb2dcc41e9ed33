"""The ``afd`` command: parses arguments; each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from afd.errors import AfdError, ConfigError
from afd_launch.arguments import (
    add_config,
    add_doctor,
    add_instance_actions,
    add_overrides,
    add_ray,
    add_top,
    add_why_slow,
    load_deployment,
)
from afd_planner.arguments import add_arguments as add_plan_arguments
from afd_planner.simulate.arguments import add_arguments as add_simulate_arguments

if TYPE_CHECKING:
    from afd.config.deployment import Deployment

_KEYS_HELP = (
    "the deployment's key file, control.keys (default: found by the address, if this user runs the"
    " deployment on this host)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 2 after an AfdError, 130 on Ctrl-C."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if args.run is _measure:
        args.rest = rest  # its own parser reads them
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    command: Callable[[argparse.Namespace], int] = args.run
    try:
        return command(args)
    except AfdError as err:
        print(f"afd: error: {err}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader closed the pipe (`afd doctor | head`); the flush at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="afd",
        description="Serve a mixture-of-experts model with attention and experts in separate"
        " processes.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = _add(commands, "serve", _serve, "start every role of a deployment on this host")
    add_config(serve)
    serve.add_argument(
        "--host",
        metavar="NAME",
        help="this host's name in the file's hosts (default: the one whose address is local)",
    )
    serve.add_argument("--log-dir", type=Path, metavar="DIR", help="one log file per role in DIR")
    add_ray(serve)
    checks = serve.add_mutually_exclusive_group()
    checks.add_argument(
        "--check",
        action="store_true",
        help="check the file, the model and this host, then exit; starts nothing",
    )
    checks.add_argument(
        "--check-file",
        action="store_true",
        help="check the file and config.json only, such as on a host without the GPUs",
    )

    for role, text in (
        ("control", "run the control plane"),
        ("ffn", "run one FFN instance"),
        ("attention", "run one attention instance (vLLM)"),
        ("prefill", "run one colocated prefill instance (vLLM)"),
        ("gateway", "run the OpenAI-compatible gateway"),
    ):
        command = _add(commands, role, _role, f"{text} of a deployment over several hosts")
        add_config(command, optional=True)
        command.set_defaults(role=role, index=0, rank=0, metrics_port=0)
        if role != "control":
            command.add_argument("--index", type=int, metavar="N", help="instance number, from 0")
        if role in ("ffn", "attention"):
            command.add_argument(
                "--metrics-port",
                type=int,
                metavar="PORT",
                help="port of /metrics, /ready and /live (default: any free port)",
            )
        if role == "ffn":
            command.add_argument("--rank", type=int, metavar="R", help="rank in it, from 0")
        command.add_argument("--control", metavar="ADDR", help="control plane, tcp://HOST:PORT")
        command.add_argument("--role-file", type=Path, help=argparse.SUPPRESS)

    keys = _add(commands, "keys", _keys, "create the key file that all hosts of a deployment share")
    keys.add_argument("file", type=Path, metavar="FILE", help="the file to write")
    keys.add_argument(
        "--member", metavar="ID", help="write the keys of this member only, such as ffn-0.1"
    )
    keys.add_argument(
        "--of", type=Path, metavar="KEYS", help="with --member: the deployment's key file"
    )

    api_key = _add(commands, "api-key", _api_key, "make an API key for a client of the gateway")
    api_key.add_argument("name", metavar="NAME", help="who gets the key; for logs and errors")
    api_key.add_argument("file", type=Path, metavar="FILE", help="the file of gateway.api_keys")
    api_key.add_argument(
        "--running", type=int, metavar="N", help="requests that run at a time (default: no limit)"
    )

    ctl = _add(commands, "ctl", _ctl, "show or change a running deployment")
    ctl.add_argument("--control", metavar="ADDR", required=True, help="tcp://HOST:PORT")
    ctl.add_argument("--keys", type=Path, metavar="FILE", help=_KEYS_HELP)
    actions = ctl.add_subparsers(metavar="ACTION", required=True)
    actions.add_parser("status", help="print the members").set_defaults(action="status")
    depth = actions.add_parser("depth", help="set the number of micro-batches in flight")
    depth.set_defaults(action="depth")
    depth.add_argument("depth", type=_depth, metavar="DEPTH", help="a number, auto or configured")
    drain = actions.add_parser("drain", help="finish running requests, refuse new ones")
    drain.set_defaults(action="drain")
    drain.add_argument("--undo", action="store_true", help="accept requests again")
    add_instance_actions(actions, drain)

    add_why_slow(actions.add_parser("why-slow", help="name the member that slows all, and why"))

    moves = actions.add_parser("rebalance", help="move experts to balance their load")
    moves.set_defaults(action="rebalance")
    _policy(moves)
    moves.add_argument(
        "--over", type=float, default=0.0, metavar="SECONDS", help="measure the load for SECONDS"
        " (default: use the load since the FFN instances started)",
    )  # fmt: skip
    moves.add_argument("-o", "--out", type=Path, metavar="FILE", help="also write the placement")
    moves.add_argument("--dry-run", action="store_true", help="print the gain, move nothing")

    top = _add(commands, "top", _top, "watch the members of a running deployment")
    top.add_argument("--keys", type=Path, metavar="FILE", help=_KEYS_HELP)
    add_top(top)

    place = _add(
        commands, "placement", _placement, "create a file for ffn.placement from a measured load"
    )
    add_config(place)
    place.add_argument(
        "--load",
        type=Path,
        required=True,
        metavar="FILE",
        help="routing loads; `afd plan --list` names the folder of ours",
    )
    place.add_argument(
        "--text", metavar="NAME", help="use only this text of the load file (default: all)"
    )
    place.add_argument("-o", "--out", type=Path, required=True, metavar="FILE")
    _policy(place)

    trace = _add(
        commands, "trace", _trace, "write the last messages of a running deployment as a timeline"
    )
    trace.add_argument("--control", metavar="ADDR", required=True, help="tcp://HOST:PORT")
    trace.add_argument("--keys", type=Path, metavar="FILE", help=_KEYS_HELP)
    trace.add_argument("-o", "--out", type=Path, metavar="FILE", default=Path("afd-trace.json"))

    demo = _add(commands, "demo", _demo, "serve the small model that comes with afd")
    demo.add_argument("--port", type=int, metavar="PORT", help="gateway port (default 8000)")
    demo.add_argument("--log-dir", type=Path, metavar="DIR", help="one log file per role in DIR")
    add_overrides(demo)

    examples = _add(commands, "examples", _examples, "write example deployments and dashboards")
    examples.add_argument("folder", type=Path, metavar="DIR", help="made if it does not exist")

    plan = _add(commands, "plan", _plan, "size a deployment, and say whether AFD is worth it")
    add_plan_arguments(plan)

    for name, text in (
        ("bench", "run a benchmark (afd bench --help)"),
        ("eval", "compare a deployment's accuracy with colocated vLLM's (afd eval --help)"),
    ):
        command = _add(commands, name, _measure, text, add_help=False)
        command.set_defaults(command=name)

    simulate = _add(commands, "simulate", _simulate, "simulate a deployment under load")
    add_simulate_arguments(simulate)

    check = _add(commands, "doctor", _doctor, "check whether this host can run afd")
    add_doctor(check)
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    *,
    add_help: bool = True,
) -> argparse.ArgumentParser:
    description = text[0].upper() + text[1:] + "."
    parser = commands.add_parser(name, help=text, description=description, add_help=add_help)
    parser.set_defaults(run=run)
    return parser


def _policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        choices=("auto", "vllm", "greedy"),
        default="auto",
        help="balancer: vLLM's EPLB or ours (auto: vLLM's if it is installed and fits)",
    )


def _depth(text: str) -> int | None:
    from afd.depth import AUTO

    if text in ("auto", "configured"):
        return AUTO if text == "auto" else None
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0, auto or configured")
    return int(text)


class _Version(argparse.Action):
    """Reads the installed version only when it is needed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"afd {importlib.metadata.version('afd')}")
        parser.exit()


# -- commands


def _serve(args: argparse.Namespace) -> int:
    deployment = load_deployment(args)
    from afd_gateway.files import check_files
    from afd_launch.serve import check_machine, serve, summary, weights_note

    if args.check or args.check_file:
        from afd_launch.memory_check import check_memory

        check_files(deployment.gateway)
        if args.check and args.host is not None:
            check_machine(deployment, args.host)
        notes = check_memory(deployment)
        if args.check and not _report(args.config, deployment):
            return 1
        notes += weights_note(deployment) if args.check_file else ""
        print(f"{args.config} is good: {summary(deployment)}{notes}")
        return 0
    if args.ray is not None:
        from afd_launch.ray_cluster.serve import serve_on_ray

        return serve_on_ray(deployment, args.ray, args.ray_cpus, args.log_dir)
    return serve(deployment, host=args.host, log_dir=args.log_dir)


def _report(config: Path, deployment: Deployment) -> bool:
    """Prints what a check of this host finds; returns whether the deployment would start."""
    from afd_launch.preflight import findings

    bad = 0
    for finding in findings(deployment):
        print(f"{finding.level:4}  {finding.what:16} {finding.text}", flush=True)
        bad += finding.level == "bad"
    if bad:
        print(f"{config} cannot be served here: {bad} of these checks failed", file=sys.stderr)
    return not bad


def _role(args: argparse.Namespace) -> int:
    from afd.config.roles import load_role
    from afd_launch.gpus import of_role
    from afd_launch.role import end_at_once, run_role, standalone_spec

    if args.role_file:
        status = run_role(load_role(args.role_file), args.role_file)
        if args.role == "ffn":
            end_at_once(status)
        return status
    if not args.config:
        raise ConfigError(f"afd {args.role} needs a deployment file; run afd {args.role} CONFIG")
    deployment = load_deployment(args)
    spec = standalone_spec(deployment, args.role, args.index, args.control, args.rank)
    return run_role(of_role(replace(spec, metrics_port=args.metrics_port)), None)


def _keys(args: argparse.Namespace) -> int:
    from afd.control.keys import CurveKeys

    if (args.member is None) != (args.of is None):
        raise ConfigError("--member and --of belong together; give both or neither")
    if args.member is not None:
        CurveKeys.load(args.of).member(args.member).save(args.file)
        print(f"{args.file} written; set control.keys to it where {args.member} runs")
        return 0
    CurveKeys.generate().save(args.file)
    print(f"{args.file} written; copy it to every host and set control.keys to it")
    return 0


def _api_key(args: argparse.Namespace) -> int:
    from afd_gateway.api_keys import add_api_key

    key = add_api_key(args.file, args.name, args.running)
    print(f"{args.file} holds the hash of this key, which is shown only now:", file=sys.stderr)
    print(key)
    return 0


def _top(args: argparse.Namespace) -> int:
    from afd_launch.top import run_top

    return run_top(args.control, args.keys, args.every, once=args.once)


def _ctl(args: argparse.Namespace) -> int:
    if args.action == "why-slow":
        from afd_launch.top import run_why_slow

        return run_why_slow(args.control, args.keys, args.over)
    from afd_launch.ctl import run_ctl
    from afd_launch.rebalance import Rebalance

    asked = None
    if args.action == "rebalance":
        asked = Rebalance(args.policy, args.over, args.out, args.dry_run)
    depth = args.depth if "depth" in args else None
    known = vars(args)
    return run_ctl(
        args.action,
        args.control,
        args.keys,
        depth,
        asked,
        undo=known.get("undo", False),
        member=known.get("member"),
        wait_s=known.get("wait", 0.0),
    )


def _placement(args: argparse.Namespace) -> int:
    deployment = load_deployment(args)
    from afd_launch.rebalance import place

    return place(deployment, args.load, args.text, args.policy, args.out)


def _trace(args: argparse.Namespace) -> int:
    from afd_launch.trace import run_trace

    return run_trace(args.control, args.keys, args.out)


def _demo(args: argparse.Namespace) -> int:
    from afd_launch.demo import demo

    return demo(port=args.port, log_dir=args.log_dir, overrides=args.overrides)


def _examples(args: argparse.Namespace) -> int:
    from afd_launch.examples import write_examples

    for path in write_examples(args.folder):
        print(path)
    return 0


def _plan(args: argparse.Namespace) -> int:
    from afd_planner.command import plan_command

    return plan_command(args)


def _measure(args: argparse.Namespace) -> int:
    """Runs a command that another package (afd_bench) registers as an entry point."""
    found = importlib.metadata.entry_points(group="afd.commands", name=args.command)
    if not found:
        raise ConfigError(f"afd {args.command} is not installed; reinstall afd")
    main: Callable[[Sequence[str]], int] = next(iter(found)).load()
    return main(args.rest)


def _simulate(args: argparse.Namespace) -> int:
    from afd_planner.simulate.command import simulate_command

    return simulate_command(args)


def _doctor(args: argparse.Namespace) -> int:
    from afd_launch.doctor import doctor

    if not (args.active or args.listen or args.peer or args.save or args.against):
        return doctor()
    from afd_launch.active import Request, active
    from afd_launch.rails import Rails

    request = Request(
        device=args.device,
        inside=args.active,
        listen=args.listen,
        peer=args.peer,
        rails=Rails(tuple(args.ports), tuple(args.addresses), args.verbs_host),
        model=args.model,
        whole_files=args.whole_files,
        only=tuple(args.only),
        seconds=args.seconds,
        expect=tuple(args.expect),
        save=args.save,
        against=args.against,
    )
    return active(request)


if __name__ == "__main__":
    sys.exit(main())
