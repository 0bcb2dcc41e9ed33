"""The ``afd`` command. Parsing only: what a command needs is imported when it runs."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from afd.errors import AfdError, ConfigError
from afd.launch.plan_arguments import add_arguments as add_plan_arguments

if TYPE_CHECKING:
    from afd.config import Deployment


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 2 after an error for the user, 130 on Ctrl-C."""
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.run
    try:
        return command(args)
    except AfdError as err:
        print(f"afd: error: {err}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader of our output left (`afd doctor | head`); keep the exit-time flush quiet
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
    _config(serve)
    serve.add_argument("--log-dir", type=Path, metavar="DIR", help="one log file per role in DIR")
    serve.add_argument("--check", action="store_true", help="check the file and the model only")

    for role, text in (
        ("control", "run the control plane"),
        ("ffn", "run one FFN instance"),
        ("attention", "run one attention instance (vLLM)"),
        ("gateway", "run the OpenAI-compatible gateway"),
    ):
        command = _add(commands, role, _role, f"{text} of a deployment over several hosts")
        _config(command, optional=True)
        command.set_defaults(role=role, index=0, rank=0)
        if role in ("ffn", "attention"):
            command.add_argument("--index", type=int, metavar="N", help="instance number, from 0")
        if role == "ffn":
            command.add_argument("--rank", type=int, metavar="R", help="rank in it, from 0")
        command.add_argument("--control", metavar="ADDR", help="control plane, tcp://HOST:PORT")
        command.add_argument("--role-file", type=Path, help=argparse.SUPPRESS)

    keys = _add(commands, "keys", _keys, "make the key file that all hosts of a deployment share")
    keys.add_argument("file", type=Path, metavar="FILE")

    ctl = _add(commands, "ctl", _ctl, "look at or change a running deployment")
    ctl.add_argument("--control", metavar="ADDR", required=True, help="tcp://HOST:PORT")
    ctl.add_argument("--keys", type=Path, metavar="FILE", help="key file, if it has one")
    actions = ctl.add_subparsers(metavar="ACTION", required=True)
    actions.add_parser("status", help="print the members").set_defaults(action="status")
    depth = actions.add_parser("depth", help="set the number of micro-batches in flight")
    depth.set_defaults(action="depth")
    depth.add_argument("depth", type=_depth, metavar="DEPTH", help="a number, auto or configured")
    actions.add_parser("drain", help="finish running requests").set_defaults(action="drain")

    moves = actions.add_parser("rebalance", help="move experts to where their load says")
    moves.set_defaults(action="rebalance")
    _policy(moves)
    moves.add_argument(
        "--over", type=float, default=0.0, metavar="SECONDS", help="measure the load for so long"
        " (default: since the FFN instances started)",
    )  # fmt: skip
    moves.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the placement too")
    moves.add_argument("--dry-run", action="store_true", help="only say what would be gained")

    place = _add(commands, "placement", _placement, "place experts by a load, for ffn.placement")
    _config(place)
    place.add_argument(
        "--load", type=Path, required=True, metavar="FILE", help="a file as in configs/routing"
    )
    place.add_argument("--text", metavar="NAME", help="one of its texts (default: all)")
    place.add_argument("-o", "--out", type=Path, required=True, metavar="FILE")
    _policy(place)

    trace = _add(commands, "trace", _trace, "write the last messages of a running deployment")
    trace.add_argument("--control", metavar="ADDR", required=True, help="tcp://HOST:PORT")
    trace.add_argument("--keys", type=Path, metavar="FILE", help="key file, if it has one")
    trace.add_argument("-o", "--out", type=Path, metavar="FILE", default=Path("afd-trace.json"))

    demo = _add(commands, "demo", _demo, "serve the small model of this repository")
    demo.add_argument("--port", type=int, metavar="PORT", help="gateway port (default 8000)")
    demo.add_argument("--log-dir", type=Path, metavar="DIR", help="one log file per role in DIR")
    _set(demo)

    check = _add(commands, "eval", _eval, "compare a deployment's accuracy with colocated vLLM's")
    _config(check)
    for name, metavar, what in (
        ("wire", "NAME,...", "wire formats (default: all)"),
        ("reduce", "NAME,...", "formats in which FFN ranks add up (default: all, where tp > 1)"),
        ("depth", "N,...", "micro-batches in flight (default: 1 to the file's)"),
        ("ffn", "N,...", "numbers of FFN instances (default: the file's)"),
        ("tp", "N,...", "ranks of each FFN instance (default: the file's)"),
        ("dtype", "NAME,...", "serving dtypes (default: the file's)"),
    ):
        check.add_argument(f"--{name}", metavar=metavar, help=what)
    check.add_argument(
        "--text", type=Path, action="append", default=[], metavar="FILE",
        help="a held-out text, documents apart by lines of --- (repeatable; default: heldout*.txt"
        " beside the weights)",
    )  # fmt: skip
    check.add_argument("--out", type=Path, metavar="DIR", help="write eval.json and eval.md there")
    check.add_argument("--page", type=Path, metavar="FILE", help="a page whose table is renewed")
    check.add_argument("--quick", action="store_true", help="less text, the deepest depth only")
    check.add_argument(
        "--at-once", type=int, metavar="N", help="servers that run at a time (default: 1)"
    )

    plan = _add(commands, "plan", _plan, "size a deployment, or find that none is worth it")
    add_plan_arguments(plan)

    bench = _add(commands, "bench", _bench, "run a benchmark (afd bench NAME --help)")
    bench.add_argument("name", metavar="NAME", help="module below afd.bench")
    bench.add_argument("rest", nargs=argparse.REMAINDER, metavar="...")

    simulate = _add(commands, "simulate", _simulate, "simulate a deployment, step by step")
    simulate.add_argument("spec", type=Path, metavar="SPEC", help="a YAML file (configs/simulate)")
    simulate.add_argument("--seed", type=int, default=0, metavar="N", help="of all random draws")
    simulate.add_argument("--trace", type=Path, metavar="FILE", help="timeline for Perfetto, JSON")
    simulate.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")

    _add(commands, "doctor", _doctor, "check what this host offers")
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(run=run)
    return parser


def _config(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", nargs="?" if optional else None, help="a YAML file"
    )
    _set(parser)


def _policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        choices=("auto", "vllm", "greedy"),
        default="auto",
        help="who balances: vLLM's EPLB, or ours (auto: vLLM's where it is installed and fits)",
    )


def _set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override a key of the file, such as pipeline.depth=2 (repeatable)",
    )


def _depth(text: str) -> int | None:
    from afd.depth import AUTO

    if text in ("auto", "configured"):
        return AUTO if text == "auto" else None
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no number above 0, auto or configured")
    return int(text)


class _Version(argparse.Action):
    """Read the installed version only when asked for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"afd {importlib.metadata.version('afd')}")
        parser.exit()


# -- commands


def _load(args: argparse.Namespace) -> Deployment:
    from afd.config import check_model, load_config

    deployment = load_config(args.config, args.overrides)
    check_model(deployment)
    return deployment


def _serve(args: argparse.Namespace) -> int:
    deployment = _load(args)
    from afd.launch.serve import serve, summary, weights_note

    if args.check:
        print(f"{args.config} is good: {summary(deployment)}{weights_note(deployment)}")
        return 0
    return serve(deployment, log_dir=args.log_dir)


def _role(args: argparse.Namespace) -> int:
    from afd.launch.role import run_role, standalone_spec
    from afd.roles import load_role

    if args.role_file:
        return run_role(load_role(args.role_file), args.role_file)
    if not args.config:
        raise ConfigError(f"afd {args.role} needs a deployment file: afd {args.role} CONFIG")
    deployment = _load(args)
    spec = standalone_spec(deployment, args.role, args.index, args.control, args.rank)
    return run_role(spec, None)


def _keys(args: argparse.Namespace) -> int:
    from afd.control.keys import CurveKeys

    CurveKeys.generate().save(args.file)
    print(f"{args.file} written; copy it to every host and name it as control.keys")
    return 0


def _ctl(args: argparse.Namespace) -> int:
    from afd.launch.ctl import run_ctl
    from afd.launch.rebalance import Rebalance

    asked = None
    if args.action == "rebalance":
        asked = Rebalance(args.policy, args.over, args.out, args.dry_run)
    depth = args.depth if "depth" in args else None
    return run_ctl(args.action, args.control, args.keys, depth, asked)


def _placement(args: argparse.Namespace) -> int:
    deployment = _load(args)
    from afd.launch.rebalance import place

    return place(deployment, args.load, args.text, args.policy, args.out)


def _trace(args: argparse.Namespace) -> int:
    from afd.trace import run_trace

    return run_trace(args.control, args.keys, args.out)


def _demo(args: argparse.Namespace) -> int:
    from afd.launch.demo import demo

    return demo(port=args.port, log_dir=args.log_dir, overrides=args.overrides)


def _eval(args: argparse.Namespace) -> int:
    deployment = _load(args)
    from afd.eval.options import options_of
    from afd.eval.run import evaluate

    return evaluate(deployment, options_of(args, deployment))


def _plan(args: argparse.Namespace) -> int:
    from afd.launch.planning import plan_command

    return plan_command(args)


def _bench(args: argparse.Namespace) -> int:
    name = f"afd.bench.{args.name}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as err:
        if err.name not in (name, "afd.bench"):
            raise ConfigError(
                f"afd bench {args.name} needs the package {err.name}; install it"
            ) from None
        raise ConfigError(
            f"there is no benchmark {args.name!r}; see docs/ for their names"
        ) from None
    status: int = module.main(args.rest)
    return status


def _simulate(args: argparse.Namespace) -> int:
    from afd.planner.simulate.main import run

    return run(args.spec, seed=args.seed, trace=args.trace, out=args.json)


def _doctor(_: argparse.Namespace) -> int:
    from afd.launch.doctor import doctor

    return doctor()


if __name__ == "__main__":
    sys.exit(main())
